"""What the results are meant to show, and whether they do: every verdict comes with its numbers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from statistics import fmean
from typing import NamedTuple

from rabo.reproduction.records import Cell, Difference, difference
from rabo.reproduction.results import Cells, Records, Results

AIMS = {"5-way-1-shot": 95.0, "5-way-5-shot": 98.5, "20-way-1-shot": 85.0, "20-way-5-shot": 95.0}
SUBMODELS = ("static", "oap", "fedrolex", "fiarse")
NAMES = {"rabo": "RABO", "rafbo": "RAFBO", "multiply_adds": "multiply-adds", "bytes": "bytes"}
HEADS = {"": "", "-shared": " with a shared head"}
SLACK = 0.05  # percentage points of a cost: the paper's numbers have one decimal
MET, ROUNDED, MISSED = "met", "met, rounded", "**missed**"
DIVERGED, WAITING = "**diverged**", "not run yet"
ONE_SEED, NO_SEED = " (one seed)", "no seed in common"
OUTCOMES = (MISSED, DIVERGED, ROUNDED, MET, WAITING)  # as they are told


class Verdict(NamedTuple):
    """One target in one setting."""

    target: str
    setting: str
    numbers: str
    outcome: str  # one of OUTCOMES


def verdicts(results: Results) -> Iterator[Verdict]:
    """Yield all targets."""
    yield from _against_the_paper(results)
    yield from _second_order_free(results)
    yield from _above_single_level(results)
    yield from _costs(results, "figure-cost", list(AIMS), ("", "-shared"))
    yield from _coverage(results)
    yield from _scalability(results)
    yield from _loss_tuning(results)
    yield from _costs(results, "figure-tuning-cost", ["cifar-10"], ("",))


def _judge(
    target: str,
    setting: str,
    cells: Sequence[Cell | None],
    judge: Callable[[Sequence[float], Sequence[Cell]], tuple[str, str]],
) -> Verdict:
    """Ask for numbers and an outcome, given what was reached, if nothing diverged."""
    run = [cell for cell in cells if cell is not None]
    values = [cell.value for cell in run if cell.value is not None]
    if len(values) < len(run):
        wild = ", ".join(cell.method for cell in run if cell.value is None)
        return Verdict(target, setting, f"{wild} diverged", DIVERGED)
    if len(run) < len(cells):
        return Verdict(target, setting, "", WAITING)
    return Verdict(target, setting, *judge(values, run))


def _if(is_met: bool) -> str:
    return MET if is_met else MISSED


def _at_most(cost: float, bound: float) -> str:
    """Judge a cost in per cent by the decimals that its bound has."""
    if cost <= bound:
        return MET
    return ROUNDED if cost <= bound + SLACK else MISSED


def _at_least(target: str, setting: str, cell: Cell | None, name: str, bound: float) -> Verdict:
    def judge(values: Sequence[float], cells: Sequence[Cell]) -> tuple[str, str]:
        value, interval = values[0], cells[0].interval or 0.0
        close = ", within the interval" if abs(value - bound) <= interval else ""
        numbers = f"{value:.2f} ± {interval:.2f}{_alone(cells[0].num_seeds)}"
        return f"{numbers}; {name} {bound:.2f}{close}", _if(value >= bound)

    return _judge(target, setting, [cell], judge)


def _against_the_paper(results: Results) -> Iterator[Verdict]:
    cells = results.cells("table-1")
    for setting in AIMS:
        bound = results.paper("table-1", setting, "RABO")
        text = "RABO with a shared head at or above the paper's RABO"
        yield _at_least(text, setting, cells.get((setting, "rabo-shared")), "paper", bound)
    for setting in AIMS:
        bound = results.paper("table-1", setting, "FedMBO")
        text = "RABO with a head per task at or above the paper's full-model FedMBO"
        yield _at_least(text, setting, cells.get((setting, "rabo")), "paper", bound)
    for setting, aim in AIMS.items():
        text = "aim of RABO with a head per task"
        yield _at_least(text, setting, cells.get((setting, "rabo")), "aim", aim)


def _second_order_free(results: Results) -> Iterator[Verdict]:
    cells, records = results.cells("table-1"), results.finished("table-1")

    def judge(values: Sequence[float], cells: Sequence[Cell]) -> tuple[str, str]:
        own, other = cells
        found = difference(*(records[cell.setting, cell.method] for cell in cells))
        if found is None:
            return NO_SEED, WAITING
        work = 100 * own.multiply_adds / other.multiply_adds
        cheap = own.multiply_adds <= other.multiply_adds and own.bytes <= other.bytes
        numbers = f"{_two(values)}, {_told_of(found)}, multiply-adds {work:.3f} %"
        return numbers, _if(found.value >= -1 and cheap)

    for heads in ("-shared", ""):
        target = f"RAFBO{HEADS[heads]} within 1 point of RABO at lower or equal cost"
        for setting in AIMS:
            both = [cells.get((setting, f"{name}{heads}")) for name in ("rafbo", "rabo")]
            yield _judge(target, setting, both, judge)


def _above_single_level(results: Results) -> Iterator[Verdict]:
    cells, records = results.cells("table-1"), results.finished("table-1")
    for heads in ("-shared", ""):
        target = f"RABO{HEADS[heads]} above every single-level submodel baseline by more than the "
        target += "interval of the difference"
        for setting in AIMS:
            own, *others = ((setting, f"{name}{heads}") for name in ("rabo", *SUBMODELS))
            nearest = _nearest(records, own, others)
            asked = [cells.get(key) for key in (own, *others)]
            found = _judge(target, setting, asked, lambda *_, nearest=nearest: nearest)
            yield found._replace(numbers=nearest[0]) if found.outcome == WAITING else found


def _nearest(
    records: Records,
    own: tuple[str, str],
    others: Sequence[tuple[str, str]],
) -> tuple[str, str]:
    """Return the comparison with the least margin, and whether it is above if all can be made."""
    gaps = {key[1]: difference(records.get(own, []), records.get(key, [])) for key in others}
    found = {name: gap for name, gap in gaps.items() if gap is not None}
    if not found:
        return "", WAITING
    name = min(found, key=lambda name: found[name].value - found[name].interval)
    numbers = f"{_told_of(found[name])} over {name}"
    if len(found) < len(others):
        rest = ", ".join(name for name in gaps if name not in found)
        return f"{numbers}; not compared yet: {rest}", WAITING
    return numbers, _if(found[name].value > found[name].interval)


def _costs(
    results: Results, name: str, settings: list[str], variants: tuple[str, ...]
) -> Iterator[Verdict]:
    cells, bounds = results.cells(name), results.grid(name).content["paper"]["relative"]
    for what, method, variant in product(("multiply_adds", "bytes"), ("rabo", "rafbo"), variants):
        bound = bounds[what][NAMES[method]]
        target = f"{NAMES[method]}{HEADS[variant]}: {NAMES[what]} at most {bound:g} % of FedMBO's"
        for setting in settings:
            both = [cells.get((setting, f"{each}{variant}")) for each in (method, "fedmbo")]
            yield _judge(target, setting, both, partial(_share, what, bound))


def _share(what: str, bound: float, _: Sequence[float], cells: Sequence[Cell]) -> tuple[str, str]:
    own, base = (getattr(cell, what) for cell in cells)
    share = 100 * own / base
    return f"{share:.3f} %", _at_most(share, bound)


def _coverage(results: Results) -> Iterator[Verdict]:
    cells, records = results.cells("figure-coverage"), results.finished("figure-coverage")
    for method in ("rabo", "rafbo", "rabo-shared", "rafbo-shared"):
        both = [(f"coverage-{number}", method) for number in (2, 1)]
        yield _apart("C*_x = 2 above C*_x = 1", method, cells, records, both)


def _scalability(results: Results) -> Iterator[Verdict]:
    cells, records = results.cells("table-2"), results.finished("table-2")
    for shots in (1, 5):
        for method in ("rabo", "rafbo", "rabo-shared", "rafbo-shared"):
            both = [(f"5-way-{shots}-shot-{n}-clients", method) for n in (50, 10)]
            target, setting = "50 clients at most 4 points below 10", f"{method} {shots}-shot"
            yield _apart(target, setting, cells, records, both, is_met=lambda gap: gap >= -4)


def _apart(
    target: str,
    setting: str,
    cells: Cells,
    records: Records,
    both: Sequence[tuple[str, str]],
    is_met: Callable[[float], bool] = lambda gap: gap > 0,
) -> Verdict:
    """Judge how far one is above the other, over the seeds that both have."""

    def judge(*_: object) -> tuple[str, str]:
        found = difference(*(records[key] for key in both))
        if found is None:
            return NO_SEED, WAITING
        gap, interval = found.value, found.interval
        close = ", within the interval" if is_met(gap - interval) != is_met(gap + interval) else ""
        return f"{_told_of(found)}{close}", _if(is_met(gap))

    return _judge(target, setting, [cells.get(key) for key in both], judge)


def _loss_tuning(results: Results) -> Iterator[Verdict]:
    cells, setting = results.cells("figure-tuning"), "cifar-10"

    def alone(cells: Sequence[Cell]) -> str:
        return _alone(min(cell.num_seeds for cell in cells))

    def judge(gain: float, values: Sequence[float], cells: Sequence[Cell]) -> tuple[str, str]:
        found = values[0] - fmean(values[1:])
        least = values[0] - max(values[1:])
        numbers = f"{found:+.2f} (over the best of them {least:+.2f}){alone(cells)}"
        return numbers, _if(found >= gain)

    gains = results.grid("figure-tuning").content["paper"]["gains"]
    for method in ("rabo", "rafbo"):
        gain = gains[NAMES[method]]
        target = f"{NAMES[method]} at least {gain} points above the mean of the submodel baselines"
        asked = [cells.get((setting, each)) for each in (method, *SUBMODELS)]
        yield _judge(target, setting, asked, partial(judge, gain))
    both = [cells.get((setting, method)) for method in ("rabo", "fedavg")]
    target = "RABO at or above full FedAvg without tuning"
    yield _judge(target, setting, both, lambda v, c: (_two(v) + alone(c), _if(v[0] >= v[1])))


def _alone(num_seeds: int) -> str:
    return ONE_SEED if num_seeds == 1 else ""


def _told_of(found: Difference) -> str:
    return f"{found.value:+.2f} ± {found.interval:.2f}{_alone(found.num_seeds)}"


def _two(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} and {values[1]:.2f}"


def targets_table(results: Results, reasons: Mapping[str, str]) -> str:
    """Return all verdicts, those of a target together, and why some are missed if it is known."""
    found = list(verdicts(results))
    counts = Counter(verdict.outcome for verdict in found)
    told = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
    lines = [f"{len(found)} verdicts, one for each target in each of its settings: {told}.", ""]
    lines += ["| target | ours | verdict |", "|---|---|---|"]
    for target, own in groupby(found, key=lambda verdict: verdict.target):
        named = target.replace("*", r"\*")
        ordered = sorted(own, key=lambda verdict: OUTCOMES.index(verdict.outcome))
        for outcome, some in groupby(ordered, key=lambda verdict: verdict.outcome):
            lines.append(f"| {named} | {_told(list(some))} | {outcome} |")
            named = ""
    missed = dict.fromkeys(verdict.target for verdict in found if verdict.outcome == MISSED)
    known = [f"- {name}: {reasons[name]}" for name in missed if name in reasons]
    if known:
        lines += ["", "Why targets are missed, where it is known:", "", *known]
    return "\n".join(lines)


def _told(some: Sequence[Verdict]) -> str:
    """Put the settings of a target into one cell, those without numbers into one line of it."""
    begun = [f"{verdict.setting}: {verdict.numbers}" for verdict in some if verdict.numbers]
    rest = ", ".join(verdict.setting for verdict in some if not verdict.numbers)
    return "<br>".join(begun + ([rest] if rest else []))
