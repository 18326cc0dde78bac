"""`rabo compare`: algorithms on the same data and seeds."""

from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rabo.cli.follow import Following, say
from rabo.cli.options import TaskGroup, task_command
from rabo.exchange.cost import Cost
from rabo.federation.rounds import Round
from rabo.runs.comparison import Comparison, Outcome, Price, compare, split_entries
from rabo.runs.experiment import Experiment
from rabo.runs.redrawing import live_display
from rabo.runs.terminal import console, guarded, short, writers_of
from rabo.runs.writers import Start
from rabo.tasks import TASKS

app = typer.Typer(
    cls=TaskGroup,
    help="Compare algorithms on a task: the same data and seeds, what they reach and cost.",
    epilog="Example: rabo compare digits --algorithms rabo,fedmbo,fedavg --seeds 3 --rounds 20",
    no_args_is_help=True,
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Following):
    """Options of a comparison beside those of its runs."""

    algorithms: Annotated[
        str,
        "names from `rabo algorithms` with commas between, each with options of its own "
        "after colons (fedmbo:policy=importance:num_terms=5)",
    ] = "rabo,rafbo,fedavg"
    seeds: Annotated[int, "runs of each algorithm, from --seed on"] = 3
    baseline: Annotated[str | None, "whose costs are 100 % (the first algorithm's)"] = None
    target: Annotated[float | None, "value to be reached (the best that all runs reach)"] = None
    out: Annotated[Path | None, "folder of the comparison (runs/...)"] = None


def compare_task(experiment: Experiment, options: CompareOptions) -> None:
    """Compare algorithms on a task and print two tables."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = options.out or Path("runs") / f"compare-{experiment.task}-{stamp}"
    names = split_entries(options.algorithms)

    def work() -> Outcome:
        writers = writers_of(folder, options.tensorboard, options.mlflow)
        comparison = Comparison(experiment=experiment, algorithms=names, seeds=options.seeds)
        chosen = {"baseline": options.baseline, "target": options.target}
        go = partial(compare, comparison, folder, **chosen)
        if options.quiet:
            return go(writers=writers)
        with _Watch(comparison) as watch:
            return go(on_start=watch.start, writers=[watch, *writers])

    _print(guarded(work, folder, f"; the same command with --out {folder} goes on"))
    say(f"results.json, results.csv, results.png and the runs: {folder}")


@dataclass
class _State:
    """How far an algorithm is."""

    seed: str = ""
    round: int = 0
    metric: str = ""
    cost: Cost = field(default_factory=Cost)


class _Watch:
    """A live table with a row per algorithm; plain lines where there is no terminal."""

    def __init__(self, comparison: Comparison):
        self.comparison, self.now, self.headline = comparison, "", ""
        self.rounds = comparison.experiment.rounds
        self.states = {name: _State() for name in comparison.algorithms}
        self._live = live_display(console, self._table)

    def __enter__(self) -> "_Watch":
        if console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if console.is_terminal:
            self._live.__exit__(*details)

    def start(self, entry: str, seed: int, headline: str, finished: bool) -> None:
        self.now, self.headline = entry, headline
        state = self.states[self.now]
        number = seed - self.comparison.experiment.seed + 1
        state.seed = f"{number}/{self.comparison.seeds}"
        state.round, state.metric = self.rounds if finished else 0, ""
        state.cost = Cost()
        if not console.is_terminal:
            done = ": finished before" if finished else ""
            console.print(f"{self.now} · seed {state.seed}{done}", highlight=False)

    def begin(self, start: Start) -> None:
        for done in start.history:
            self._count(done)

    def end(self, status: str) -> None:
        """Stay: the next run follows."""

    def add(self, done: Round) -> None:
        self._count(done)
        state = self.states[self.now]
        if not console.is_terminal and state.round % max(1, self.rounds // 5) == 0:
            console.print(f"  round {state.round}/{self.rounds}  {state.metric}".rstrip())

    def _count(self, done: Round) -> None:
        state = self.states[self.now]
        state.round, state.cost = done.round + 1, state.cost.plus(done.cost)
        if self.headline in done.metrics:
            state.metric = f"{self.headline} {done.metrics[self.headline]:.4g}"

    def _table(self) -> Table:
        table = Table("algorithm", "seed", "round", "newest", "multiply-adds", "bytes")
        for name, state in self.states.items():
            traffic = state.cost.bytes_up + state.cost.bytes_down
            table.add_row(
                f"[bold]{name}[/]" if name == self.now else name,
                state.seed,
                f"{state.round}/{self.rounds}" if state.seed else "",
                state.metric,
                short(state.cost.multiply_adds),
                f"{short(traffic)}B",
            )
        return table


def _print(outcome: Outcome) -> None:
    headline, seeds = outcome.headline.replace("_", " "), outcome.comparison.seeds
    over = "seeds" if seeds > 1 else "test tasks"
    known = any(row.interval is not None for row in outcome.rows)
    reached = Table(
        *("algorithm", f"{headline} (± 95 % over {over})" if known else headline),
        *("multiply-adds", "bytes"),
        title=f"{outcome.comparison.experiment.task}, seeds: {seeds}, "
        f"costs relative to {outcome.baseline}",
    )
    priced = Table(
        *("algorithm", "rounds", "multiply-adds", "bytes"),
        title=f"to reach {headline} {outcome.target:.4g}{', mean of seeds' if seeds > 1 else ''}",
    )
    for row in outcome.rows:
        interval = "" if row.interval is None else f" ± {row.interval:.2g}"
        reached.add_row(
            row.algorithm,
            f"{row.value:.4g}{interval}",
            f"{short(row.multiply_adds)} ({row.relative_multiply_adds:.0%})",
            f"{short(row.bytes)}B ({row.relative_bytes:.0%})",
        )
        priced.add_row(row.algorithm, *_price(row.to_target, seeds))
    for table in (reached, priced):
        table.box = SIMPLE_HEAD
        console.print(table)


def _price(price: Price | None, seeds: int) -> list[str]:
    if price is None:
        return ["not reached"]
    some = f" ({price.num_reached}/{seeds} seeds)" if price.num_reached < seeds else ""
    return [f"{price.rounds:.4g}{some}", short(price.multiply_adds), f"{short(price.bytes)}B"]


for _name, _kind in TASKS.items():
    _example = f"Example: rabo compare {_name} --algorithms rabo,fedavg --seeds 2 {_kind.example}"
    _command = task_command(_name, compare_task, CompareOptions, without="algorithm")
    app.command(_name, epilog=_example)(_command)
