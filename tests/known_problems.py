"""Problems and networks whose truth the tests know."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rabo
from rabo.algorithms import Cohort
from rabo.execution import InProcess
from rabo.federation.ledger import Ledger
from rabo.models.convolutional import Conv4, ResNet12, ResNet18
from rabo.problems.problem import ClientProblem
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm, Quadratic, random_quadratic

EPISODES = (3, 4, 2, 3)  # tasks, ways, shots and queries


def curved_problem(
    seed: int = 0, dim_x: int = 5, dim_y: int = 4, axes: bool = False, copies: int = 1
) -> ClientProblem:
    """A strongly convex inner problem that is not quadratic, in float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    A, W, t, s = normal(8, dim_y), normal(8, dim_x), normal(dim_y), normal(dim_x)

    def inner(x, y, data):
        scores = y["y"] @ A.T + torch.tanh(W @ x["x"])
        return F.softplus(scores).sum() + (x["x"].square().sum() + 1) * y["y"].square().sum() / 2

    def outer(x, y, data):
        return ((y["y"] - t) ** 2).sum() + torch.cos(x["x"] @ s) + (y["y"].sum() * x["x"].sum())

    return rabo.Problem(
        inner=inner,
        outer=outer,
        x={"x": normal(dim_x) / 2},
        y={"y": normal(dim_y)},
        axes={"x.x": ("x",), "y.y": ("y",)} if axes else None,
        copies=copies,
    ).on(inner=None, outer=None)


def dense_hypergradient(problem, x, y, batch) -> Tensor:
    """∇_x f − ∇²_xy g [∇²_yy g]⁻¹∇_y f with dense float64 matrices, for one tensor each."""
    (x_name, x_value), (y_name, y_value) = *x.items(), *y.items()

    def g(u, v):
        return problem.inner(problem.features({x_name: u}, batch.inner), {y_name: v}, batch.inner)

    def f(u, v):
        return problem.outer(problem.features({x_name: u}, batch.outer), {y_name: v}, batch.outer)

    hessian = torch.autograd.functional.hessian(g, (x_value, y_value))
    yy = hessian[1][1].reshape(y_value.numel(), y_value.numel())
    xy = hessian[0][1].reshape(x_value.numel(), y_value.numel())
    fx, fy = torch.autograd.functional.jacobian(f, (x_value, y_value))
    v = torch.linalg.solve(yy, fy.flatten())
    return (fx.flatten() - xy @ v).reshape(x_value.shape)


class Attention(nn.Module):
    """Self-attention with a fused query-key-value layer."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, tokens):
        batch, length, _ = tokens.shape
        split = self.qkv(tokens).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, tokens):
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.down(F.gelu(self.up(self.norm2(tokens))))


class SmallViT(nn.Module):
    def __init__(self, dim: int = 16, num_heads: int = 4):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 7, 7)
        self.position = nn.Parameter(torch.randn(1, 16, dim))
        self.blocks = nn.Sequential(
            TransformerBlock(dim, num_heads), TransformerBlock(dim, num_heads)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, images):
        tokens = self.patch(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(dim=1))


class ConcatNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 6, 3)
        self.join, self.out = nn.Conv2d(10, 8, 3), nn.Linear(8 * 4, 3)

    def forward(self, images):
        both = torch.cat([F.relu(self.left(images)), torch.sigmoid(self.right(images))], dim=1)
        return self.out(F.adaptive_avg_pool2d(self.join(both), 2).flatten(1))


class SeparableNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.pointwise, self.norm = nn.Conv2d(8, 16, 1), nn.GroupNorm(4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, images):
        z = self.norm(self.pointwise(F.relu(self.depthwise(self.stem(images)))))
        return self.out(F.relu(z).mean((2, 3)))


def networks() -> dict[str, tuple[nn.Module | None, nn.Module, Tensor]]:
    """Backbone, head and example of every network that must be cut exactly."""
    g = torch.Generator().manual_seed(1)

    def images(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return {
        "mlp": (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh()),
            nn.Linear(12, 3),
            images(6, 8),
        ),
        "conv4-flatten": (Conv4(16), nn.Linear(16 * 4, 5), images(6, 1, 32, 32)),
        "resnet12": (ResNet12((8, 16, 32, 64)), nn.Linear(64, 5), images(6, 1, 28, 28)),
        "resnet18": (None, ResNet18(width=8), images(6, 3, 32, 32)),
        "concat": (None, ConcatNet(), images(6, 1, 12, 12)),
        "separable": (None, SeparableNet(), images(6, 1, 12, 12)),
        "vit": (None, SmallViT(), images(6, 1, 28, 28)),
    }


def federated_quadratics(num_clients: int = 3, condition: float = 3.0) -> list[Quadratic]:
    """Clients that differ in every matrix and vector; eigenvalues between 1 and the condition."""
    family = random_quadratic(stream(0, "family"), 3, 4, condition=condition)
    return [family.client(stream(0, i)) for i in range(num_clients)]


def calm_quadratics(num_clients: int = 3, condition: float = 3.0) -> list[Quadratic]:
    """Every ∇_y f_i is zero at the solution, so that no random chain moves x away from it."""
    problems = federated_quadratics(num_clients, condition)
    mean = ClosedForm.of(problems).mean
    x = torch.linalg.solve(mean.P, mean.s)
    y = torch.linalg.solve(mean.H, mean.B @ x + mean.c)
    return [
        replace(p, coefficients=p.coefficients._replace(t=p.coefficients.K @ y)) for p in problems
    ]


def one_round(algorithm, problems, state=None, widths=None):
    """A round of all clients from a state, at full width unless given."""
    state = state or algorithm.init(problems[0])
    widths = dict(enumerate(widths or [1.0] * len(problems)))
    ledger = Ledger(InProcess(dict(enumerate(problems))))
    ledger.begin(state.x, state.y)
    return algorithm.round(state, Cohort(problems[0].channels, widths), ledger)


def distance(problems, x) -> float:
    """How far x is from the closed-form solution, relative to its length."""
    best = ClosedForm.of(problems).solution
    return float((x["x"] - best).norm() / best.norm())


def truncated_series(mean, x, y, num_terms: int, L: float) -> Tensor:
    """∇_x f − ∇²_xy g·(1/L) Σ_{k<N} (I − H/L)^k ∇_y f of a mean quadratic, densely."""
    factor = torch.eye(len(y), dtype=y.dtype) - mean.H / L
    term, total = mean.K @ y - mean.t, torch.zeros_like(y)
    for _ in range(num_terms):
        total, term = total + term / L, factor @ term
    return mean.P @ x - mean.s + mean.B.T @ total


def episodic_problem(seed=0):
    """A small backbone and head in float64; data are tasks, the features are not normalised."""
    g = stream(seed, "data")
    tasks, ways, shots, queries = EPISODES
    parts = []
    for number in (shots, queries):
        inputs = torch.randn(tasks, ways * number, 5, generator=g, dtype=torch.float64)
        labels = torch.arange(ways).repeat_interleave(number).repeat(tasks, 1)
        parts.append((inputs, labels))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()).double()
        y = nn.Linear(6, ways).double()

    def loss(z, y, data):
        return F.cross_entropy(y(z).flatten(0, 1), data[1].flatten())

    def inner(z, y, data):
        return loss(z, y, data) + 0.05 * sum(w.square().sum() for w in y.values()) / y.copies

    return rabo.Problem(
        inner=inner,
        outer=loss,
        features=lambda x, data: x(data[0]),
        x=x,
        y=y,
        example=torch.randn(3, 5, dtype=torch.float64),
        copies=tasks,
        redraw="round",
        ways=ways,
    ).on(inner=parts[0], outer=parts[1])
