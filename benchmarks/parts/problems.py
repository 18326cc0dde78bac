"""The two problems on which hypergradients are compared, at a point near the inner optimum.

Each is made twice from the same numbers: as a `rabo.Problem`, and as plain losses of lists of
tensors, as they stand in the code of somebody who does without the library.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rabo.hypergradients.curvature import lanczos
from rabo.hypergradients.linearisation import Exact, View
from rabo.models.convolutional import Conv4
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.problems.problem import Problem
from rabo.tree import Params

Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


class Case(NamedTuple):
    """One problem at one point."""

    name: str
    problem: BilevelProblem
    batch: Batch
    x: Params
    y: Params
    inner: Loss  # g, without the library
    outer: Loss  # f, without the library
    step: float = 0.0  # 1/l_{g,1}, for methods that take steps


def logistic(
    num_weights: int = 2000, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Case:
    """Problem A: x_j is the log-weight of the penalty on y_j in a logistic regression.

    g = mean log(1 + exp(−b·⟨a, y⟩)) + ½ Σ_j exp(x_j) y_j², f = the same mean on validation data.
    Twice as many rows as weights; the penalty is such that ∇²_yy g has condition 25.
    """
    generator = torch.Generator().manual_seed(0)
    num_rows = 2 * num_weights
    truth = torch.randn(num_weights, generator=generator) / num_weights**0.5
    parts = []
    for _ in range(2):
        rows = torch.randn(num_rows, num_weights, generator=generator)
        noise = torch.randn(num_rows, generator=generator)
        signs = torch.sign(rows @ truth + noise)
        parts.append((rows.to(device, dtype), signs.to(device, dtype)))
    training, validation = parts
    x = 0.3 * torch.randn(num_weights, generator=generator) - 4.35

    def loss(y: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
        rows, signs = data
        return F.softplus(-signs * (rows @ y)).mean()

    def penalty(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * y.square()).sum() / 2

    problem = Problem(
        inner=lambda x, y, data: loss(y["w"], data) + penalty(x["log"], y["w"]),
        outer=lambda x, y, data: loss(y["w"], data),
        x={"log": x.to(device, dtype)},
        y={"w": torch.zeros(num_weights, dtype=dtype, device=device)},
    )
    own = problem.on(inner=training, outer=validation)
    return _at_optimum(
        Case(
            "A",
            own,
            own.data,
            *own.start(),
            lambda x, y: loss(y[0], training) + penalty(x[0], y[0]),
            lambda x, y: loss(y[0], validation),
        )
    )


def few_shot(
    channels: int = 64, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Case:
    """Problem B: x is a Conv4 backbone, y a linear head fitted to 5 images of each of 5 classes.

    g = cross-entropy on the support images + ½ penalty ‖y‖², f = cross-entropy on 15 queries per
    class. Images are random, so that nothing need be downloaded; ∇²_yy g has condition 86.
    """
    generator, num_ways, penalty = torch.Generator().manual_seed(0), 5, 0.14
    classes = torch.randn(num_ways, 1, 28, 28, generator=generator)

    def episode(num_shots: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(num_ways).repeat(num_shots)
        noise = torch.randn(len(labels), 1, 28, 28, generator=generator)
        return (classes[labels] + noise).to(device, dtype), labels.to(device)

    support, query = episode(5), episode(15)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = Conv4(channels).to(device, dtype)
        head = nn.Linear(channels, num_ways).to(device, dtype)
    names = [name for name, _ in backbone.named_parameters()]

    def squares(y: Sequence[Tensor]) -> Tensor:
        weight, bias = y
        return penalty / 2 * (weight.square().sum() + bias.square().sum())

    def loss(x: Sequence[Tensor], y: Sequence[Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        features = functional_call(backbone, dict(zip(names, x, strict=True)), data[0])
        return F.cross_entropy(F.linear(features, *y), data[1])

    def inner(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(y(z), data[1]) + squares(list(y.values()))

    problem = Problem(
        inner=inner,
        outer=lambda z, y, data: F.cross_entropy(y(z), data[1]),
        features=lambda x, data: x(data[0]),
        x=backbone,
        y=head,
        example=support[0],
    )
    own = problem.on(inner=support, outer=query)
    return _at_optimum(
        Case(
            "B",
            own,
            own.data,
            *own.start(),
            lambda x, y: loss(x, y, support) + squares(y),
            lambda x, y: loss(x, y, query),
        )
    )


def _at_optimum(case: Case) -> Case:
    """Move y close to argmin_y g, as it is when a hypergradient is wanted."""
    problem, part = case.problem, case.batch.inner
    with torch.no_grad():
        z = problem.features(case.x, part)
    y = {name: value.clone().requires_grad_() for name, value in case.y.items()}
    search = torch.optim.LBFGS(y.values(), max_iter=300, line_search_fn="strong_wolfe")

    def evaluate() -> float:
        search.zero_grad()
        loss = problem.inner(z, y, part)
        loss.backward()
        return loss.item()

    search.step(evaluate)
    found = {name: value.detach() for name, value in y.items()}
    view = View(problem, case.x, found, case.batch)
    return case._replace(y=found, step=float(1 / lanczos(Exact(view).product, view.y, 10).largest))
