"""What the results are meant to show, and whether they do: every verdict comes with its numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

from rabo.reproduction.grid import Grid, load_grid
from rabo.reproduction.records import Cell, cells_of, read_records
from rabo.reproduction.relative import Share, shares_of

Cells: TypeAlias = Mapping[tuple[str, str], Cell]
AIMS = {"5-way-1-shot": 95.0, "5-way-5-shot": 98.5, "20-way-1-shot": 85.0, "20-way-5-shot": 95.0}
SUBMODELS = ("static", "oap", "fedrolex", "fiarse")
FEW_SHOT_COSTS = {("rabo", "multiply_adds"): 26.7, ("rafbo", "multiply_adds"): 17.8}
FEW_SHOT_COSTS |= {("rabo", "bytes"): 26.7, ("rafbo", "bytes"): 26.7}
LOSS_COSTS = {("rabo", "multiply_adds"): 50.0, ("rafbo", "multiply_adds"): 25.0}
LOSS_COSTS |= {("rabo", "bytes"): 25.0, ("rafbo", "bytes"): 25.0}
NAMES = {"rabo": "RABO", "rafbo": "RAFBO", "multiply_adds": "multiply-adds", "bytes": "bytes"}
HEADS = {"": "", "-shared": " with a shared head"}
SLACK = 0.05  # per cent of a cost: the paper's numbers have one decimal


class Verdict(NamedTuple):
    """One target in one setting."""

    target: str
    setting: str
    numbers: str
    met: bool | None  # None: not run yet


class Results:
    """The cells of every grid, read when asked for."""

    def __init__(self, out: Path, load: Callable[[str], Grid] = load_grid):
        self.out, self._load = out, load

    def cells(self, name: str) -> Cells:
        grid = self._load(name)
        found = cells_of(grid, read_records(grid, self.out))
        return {(cell.setting, cell.method): cell for cell in found}

    def shares(self, name: str) -> list[Share]:
        grid = self._load(name)
        return shares_of(grid, read_records(grid, self.out))

    def paper(self, name: str, setting: str, label: str) -> float:
        return self._load(name).content["paper"]["numbers"][setting][label]


def verdicts(results: Results) -> Iterator[Verdict]:
    """Yield all targets."""
    yield from _against_the_paper(results)
    yield from _second_order_free(results)
    yield from _above_single_level(results)
    yield from _costs(results, "figure-cost", FEW_SHOT_COSTS, list(AIMS), ("", "-shared"))
    yield from _coverage(results)
    yield from _scalability(results)
    yield from _loss_tuning(results)
    yield from _costs(results, "figure-tuning-cost", LOSS_COSTS, ["cifar-10"], ("",))


def _values(cells: Cells, setting: str, *methods: str) -> list[float] | None:
    """Return what methods reach in a setting, if all of them were run."""
    found = [cells.get((setting, method)) for method in methods]
    values = [cell.value for cell in found if cell is not None and cell.value is not None]
    return values if len(values) == len(methods) else None


def _at_least(
    target: str, setting: str, cells: Cells, method: str, bounds: Mapping[str, float]
) -> Verdict:
    values = _values(cells, setting, method)
    asked = ", ".join(f"{name} {bound:.2f}" for name, bound in bounds.items())
    if values is None:
        return Verdict(target, setting, "", None)
    return Verdict(target, setting, f"{values[0]:.2f}; {asked}", values[0] >= max(bounds.values()))


def _against_the_paper(results: Results) -> Iterator[Verdict]:
    cells = results.cells("table-1")
    for setting in AIMS:
        paper = {"paper": results.paper("table-1", setting, "RABO")}
        text = "RABO with a shared head at or above the paper's RABO"
        yield _at_least(text, setting, cells, "rabo-shared", paper)
    for setting in AIMS:
        paper = {"paper": results.paper("table-1", setting, "FedMBO")}
        text = "RABO with a head per task at or above the paper's full-model FedMBO"
        yield _at_least(text, setting, cells, "rabo", paper)
    for setting, aim in AIMS.items():
        yield _at_least("aim of RABO with a head per task", setting, cells, "rabo", {"aim": aim})


def _second_order_free(results: Results) -> Iterator[Verdict]:
    cells = results.cells("table-1")
    for heads in ("-shared", ""):
        target = f"RAFBO{HEADS[heads]} within 1 point of RABO at lower or equal cost"
        for setting in AIMS:
            own, other = (cells.get((setting, f"{name}{heads}")) for name in ("rafbo", "rabo"))
            if not own or not other or own.value is None or other.value is None:
                yield Verdict(target, setting, "", None)
                continue
            work = round(100 * own.multiply_adds / other.multiply_adds, 1)  # as it is shown
            near = own.value >= other.value - 1
            numbers = f"{own.value:.2f} and {other.value:.2f}, multiply-adds {work} %"
            yield Verdict(
                target, setting, numbers, near and work <= 100 and own.bytes <= other.bytes
            )


def _above_single_level(results: Results) -> Iterator[Verdict]:
    cells = results.cells("table-1")
    for heads in ("-shared", ""):
        named = f"RABO{HEADS[heads]}"
        for setting in AIMS:
            own = cells.get((setting, f"rabo{heads}"))
            others = [cells.get((setting, f"{name}{heads}")) for name in SUBMODELS]
            target = f"{named} above every single-level submodel baseline by more than the interval"
            known = [cell for cell in others if cell is not None and cell.value is not None]
            if own is None or own.value is None or not known:
                yield Verdict(target, setting, "", None)
                continue
            best = max(known, key=lambda cell: cell.value or 0.0)
            gap = own.value - (best.value or 0.0)
            interval = max(own.interval or 0.0, best.interval or 0.0)
            numbers = f"{gap:+.2f} over {best.method} ({len(known)} of 4 run), ± {interval:.2f}"
            yield Verdict(target, setting, numbers, gap > interval if len(known) == 4 else None)


def _costs(
    results: Results,
    name: str,
    bounds: Mapping[tuple[str, str], float],
    settings: list[str],
    variants: tuple[str, ...],
) -> Iterator[Verdict]:
    shares = {(s.setting, s.method, s.what): s.ours for s in results.shares(name)}
    for (method, what), bound in bounds.items():
        for variant in variants:
            for setting in settings:
                target = f"{NAMES[method]}{HEADS[variant]}: {NAMES[what]} at most "
                target += f"{bound:g} % of FedMBO's"
                share = shares.get((setting, f"{method}{variant}", what))
                if share is None:
                    yield Verdict(target, setting, "", None)
                else:
                    yield Verdict(target, setting, f"{share:.1f} %", share <= bound + SLACK)


def _coverage(results: Results) -> Iterator[Verdict]:
    cells = results.cells("figure-coverage")
    for method in ("rabo", "rafbo", "rabo-shared", "rafbo-shared"):
        one, two = (_values(cells, f"coverage-{c}", method) for c in (1, 2))
        target = "C*_x = 2 above C*_x = 1"
        if one is None or two is None:
            yield Verdict(target, method, "", None)
        else:
            yield Verdict(target, method, f"{two[0]:.2f} and {one[0]:.2f}", two[0] > one[0])


def _scalability(results: Results) -> Iterator[Verdict]:
    cells = results.cells("table-2")
    for shots in (1, 5):
        for method in ("rabo", "rafbo", "rabo-shared", "rafbo-shared"):
            few, many = (
                _values(cells, f"5-way-{shots}-shot-{n}-clients", method) for n in (10, 50)
            )
            target, setting = "50 clients at most 4 points below 10", f"{method} {shots}-shot"
            if few is None or many is None:
                yield Verdict(target, setting, "", None)
            else:
                numbers = f"{many[0]:.2f} and {few[0]:.2f}"
                yield Verdict(target, setting, numbers, many[0] >= few[0] - 4)


def _loss_tuning(results: Results) -> Iterator[Verdict]:
    cells, setting = results.cells("figure-tuning"), "cifar-10"
    for method, gain in {"rabo": 9.97, "rafbo": 5.53}.items():
        target = f"{NAMES[method]} at least {gain} points above the mean of the submodel baselines"
        own, others = _values(cells, setting, method), _values(cells, setting, *SUBMODELS)
        if own is None or others is None:
            yield Verdict(target, setting, "", None)
        else:
            found = own[0] - fmean(others)
            yield Verdict(target, setting, f"{found:+.2f}", found >= gain)
    both = _values(cells, setting, "rabo", "fedavg")
    target = "RABO at or above full FedAvg without tuning"
    if both is None:
        yield Verdict(target, setting, "", None)
    else:
        yield Verdict(target, setting, f"{both[0]:.2f} and {both[1]:.2f}", both[0] >= both[1])


def targets_table(results: Results) -> str:
    """Return all verdicts, those of a target together."""
    words = {True: "met", False: "**missed**", None: "not run yet"}
    lines = ["| target | setting | ours | |", "|---|---|---|---|"]
    for target, own in groupby(verdicts(results), key=lambda verdict: verdict.target):
        for met, some in groupby(own, key=lambda verdict: verdict.met):
            for found in _joined(list(some)) if met is None else some:
                lines.append(f"| {target} | {found.setting} | {found.numbers} | {words[met]} |")
                target = ""
    return "\n".join(lines)


def _joined(waiting: Sequence[Verdict]) -> list[Verdict]:
    """Put what was not run at all into one line."""
    begun = [verdict for verdict in waiting if verdict.numbers]
    rest = ", ".join(verdict.setting for verdict in waiting if not verdict.numbers)
    return begun + ([Verdict(waiting[0].target, rest, "", None)] if rest else [])
