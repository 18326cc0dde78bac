"""Results that later checks use."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rabo.checking.clock import Clock
from rabo.checking.point import Point
from rabo.checking.report import Comparison, Finding, Spectrum


@dataclass(frozen=True, eq=False)
class Measured:
    """Values measured so far, and the rows about them."""

    own: Point  # in the precision of the problem
    clock: Clock
    seed: int
    findings: tuple[Finding, ...] = ()
    point: Point | None = None  # in float64 where the losses run in it
    has_second_order: bool = True
    uses: Mapping[str, str] = field(default_factory=dict)
    repeat_gap: float | None = None
    inner_slope: float | None = None
    is_solved: bool = False  # ∇_y g is zero there
    is_minimum: bool = False  # and the mean of the Hessians is not indefinite
    is_unique: bool = False  # f is flat wherever the mean of the Hessians is singular
    hessians: tuple[Tensor, ...] = ()  # dense, in float64; none where y is large
    spectra: tuple[Spectrum, ...] = ()
    largest_curvature: float | None = None
    is_convex: bool | None = None
    hypergradient: Tensor | None = None  # flat, from a solved implicit system
    direct_slope: Tensor | None = None  # ∇_x f
    directions: Tensor | None = None  # of x, orthonormal rows
    slopes: Tensor | None = None  # of Φ along them
    hypergradient_gap: float | None = None
    estimators: Mapping[str, Comparison] = field(default_factory=dict)
    local: Comparison | None = None
    direct: Comparison | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    beta: float | None = None

    @property
    def here(self) -> Point:
        """The point at which hypergradients are checked."""
        return self.own if self.point is None else self.point

    @property
    def fails(self) -> bool:
        return any(f.verdict == "fails" for f in self.findings)

    def plus(self, *findings: Finding, **values: Any) -> "Measured":
        return replace(self, findings=(*self.findings, *findings), **values)
