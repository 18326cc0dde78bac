"""A bilevel problem at one point, as a linear system: ∇²_yy g·v = ∇_y f, then ∇_x f − ∇²_xy g·v.

Vectors in y are matrices with one row per independent copy of y (a single row as a rule): the
Hessian is then block diagonal, and every block is solved for itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from math import isfinite
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Generator, Tensor

from rabo.errors import DIVERGENCE_REMEDY, NonFiniteError
from rabo.hypergradients.solvers import Product, Solution
from rabo.problems.bilevel import Batch, BilevelProblem, features_of
from rabo.seeding import seeded_layers
from rabo.tree import Params, as_leaves, as_tree, flatten, is_finite, leaves


class Estimate(NamedTuple):
    """A hypergradient and how far to trust it."""

    value: Params
    residual: Tensor  # ‖∇²_yy g·v − ∇_y f‖ / ‖∇_y f‖, or what the estimator documents
    iterations: int
    evaluations: int  # gradients of f or g; a Hessian or cross product counts as one
    curvature: Tensor | None = None  # a lower bound of l_{g,1}, where products were taken

    def checked(self) -> "Estimate":
        """Return itself, or raise if any entry is NaN or infinite."""
        if can_read(self.residual) and not is_finite((self.value, self.residual)):
            raise NonFiniteError(f"the hypergradient is NaN or infinite. {DIVERGENCE_REMEDY}")
        return self


class HypergradientEstimator(ABC):
    """Estimates ∇Φ_i(x) = ∇_x f_i − ∇²_xy g_i [∇²_yy g_i]⁻¹ ∇_y f_i at a given y."""

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return False

    @property
    def keeps_copies_apart(self) -> bool:
        """Whether the answer for a copy of y does not depend on the other copies."""
        return False

    @property
    def system(self) -> "ImplicitSystem | None":
        """The linear system that it solves, if all clients can solve one together."""
        return None

    @abstractmethod
    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate:
        """Return the estimate on one batch; a random estimator gets a generator."""


class Applied(NamedTuple):
    """One vector along both second derivatives."""

    product: Tensor  # ∇²_yy g·v
    value: dict[str, Tensor]  # ∇_x f − ∇²_xy g·v


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

    @property
    def inner_slope(self) -> Tensor:
        """∇_y g."""
        ...

    def pull_back(self, v: Tensor) -> dict[str, Tensor]:
        """∇_x f − ∇²_xy g·v."""
        ...

    def apply(self, v: Tensor) -> Applied:
        """∇²_yy g·v and ∇_x f − ∇²_xy g·v, at little more than the cost of one."""
        ...


class ImplicitSystem(Protocol):
    """A linearisation and a solver, so that clients can solve together."""

    def linearise(
        self, problem: BilevelProblem, x: Params, y: Params, batch: Batch
    ) -> Linearisation: ...

    def solve(self, product: Product, rhs: Tensor) -> Solution: ...


@contextmanager
def one_realisation(problem: BilevelProblem, seed: int, params: Params) -> Iterator[None]:
    """Let random layers such as dropout draw the same at every evaluation of one batch.

    The layers run on the device of the parameters.
    """
    if not getattr(problem, "has_random_layers", False):
        yield
        return
    with seeded_layers(seed, params.values()):
        yield


class View:
    """f and g of one batch as functions of flat y, and the way back to x.

    The features of the inner batch are computed once, and only when asked for: a caller that takes
    the outer slopes first never holds both graphs at a time. A caller that needs both may let the
    problem take one pass, if it can: there is one graph then, and one sweep back to x.
    """

    def __init__(
        self, problem: BilevelProblem, x: Params, y: Params, batch: Batch, *, one_pass: bool = False
    ):
        self.problem, self.batch = problem, batch
        self.x, self._like = as_leaves(x), y
        self._seed = torch.default_generator.initial_seed()
        self.y = flatten([t.detach() for t in leaves(y)], problem.copies)
        takes = getattr(problem, "takes_one_pass", None)
        self._is_one_pass = one_pass and takes is not None and takes(batch)

    @cached_property
    def _features(self) -> Any:
        if self._is_one_pass:
            return self._both[0]
        with one_realisation(self.problem, self._seed, self.x):
            return self.problem.features(self.x, self.batch.inner)

    @cached_property
    def _both(self) -> list[Any]:
        return features_of(self.problem, self.x, self.batch)

    @cached_property
    def z(self) -> Any:
        """Features of the inner batch, cut off from x."""
        return self.x if self._features is self.x else as_leaves(self._features)

    @cached_property
    def z_leaves(self) -> list[Tensor]:
        return _differentiable(self.z)

    def inner(self, y: Tensor, z: Any = None) -> Tensor:
        z = self.z if z is None else z
        with one_realisation(self.problem, self._seed, self.x):
            return self.problem.inner(z, self._tree(y), self.batch.inner)

    def outer_slopes(self, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return ∇_y f and ∇_x f; the graph is gone when they are here.

        In one pass it is not, and slopes in z stand for those in x: `pull_back` takes them on, with
        its own.
        """
        y, part = y.detach().requires_grad_(), self.batch.outer
        with one_realisation(self.problem, self._seed, self.x):
            if self._is_one_pass:
                z = as_leaves(self._both[1])
                inputs = _differentiable(z)
            else:
                z, inputs = self.problem.features(self.x, part), list(self.x.values())
            loss = self.problem.outer(z, self._tree(y), part)
        check_loss("outer", loss)
        slopes = gradient(loss, [y, *inputs])
        return slopes[0], slopes[1:]

    def pull_back(self, cross: list[Tensor], outer: list[Tensor]) -> dict[str, Tensor]:
        """Return ∇_x f − ∇²_xy g·v: take the second from z back to x, with one sweep."""
        if self._is_one_pass:
            total = _along(self._both[1], outer) - _along(self._both[0], cross)
            return dict(zip(self.x, gradient(total, list(self.x.values())), strict=True))
        if self._features is not self.x:
            cross = gradient(_along(self._features, cross), list(self.x.values()))
        lists: Any = torch  # whose operations on lists have no types: few kernels for all
        return dict(zip(self.x, lists._foreach_sub(outer, cross), strict=True))

    def _tree(self, y: Tensor) -> Any:
        return as_tree(y, self._like)


def gradient(
    output: Tensor,
    inputs: list[Tensor],
    along: Tensor | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> list[Tensor]:
    """Return the gradient of a loss, or of an output along a vector; zeros for unused inputs."""
    if not output.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    return list(
        torch.autograd.grad(
            output,
            inputs,
            along,
            retain_graph=retain_graph or create_graph,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    )


def check_loss(level: str, loss: Tensor) -> None:
    """Refuse a loss that is NaN or infinite before anything is computed from it."""
    if can_read(loss) and not isfinite(loss.item()):
        raise NonFiniteError(
            f"the {level} loss is {float(loss.detach())} at the start of a client's work. In the "
            f"first round, check the loss and the data. Later the run diverges: {DIVERGENCE_REMEDY}"
        )


def can_read(tensor: Tensor) -> bool:
    """Say whether values are there to be checked: not while kernels are only being recorded."""
    if not tensor.is_cuda:
        return True
    return not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())


def _differentiable(tree: Any) -> list[Tensor]:
    """Return the tensors that gradients can reach: features may carry labels along."""
    return [t for t in leaves(tree) if t.is_floating_point()]


def _along(z: Any, slopes: list[Tensor]) -> Tensor:
    """Return Σ⟨z, slope⟩, whose gradient is what slopes in z are in x."""
    pairs = zip(_differentiable(z), slopes, strict=True)
    return torch.stack([(z * slope).sum() for z, slope in pairs]).sum()


class Exact:
    """Products by a second backward sweep over the graph of ∇_y g.

    The graph is built once and retained; with `hold=False` it is built for each product and freed
    at once, so that a deep y never holds it beside the work of a solver.
    """

    def __init__(self, view: View, hold: bool = True):
        self.view, self.hold, self.evaluations = view, hold, 0
        self._y = view.y.detach().requires_grad_()
        self._held: Tensor | None = None

    @cached_property
    def _outer(self) -> tuple[Tensor, list[Tensor]]:
        self.evaluations += 1
        return self.view.outer_slopes(self._y)

    @property
    def rhs(self) -> Tensor:
        return self._outer[0]

    @property
    def inner_slope(self) -> Tensor:
        """∇_y g."""
        return self._slope().detach()

    def build(self) -> None:
        """Build the graph that products need, and the outer slopes, before they are asked for."""
        _ = self._outer
        if self.hold:
            self._slope()

    def product(self, p: Tensor) -> Tensor:
        return self._sweep([self._y], p)[0]

    def pull_back(self, v: Tensor) -> dict[str, Tensor]:
        return self.view.pull_back(self._sweep(self.view.z_leaves, v), self._outer[1])

    def apply(self, v: Tensor) -> Applied:
        product, *cross = self._sweep([self._y, *self.view.z_leaves], v)
        return Applied(product, self.view.pull_back(cross, self._outer[1]))

    def _slope(self) -> Tensor:
        """∇_y g with its graph."""
        slope = self._held
        if slope is None:
            slope = gradient(self.view.inner(self._y), [self._y], create_graph=True)[0]
            self._held = slope if self.hold else None
            self.evaluations += 1
        return slope

    def _sweep(self, inputs: list[Tensor], along: Tensor) -> list[Tensor]:
        self.evaluations += 1
        return gradient(self._slope(), inputs, along, retain_graph=self.hold)


class Difference:
    """Products as central differences of gradients of g: no second derivative, no second graph.

    ∇²g·p ≈ [∇g(y + εp) − ∇g(y − εp)] / 2ε with ε = eps^(1/3) (1 + ‖y‖) / ‖p‖ for each block.
    """

    def __init__(self, view: View):
        self.view, self.evaluations = view, 0

    @cached_property
    def outer(self) -> tuple[Tensor, list[Tensor]]:
        """∇_y f and ∇_x f."""
        self.evaluations += 1
        return self.view.outer_slopes(self.view.y)

    @property
    def rhs(self) -> Tensor:
        return self.outer[0]

    @property
    def inner_slope(self) -> Tensor:
        """∇_y g."""
        self.evaluations += 1
        y = self.view.y.detach().requires_grad_()
        return gradient(self.view.inner(y), [y])[0]

    def product(self, p: Tensor) -> Tensor:
        (plus,), (minus,), width = self._slopes(p, lambda y: [y], lambda t: t.norm(dim=1))
        return (plus - minus) / width

    def pull_back(self, v: Tensor) -> dict[str, Tensor]:
        z = self.view.z_leaves
        # one common ε here: slopes in z do not separate into blocks
        plus, minus, width = self._slopes(v, lambda _: z, lambda t: t.norm())
        cross = [(a - b) / width.reshape(()) for a, b in zip(plus, minus, strict=True)]
        return self.view.pull_back(cross, self.outer[1])

    def apply(self, v: Tensor) -> Applied:
        z = self.view.z_leaves
        plus, minus, width = self._slopes(v, lambda y: [y, *z], lambda t: t.norm())
        product, *cross = [(a - b) / width.reshape(()) for a, b in zip(plus, minus, strict=True)]
        return Applied(product, self.view.pull_back(cross, self.outer[1]))

    def _slopes(
        self,
        p: Tensor,
        inputs: Callable[[Tensor], list[Tensor]],
        norm: Callable[[Tensor], Tensor],
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        y, limits = self.view.y, torch.finfo(p.dtype)
        size = norm(p).reshape(-1, 1)
        step = limits.eps ** (1 / 3) * (1 + norm(y).reshape(-1, 1))
        step = torch.where(size > 0, step / size.clamp(min=limits.tiny), 1.0)
        slopes = []
        for sign in (1, -1):
            shifted = (y + sign * step * p).requires_grad_()
            slopes.append(gradient(self.view.inner(shifted), inputs(shifted)))
            self.evaluations += 1
        return slopes[0], slopes[1], 2 * step


Products: TypeAlias = Literal["exact", "recomputed", "difference"]
LINEARISATIONS: dict[str, Callable[[View], Linearisation]] = {
    "exact": Exact,
    "recomputed": partial(Exact, hold=False),
    "difference": Difference,
}
