"""A bilevel problem at one point, as a linear system: ∇²_yy g·v = ∇_y f, then ∇_x f − ∇²_xy g·v.

Vectors in y are matrices with one row per independent copy of y (a single row as a rule): the
Hessian is then block diagonal, and every block is solved for itself.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Generator, Tensor

from rabo.errors import NonFiniteError
from rabo.hypergradients.solvers import Product, Solution
from rabo.problem import Batch, BilevelProblem
from rabo.tree import Params, as_leaves, flatten, is_finite, leaves, replace_leaves, unflatten


class Estimate(NamedTuple):
    """A hypergradient and how far to trust it."""

    value: Params
    residual: Tensor  # ‖∇²_yy g·v − ∇_y f‖ / ‖∇_y f‖, or what the estimator documents
    iterations: int
    evaluations: int  # gradients of f or g; a Hessian or cross product counts as one

    def checked(self) -> "Estimate":
        """Return itself, or raise if any entry is NaN or infinite."""
        if not (is_finite(self.value) and is_finite(self.residual)):
            raise NonFiniteError(
                "the hypergradient is NaN or infinite; a smaller inner step size (β ≤ 1/(2 l_g1), "
                "or beta='auto') or damping usually cures this"
            )
        return self


class HypergradientEstimator(Protocol):
    """Estimates ∇Φ_i(x) = ∇_x f_i − ∇²_xy g_i [∇²_yy g_i]⁻¹ ∇_y f_i at a given y."""

    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate: ...


class Linearisation(Protocol):
    """The pieces of the system; how products are taken is up to the implementation."""

    evaluations: int

    @property
    def rhs(self) -> Tensor:
        """∇_y f."""
        ...

    def product(self, p: Tensor) -> Tensor:
        """∇²_yy g·p."""
        ...

    def pull_back(self, v: Tensor) -> dict[str, Tensor]:
        """∇_x f − ∇²_xy g·v."""
        ...


class ImplicitEstimator(HypergradientEstimator, Protocol):
    """An estimator made of a linearisation and a solver, so that clients can solve together."""

    def linearise(
        self, problem: BilevelProblem, x: Params, y: Params, batch: Batch
    ) -> Linearisation: ...

    def solve(self, product: Product, rhs: Tensor) -> Solution: ...


class View:
    """f and g of one batch as functions of features z and of y, and the way back to x.

    Features are computed once; everything but the last step happens on their side.
    """

    def __init__(self, problem: BilevelProblem, x: Params, y: Params, batch: Batch):
        self.problem, self.batch = problem, batch
        self.x, self.y = as_leaves(x), as_leaves(y)
        z_inner = problem.features(self.x, batch.inner)
        self.through_features = z_inner is not self.x
        if self.through_features:
            z_outer = problem.features(self.x, batch.outer)
            self._graph = leaves(z_inner) + leaves(z_outer)
            self.z_inner, self.z_outer = as_leaves(z_inner), as_leaves(z_outer)
        else:
            self.z_inner = self.z_outer = self.x

    @property
    def num_blocks(self) -> int:
        return self.problem.copies

    def inner(self, y: Any = None) -> Tensor:
        return self.problem.inner(self.z_inner, self.y if y is None else y, self.batch.inner)

    def outer(self, y: Any = None) -> Tensor:
        return self.problem.outer(self.z_outer, self.y if y is None else y, self.batch.outer)

    def flat(self, tensors: list[Tensor]) -> Tensor:
        return flatten(tensors, self.num_blocks)

    def tree(self, flat: Tensor) -> Any:
        """Return a vector in y as named tensors that collect gradients."""
        parts = unflatten(flat, leaves(self.y))
        return replace_leaves(self.y, [part.detach().requires_grad_() for part in parts])

    def outer_slopes(self, y: Any = None) -> tuple[Tensor, list[Tensor]]:
        """Return ∇_y f and ∇_z f."""
        y = self.y if y is None else y
        slopes = gradient(self.outer(y), leaves(y) + leaves(self.z_outer))
        num_y = len(leaves(y))
        return self.flat(slopes[:num_y]), slopes[num_y:]

    def pull_back(self, inner: list[Tensor], outer: list[Tensor]) -> dict[str, Tensor]:
        """Take slopes in z back to x, with one sweep through the features."""
        if not self.through_features:
            return dict(
                zip(self.x, (a + b for a, b in zip(inner, outer, strict=True)), strict=True)
            )
        used = [(t, s) for t, s in zip(self._graph, inner + outer, strict=True) if t.requires_grad]
        slopes = torch.autograd.grad(
            [t for t, _ in used],
            list(self.x.values()),
            [s for _, s in used],
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(self.x, slopes, strict=True))


def gradient(loss: Tensor, inputs: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Return the gradient of a loss, zeros where it does not depend on an input."""
    if not loss.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    return list(
        torch.autograd.grad(
            loss, inputs, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    )


class Exact:
    """Products by a second backward sweep over one retained graph of ∇_y g."""

    def __init__(self, view: View):
        self.view = view
        self._y = leaves(view.y)
        self._slope = gradient(view.inner(), self._y, create_graph=True)
        self.rhs, self._outer = view.outer_slopes()
        self.evaluations = 2

    def product(self, p: Tensor) -> Tensor:
        return self.view.flat(self._sweep(self._y, p))

    def pull_back(self, v: Tensor) -> dict[str, Tensor]:
        cross = self._sweep(leaves(self.view.z_inner), v)
        return self.view.pull_back([-c for c in cross], self._outer)

    def _sweep(self, inputs: list[Tensor], p: Tensor) -> list[Tensor]:
        self.evaluations += 1
        pairs = zip(self._slope, unflatten(p, self._y), strict=True)
        used = [(slope, part) for slope, part in pairs if slope.requires_grad]
        if not used:
            return [torch.zeros_like(t) for t in inputs]
        return list(
            torch.autograd.grad(
                [slope for slope, _ in used],
                inputs,
                [part for _, part in used],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )


class Recomputed(Exact):
    """The same products, but the graph of ∇_y g is built for each of them and freed at once.

    For a deep y: the second-order graph is never held beside the work of a solver.
    """

    def __init__(self, view: View):
        self.view = view
        self._y = leaves(view.y)
        self.rhs, self._outer = view.outer_slopes()
        self.evaluations = 1

    def _sweep(self, inputs: list[Tensor], p: Tensor) -> list[Tensor]:
        self._slope = gradient(self.view.inner(), self._y, create_graph=True)
        self.evaluations += 1
        found = super()._sweep(inputs, p)
        del self._slope
        return found


class Difference:
    """Products as central differences of gradients of g: no second derivative, no second graph.

    ∇²g·p ≈ [∇g(y + εp) − ∇g(y − εp)] / 2ε with ε = eps^(1/3) (1 + ‖y‖) / ‖p‖ for each block.
    """

    def __init__(self, view: View):
        self.view = view
        self._flat_y = view.flat([t.detach() for t in leaves(view.y)])
        self.rhs, self._outer = view.outer_slopes()
        self.evaluations = 1

    def product(self, p: Tensor) -> Tensor:
        plus, minus, width = self._slopes(p, lambda y: leaves(y))
        return (self.view.flat(plus) - self.view.flat(minus)) / width

    def pull_back(self, v: Tensor) -> dict[str, Tensor]:
        z = leaves(self.view.z_inner)
        # one common ε here: slopes in z do not separate into blocks
        plus, minus, width = self._slopes(v, lambda _: z, common=True)
        cross = [(a - b) / width.reshape(()) for a, b in zip(plus, minus, strict=True)]
        return self.view.pull_back([-c for c in cross], self._outer)

    def _slopes(
        self, p: Tensor, inputs: Any, common: bool = False
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        y = self._flat_y
        rows = (
            (lambda t: t.norm().reshape(1, 1))
            if common
            else (lambda t: t.norm(dim=1, keepdim=True))
        )
        size = rows(p)
        step = torch.finfo(y.dtype).eps ** (1 / 3) * (1 + rows(y))
        step = torch.where(size > 0, step / size.clamp(min=torch.finfo(y.dtype).tiny), 1.0)
        slopes = []
        for sign in (1, -1):
            shifted = self.view.tree(y + sign * step * p)
            slopes.append(gradient(self.view.inner(shifted), inputs(shifted)))
            self.evaluations += 1
        return slopes[0], slopes[1], 2 * step


Products: TypeAlias = Literal["exact", "recomputed", "difference"]
LINEARISATIONS: dict[str, Callable[[View], Linearisation]] = {
    "exact": Exact,
    "recomputed": Recomputed,
    "difference": Difference,
}
