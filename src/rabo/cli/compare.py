"""`rabo compare` and `rabo algorithms`: what is shown of them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rabo.algorithms import ALGORITHMS, find_algorithm
from rabo.exchange.cost import Cost
from rabo.federation.rounds import Round
from rabo.federation.solve import NAMED, make_algorithm
from rabo.runs.comparison import Comparison, Outcome, Price, compare, split_entries
from rabo.runs.experiment import Experiment
from rabo.runs.redrawing import live_display
from rabo.runs.terminal import Quiet, ToMLflow, ToTensorBoard, console, guarded, short, writers_of
from rabo.runs.writers import Start

NOTES = """\
Full model: clients train all of it, whatever their capacity; with --policy, submodels that fit.
Exchanges: T inner steps, N terms of a series, N' of them at random, K products.
Vectors: q mean slope in y, p and v solutions of the linear system, x_h mean slope in x.
Few-shot: whether one y for all tasks is needed (--heads shared), or the algorithm is for few-shot
only."""

OPTIONS = """\
Give them by flags of `rabo run` and `rabo compare`, or as --option NAME=VALUE; what is
named and has options of its own as JSON ('{"name": "neumann", "num_terms": 5}').
A task may suggest other values; config.json of a run has those that it took."""


def compare_task(
    experiment: Experiment,
    algorithms: Annotated[
        str,
        typer.Option(
            help="names from `rabo algorithms` with commas between, each with options of its own "
            "after colons (fedmbo:policy=importance:num_terms=5)"
        ),
    ] = "rabo,rafbo,fedavg",
    seeds: Annotated[int, typer.Option(help="runs of each algorithm, from --seed on")] = 3,
    baseline: Annotated[
        str | None, typer.Option(help="whose costs are 100 % (the first algorithm's)")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="value to be reached (the best that all runs reach)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the comparison (runs/...)")] = None,
    quiet: Quiet = False,
    tensorboard: ToTensorBoard = False,
    mlflow: ToMLflow = False,
) -> None:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = out or Path("runs") / f"compare-{experiment.task}-{stamp}"
    names = split_entries(algorithms)

    def work() -> Outcome:
        writers = writers_of(folder, tensorboard, mlflow)
        comparison = Comparison(experiment=experiment, algorithms=names, seeds=seeds)
        go = partial(compare, comparison, folder, baseline=baseline, target=target)
        if quiet:
            return go(writers=writers)
        with _Watch(comparison) as watch:
            return go(on_start=watch.start, writers=[watch, *writers])

    _print(guarded(work, folder, f"; the same command with --out {folder} goes on"))
    console.print(
        f"results.json, results.csv, results.png and the runs: {folder}",
        highlight=False,
        soft_wrap=True,
    )


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


def exchanges_of_algorithms() -> list[dict[str, str]]:
    """Return what rounds exchange, and what algorithms need."""
    heads = {True: "--heads shared", False: "any"}
    return [
        {
            "name": name,
            "as published": kind.kind,
            "exchanges a round": kind.exchanges,
            "vectors": kind.vectors,
            "second order": "yes" if kind.second_order else "no",
            "few-shot": "only" if kind.is_episodic else heads[kind.needs_one_y],
        }
        for name, kind in ALGORITHMS.items()
    ]


def papers_of_algorithms() -> list[dict[str, str]]:
    """Return where algorithms come from."""
    return [
        {"name": name, "class": kind.__name__, "paper": kind.paper}
        for name, kind in ALGORITHMS.items()
    ]


def options_of_algorithm(name: str) -> list[dict[str, str]]:
    """Return the options of an algorithm, with their defaults and what they may name."""
    plain = make_algorithm(name)
    return [
        {
            "option": each.name,
            "default": str(getattr(plain, each.name)),
            "or one of": ", ".join(NAMED.get(each.name, ())),
        }
        for each in fields(find_algorithm(name))
    ]


def list_algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="one of them: show its options",
            autocompletion=lambda incomplete: [n for n in ALGORITHMS if n.startswith(incomplete)],
        ),
    ] = None,
) -> None:
    """List all algorithms: what a round exchanges, and where they come from; or one's options."""
    if name is None:
        for rows in (exchanges_of_algorithms(), papers_of_algorithms()):
            _print_rows(rows)
        console.print(NOTES, highlight=False)
        return
    try:
        rows = options_of_algorithm(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    kind = find_algorithm(name)
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    about = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    console.print(f"{name}: {about}\n\n{kind.paper}", highlight=False, markup=False)
    _print_rows(rows)
    console.print(OPTIONS, highlight=False)


def _print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    table = Table(*rows[0], box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
