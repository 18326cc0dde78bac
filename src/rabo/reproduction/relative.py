"""What methods cost relative to a baseline, beside what the paper says of it."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Record, grouped

WHAT = ("multiply_adds", "bytes")


class Share(NamedTuple):
    """The cost of a method over that of its baseline, in per cent."""

    setting: str
    method: str
    label: str
    baseline: str
    what: str
    paper: float | None
    ours: float


def shares_of(grid: Grid, records: Sequence[Record]) -> list[Share]:
    """Return all that have a baseline which was run in the same setting.

    Everything counts, measurements of curvature too.
    """
    groups, found = grouped(records), []
    said = grid.content.get("paper", {}).get("relative", {})
    for setting in grid.settings:
        for baseline, methods in grid.content.get("baselines", {}).items():
            for method in methods:
                own, base = groups.get((setting, method)), groups.get((setting, baseline))
                if own and base:
                    about = grid.methods(setting)[method]
                    for what in WHAT:
                        paper = said.get(what, {}).get(about["paper"])
                        ours = 100 * _mean(own, what) / _mean(base, what)
                        label = about["label"]
                        found.append(Share(setting, method, label, baseline, what, paper, ours))
    return found


def _mean(records: Sequence[Record], what: str) -> float:
    return fmean(getattr(record, what) for record in records)


def shares_table(grid: Grid, records: Sequence[Record]) -> str:
    """Return a row per method and setting: multiply-adds and bytes, paper / ours."""
    shares = {(s.setting, s.method, s.what): s for s in shares_of(grid, records)}
    if not shares:
        return "Not run yet."
    lines = ["| setting | method | multiply-adds | bytes |", "|---|---|---|---|"]
    for setting, method in dict.fromkeys(key[:2] for key in shares):
        both = [shares[setting, method, what] for what in WHAT]
        texts = [f"{s.paper:.1f} / **{s.ours:.1f}**" if s.paper else f"{s.ours:.1f}" for s in both]
        named = grid.settings[setting].get("label", setting)
        lines.append(f"| {named} | {both[0].label} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n\nPer cent of what FedMBO costs, the paper / ours."
