"""Whether losses are finite and repeatable."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rabo.checking.measured import Measured
from rabo.checking.point import Point
from rabo.checking.report import Finding
from rabo.hypergradients.linearisation import gradient, one_realisation
from rabo.tree import as_leaves, is_finite

LEVELS: tuple[Literal["inner", "outer"], ...] = ("inner", "outer")
RANDOM = 1e-4  # a relative difference that no rounding explains


class Value(NamedTuple):
    """A loss and its gradients by parameter."""

    loss: Tensor
    x: Mapping[str, Tensor]
    y: Mapping[str, Tensor]


def evaluate(point: Point, level: Literal["inner", "outer"]) -> Value:
    """Evaluate a loss of one client from scratch, with its gradients in x and y."""
    problem, batch = point.problem, point.batch
    x, y, part = as_leaves(point.x), as_leaves(point.y), getattr(batch, level)
    with one_realisation(problem, torch.default_generator.initial_seed(), x):
        loss = getattr(problem, level)(problem.features(x, part), y, part)
    slopes = iter(gradient(loss, [*x.values(), *y.values()]))
    return Value(loss.detach(), {k: next(slopes) for k in x}, {k: next(slopes) for k in y})


def gap(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    """Return ‖a − b‖ over the larger norm of both, zero where both are zero."""
    one, other = (torch.cat([t.flatten().double() for t in each]) for each in (a, b))
    larger = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / larger if larger else 0.0


def check_finite(m: Measured) -> Measured:
    """Evaluate both losses and their gradients at the start."""
    values = {level: [evaluate(p, level) for p in m.own.each()] for level in LEVELS}
    bad = [
        f"{level} loss of client {i}"
        for level, each in values.items()
        for i, value in enumerate(each)
        if not is_finite(value)
    ]
    if bad:
        result = f"NaN or infinite at the start: {', '.join(bad)}, or a gradient of it"
        advice = "check the data, and logarithms, roots and divisions at zero"
        return m.plus(Finding("finite losses", result, "fails", advice))
    means = {k: sum(float(v.loss) for v in each) / len(each) for k, each in values.items()}
    result = ", ".join(f"mean {k} {mean:.4g}" for k, mean in means.items())
    return m.plus(Finding("finite losses", result))


def check_repeatable(m: Measured) -> Measured:
    """Evaluate losses and gradients twice on the same batch."""
    largest = 0.0
    for point in m.own.each():
        for level in LEVELS:
            one, other = evaluate(point, level), evaluate(point, level)
            pairs = [([one.loss], [other.loss]), (one.x.values(), other.x.values())]
            pairs.append((one.y.values(), other.y.values()))
            largest = max(largest, *(gap(a, b) for a, b in pairs))
    result = "equal" if not largest else f"differ by {largest:.1e}"
    if largest <= RANDOM:
        return m.plus(Finding("repeated evaluations", result), repeat_gap=largest)
    advice = (
        "make losses depend on x, y and data alone: use nn.Dropout modules, which keep one mask "
        "per batch, or draw noise in sample(data, generator)"
    )
    row = Finding("repeated evaluations", result, "fails", advice)
    return m.plus(row, repeat_gap=largest)
