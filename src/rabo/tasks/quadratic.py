"""A federated bilevel quadratic whose solution is known in closed form.

g_i(x, y) = ½ yᵀH_i y − yᵀ(B_i x + c_i),   f_i(x, y) = ½ yᵀK_i y − yᵀt_i + ½ xᵀP_i x − xᵀs_i
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from rabo.algorithms import State
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client
from rabo.federation.ledger import Ledger
from rabo.problems.bilevel import Batch
from rabo.pruning.channels import Channels, declare
from rabo.pruning.submodel import Cut, ElementMask
from rabo.seeding import stream
from rabo.tasks.base import Setup, check_at_least_one
from rabo.tree import Params


class Coefficients(NamedTuple):
    """The matrices and vectors of one client."""

    H: Tensor
    B: Tensor
    c: Tensor
    K: Tensor
    t: Tensor
    P: Tensor
    s: Tensor


@dataclass(frozen=True, eq=False)
class Quadratic:
    """One client's quadratic; satisfies `BilevelProblem`.

    Noise of a given size is added to the gradients: to ∇_y g with σ_g, to ∇_x f with σ_f.
    """

    coefficients: Coefficients
    sigma_f: float = 0.0
    sigma_g: float = 0.0
    start_at: float = 1.0
    keep: tuple[Tensor, Tensor] | None = None
    masks: tuple[Tensor, Tensor] | None = None  # where single entries are cut
    copies: int = field(default=1, init=False)
    redraw: Literal["step", "round"] = field(default="step", init=False)

    @property
    def channels(self) -> Channels:
        """Every coordinate of x and of y is a unit of its own."""
        return declare({"x.x": ("x",), "y.y": ("y",)}, *self.start())

    def start(self) -> tuple[Params, Params]:
        ones = self.coefficients.s.new_ones(len(self.coefficients.s))
        return {"x": self.start_at * ones}, {"y": torch.zeros_like(self.coefficients.c)}

    def batch(self, generator: Generator) -> Batch:
        def noise(sigma: float, like: Tensor, kept: int) -> Tensor | None:
            if not sigma:
                return None
            drawn = sigma * torch.randn(len(like), generator=generator, dtype=torch.float64)
            return drawn.to(like) if self.keep is None else drawn.to(like)[self.keep[kept]]

        return Batch(
            noise(self.sigma_g, self.coefficients.c, 1), noise(self.sigma_f, self.coefficients.s, 0)
        )

    @property
    def whole(self) -> Batch:
        """All data as one batch: gradients without noise."""
        return Batch(None, None)

    def features(self, x: Params, part: Any) -> Params:
        return x

    def inner(self, z: Params, y: Params, part: Tensor | None) -> Tensor:
        m, (u, v) = self._here, self._held(z, y)
        value = 0.5 * v @ (m.H @ v) - v @ (m.B @ u + m.c)
        return value if part is None else value + v @ part

    def outer(self, z: Params, y: Params, part: Tensor | None) -> Tensor:
        m, (u, v) = self._here, self._held(z, y)
        value = 0.5 * v @ (m.K @ v) - v @ m.t + 0.5 * u @ (m.P @ u) - u @ m.s
        return value if part is None else value + u @ part

    def restrict(self, cut: Cut) -> "Quadratic":
        """Keep rows and columns: really smaller matrices."""
        whole = (torch.arange(len(self.coefficients.s)), torch.arange(len(self.coefficients.c)))
        keep = (cut.kept.get("x", whole[0]), cut.kept.get("y", whole[1]))
        if isinstance(cut.x, ElementMask) and isinstance(cut.y, ElementMask):
            own = replace(self, keep=keep, masks=(cut.x.mask["x"], cut.y.mask["y"]))
        else:
            own = replace(self, keep=keep)
        _ = own._here  # now, so that no work is charged for it
        return own

    def _held(self, z: Params, y: Params) -> tuple[Tensor, Tensor]:
        if self.masks is None:
            return z["x"], y["y"]
        return z["x"] * self.masks[0], y["y"] * self.masks[1]

    @property
    def shape_key(self) -> Any:
        return self.coefficients.B.shape, self.sigma_f > 0, self.sigma_g > 0

    @cached_property
    def _here(self) -> Coefficients:
        if self.keep is None:
            return self.coefficients
        i, j = self.keep
        m = self.coefficients
        return Coefficients(
            m.H[j][:, j], m.B[j][:, i], m.c[j], m.K[j][:, j], m.t[j], m.P[i][:, i], m.s[i]
        )


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The mean of all clients' quadratics, solved exactly."""

    mean: Coefficients

    @classmethod
    def of(cls, problems: Sequence[Quadratic]) -> "ClosedForm":
        stacked = zip(*(p.coefficients for p in problems), strict=True)
        return cls(Coefficients(*(torch.stack(each).mean(dim=0) for each in stacked)))

    def inner_solution(self, x: Tensor) -> Tensor:
        """y*(x) = H⁻¹(Bx + c)."""
        return torch.linalg.solve(self.mean.H, self.mean.B @ x + self.mean.c)

    def hypergradient(self, x: Tensor) -> Tensor:
        """∇Φ(x) = Px − s + BᵀH⁻¹(Ky* − t)."""
        m = self.mean
        slope = m.K @ self.inner_solution(x) - m.t
        return m.P @ x - m.s + m.B.T @ torch.linalg.solve(m.H, slope)

    @cached_property
    def solution(self) -> Tensor:
        """x* with ∇Φ(x*) = 0."""
        m = self.mean
        inverse_b, inverse_c = torch.linalg.solve(m.H, m.B), torch.linalg.solve(m.H, m.c)
        matrix = m.P + inverse_b.T @ m.K @ inverse_b
        return torch.linalg.solve(matrix, m.s - inverse_b.T @ (m.K @ inverse_c - m.t))


def random_quadratic(
    generator: Generator,
    dim_x: int,
    dim_y: int,
    *,
    heterogeneity: float = 1.0,
    diagonal: bool = False,
    condition: float = 10.0,
) -> "QuadraticFamily":
    """Draw what all clients have in common; clients differ from it by `heterogeneity`."""
    return QuadraticFamily(
        _draw(generator, dim_x, dim_y, diagonal, condition), heterogeneity, diagonal, condition
    )


@dataclass(frozen=True, eq=False)
class QuadraticFamily:
    """Clients around a common quadratic."""

    common: Coefficients
    heterogeneity: float
    diagonal: bool
    condition: float

    def client(self, generator: Generator, sigma_f: float = 0.0, sigma_g: float = 0.0) -> Quadratic:
        dim_y, dim_x = self.common.B.shape
        own = _draw(generator, dim_x, dim_y, self.diagonal, self.condition)
        share = self.heterogeneity / (1 + self.heterogeneity)
        mixed = ((1 - share) * a + share * b for a, b in zip(self.common, own, strict=True))
        return Quadratic(Coefficients(*mixed), sigma_f, sigma_g)


def _draw(g: Generator, dim_x: int, dim_y: int, diagonal: bool, condition: float) -> Coefficients:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def positive(dim: int) -> Tensor:
        """A symmetric matrix with eigenvalues between 1 and the condition number."""
        spectrum = torch.rand(dim, generator=g, dtype=torch.float64)
        spectrum = 1 + (condition - 1) * spectrum
        if diagonal:
            return torch.diag(spectrum)
        basis, _ = torch.linalg.qr(normal(dim, dim))
        return basis @ torch.diag(spectrum) @ basis.T

    coupling = torch.eye(dim_y, dim_x, dtype=torch.float64) if diagonal else normal(dim_y, dim_x)
    return Coefficients(
        positive(dim_y),
        coupling / dim_x**0.5 if not diagonal else coupling,
        normal(dim_y),
        positive(dim_y),
        normal(dim_y),
        positive(dim_x),
        normal(dim_x),
    )


@dataclass(frozen=True, kw_only=True)
class QuadraticTask:
    """A heterogeneous federated quadratic with a known solution."""

    example: ClassVar[str] = "--clients 10 --rounds 400 --hessian global"
    dim_x: Annotated[int, "number of outer parameters"] = 16
    dim_y: Annotated[int, "number of inner parameters"] = 16
    heterogeneity: Annotated[float, "how much clients differ (0: not at all)"] = 1.0
    noise: Annotated[float, "size of the gradient noise"] = 0.0

    def __post_init__(self) -> None:
        check_at_least_one(self, "dim_x", "dim_y")

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        family = random_quadratic(
            stream(seed, "quadratic"), self.dim_x, self.dim_y, heterogeneity=self.heterogeneity
        )
        problems = [
            family.client(stream(seed, "client", i), sigma_f=self.noise, sigma_g=self.noise)
            for i in range(len(capacities))
        ]
        problems = [
            replace(p, coefficients=Coefficients(*(t.to(device) for t in p.coefficients)))
            for p in problems
        ]
        truth = ClosedForm.of(problems)

        def evaluate(state: State, ledger: Ledger) -> dict[str, float]:
            x, best = state.x["x"], truth.solution
            return {
                "gradient_norm": float(truth.hypergradient(x).norm()),
                "distance": float((x - best).norm() / best.norm()),
                "inner_distance": float((state.y["y"] - truth.inner_solution(x)).norm()),
            }

        clients = [Client(p, c) for p, c in zip(problems, capacities, strict=True)]
        options = {"num_inner_steps": 1, "alpha": 0.03, "levels": "y"}
        return Setup(clients, evaluate, "gradient_norm", options, falls=True)
