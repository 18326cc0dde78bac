"""Findings about a bilevel problem, as fields and in one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal, NamedTuple, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rabo.hypergradients import ESTIMATORS

Verdict: TypeAlias = Literal["ok", "warning", "fails", "skipped"]
COLOURS = {"ok": "green", "warning": "yellow", "fails": "red", "skipped": "dim"}
WIDTH = 100  # of the printed table


class ProblemCheckError(ValueError):
    """A check of a bilevel problem failed and `raise_exception` was set."""


class Finding(NamedTuple):
    """One row of the table."""

    check: str
    result: str
    verdict: Verdict = "ok"
    advice: str = ""


class Spectrum(NamedTuple):
    """The extreme eigenvalues of one client's ∇²_yy g_i."""

    largest: float
    smallest: float  # apart from flat directions
    is_exact: bool  # dense eigenvalues; otherwise Lanczos, and the smallest is an upper bound
    num_flat: int = 0  # directions without curvature, counted where eigenvalues are exact
    flat_share: float = 0.0  # of ∇_y f_i along them

    @property
    def condition(self) -> float:
        return self.largest / self.smallest if self.smallest > 0 else float("inf")


class Comparison(NamedTuple):
    """Error, cosine and length of a vector against the true hypergradient."""

    error: float  # ‖a − b‖ / ‖b‖
    cosine: float
    length: float  # ‖a‖ / ‖b‖


@dataclass(frozen=True, kw_only=True)
class ProblemCheck:
    """Findings of `rabo.check`.

    Print it to see the table. Fields of checks that did not run keep their defaults.
    """

    findings: tuple[Finding, ...]
    num_clients: int
    num_checked: int
    precision: str = ""  # of the reference solutions: "float64" or the problem's own
    uses: Mapping[str, str] = field(default_factory=dict)  # {"outer y": "used"}, "ignored", "cut"
    repeat_gap: float | None = None  # relative difference of repeated evaluations
    spectra: tuple[Spectrum, ...] = ()  # one per client, at the inner minimum
    largest_curvature: float | None = None  # over clients, at the start and at the inner minimum
    is_convex: bool | None = None  # no negative curvature was found in y
    inner_slope: float | None = None  # ‖∇_y g‖ at the inner minimum over that at the start
    hypergradient_gap: float | None = None  # implicit hypergradient against differences of Φ
    estimators: Mapping[str, Comparison] = field(default_factory=dict)
    local: Comparison | None = None  # the mean of local hypergradients against the global one
    direct: Comparison | None = None  # ∇_x f alone against the global hypergradient
    options: Mapping[str, Any] = field(default_factory=dict)  # for rabo.solve
    beta: float | None = None  # 1/(2 l_{g,1})
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check fails; warnings pass."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.verdict == "fails")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.verdict == "warning")

    def __getitem__(self, check: str) -> Finding:
        """Return the row of a check by its name."""
        return {f.check: f for f in self.findings}[check]

    def __rich__(self) -> Table:
        title = f"{self.num_checked} of {self.num_clients} clients, one batch each"
        table = Table(box=SIMPLE_HEAD, title=title, expand=True)
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("result, advice", ratio=1)
        for f in self.findings:
            shown = Text(f"{f.result}\n→ {f.advice}" if f.advice else f.result)
            name = f"  {f.check}" if f.check in ESTIMATORS else f.check
            table.add_row(name, Text(f.verdict, COLOURS[f.verdict]), shown)
        return table

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())
