"""Iterative differentiation: backwards through inner gradient steps (ITD)."""

from dataclasses import dataclass
from math import ceil, sqrt

import torch
from torch import Generator, Tensor

from rabo.hypergradients.linearisation import (
    Estimate,
    Exact,
    HypergradientEstimator,
    View,
    gradient,
)
from rabo.hypergradients.neumann import safe_curvature
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class Unrolled(HypergradientEstimator):
    """d/dx f(x, y_K(x)) with y_{t+1} = y_t − η∇_y g(x, y_t), started from the given y.

    Only the last `truncation` steps are differentiated. Memory is bounded: every ⌈√K⌉-th y is
    stored, the others are recomputed segment by segment, and one step's graph lives at a time.
    The residual is ‖∇_y g(y_K)‖ / ‖∇_y g(y_0)‖.
    """

    num_steps: int = 20
    step_size: float | None = None  # None: 1/(2 l_{g,1}), measured at y
    truncation: int | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if self.step_size is not None and self.step_size <= 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        if self.truncation is not None and not 1 <= self.truncation <= self.num_steps:
            raise ValueError(
                f"truncation must lie in 1..{self.num_steps} (num_steps), got {self.truncation}"
            )

    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate:
        view = View(problem, x, y, batch, one_pass=True)
        descent = _Descent(view, self._step(view))
        skipped = self.num_steps - (self.truncation or self.num_steps)
        start = descent.forward(view.y, skipped)
        depth = self.num_steps - skipped
        marks = descent.checkpoints(start, depth)
        slope, outer = view.outer_slopes(marks[-1][1])
        cross = descent.backward(marks, slope)
        residual = descent.slope(marks[-1][1]).norm() / descent.first.norm().clamp(min=1e-30)
        value = view.pull_back(cross, outer)
        return Estimate(value, residual, self.num_steps, descent.evaluations + 1).checked()

    def _step(self, view: View) -> float | Tensor:
        if self.step_size is not None:
            return self.step_size
        return 1 / (2 * safe_curvature(Exact(view).product, view.y))


class _Descent:
    """Inner gradient descent and its reverse."""

    def __init__(self, view: View, step: float | Tensor):
        self.view, self.step = view, step
        self.evaluations = 0
        self.first = torch.zeros(1)

    def slope(self, flat: Tensor) -> Tensor:
        y = flat.detach().requires_grad_()
        self.evaluations += 1
        return gradient(self.view.inner(y), [y])[0]

    def forward(self, flat: Tensor, num_steps: int) -> Tensor:
        for _ in range(num_steps):
            flat = self._advance(flat)
        return flat

    def _advance(self, flat: Tensor) -> Tensor:
        slope = self.slope(flat)
        if self.evaluations == 1:
            self.first = slope
        return flat - self.step * slope

    def checkpoints(self, flat: Tensor, depth: int) -> list[tuple[int, Tensor]]:
        """Go forward and store every ⌈√depth⌉-th point, and the last."""
        stride = ceil(sqrt(depth))
        marks = [(0, flat)]
        for t in range(1, depth + 1):
            flat = self._advance(flat)
            if t % stride == 0 or t == depth:
                marks.append((t, flat))
        return marks

    def backward(self, marks: list[tuple[int, Tensor]], slope: Tensor) -> list[Tensor]:
        """λ_t = λ_{t+1} − η∇²_yy g(y_t)λ_{t+1}; collect η∇²_zy g(y_t)λ_{t+1}."""
        z = self.view.z_leaves
        total = [torch.zeros_like(t) for t in z]
        for (begin, point), (end, _) in zip(reversed(marks[:-1]), reversed(marks[1:]), strict=True):
            segment = [point]
            for _ in range(end - begin - 1):
                segment.append(self.forward(segment[-1], 1))
            for flat in reversed(segment):
                pulled, cross = self._reverse(flat, slope, z)
                slope = slope - self.step * pulled
                for t, c in zip(total, cross, strict=True):
                    t.add_(self.step * c)
        return total

    def _reverse(self, flat: Tensor, p: Tensor, z: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return ∇²_yy g·p and ∇²_zy g·p at one point from one graph."""
        y = flat.detach().requires_grad_()
        self.evaluations += 2
        (slope,) = gradient(self.view.inner(y), [y], create_graph=True)
        pulled, *cross = gradient(slope, [y, *z], p)
        return pulled, cross
