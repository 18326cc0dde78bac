"""The precision of reference solutions, and second derivatives against differences."""

import torch
from torch import Tensor

from rabo.checking.losses import gap
from rabo.checking.measured import Measured
from rabo.checking.point import Point
from rabo.checking.report import Finding
from rabo.hypergradients.linearisation import Difference, Exact
from rabo.seeding import stream

GAPS = {torch.float64: (1e-3, 0.1)}  # above which products are doubtful, and wrong
OWN_GAPS = (0.1, 0.5)  # in single precision, where differences are coarse


def check_second_derivatives(m: Measured) -> Measured:
    """Choose float64 where losses run in it; compare ∇²_yy g·p with differences of ∇_y g."""
    name, point = "second derivatives", m.own if m.own.copies == 1 else m.own.first()
    double = point.to(torch.float64)
    point = double if runs_in_double(double) else point
    one = point.first()
    p = torch.randn(one.flat_y.shape, generator=stream(m.seed, "product")).to(one.flat_y)
    without = {"point": point, "has_second_order": False}
    try:
        exact = Exact(one.view()).product(p)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:80]
        advice = "use a method without second derivatives, such as rafbo"
        return m.plus(Finding(name, f"not available: {reason}", "warning", advice), **without)
    found = gap([exact], [Difference(one.view()).product(p)])
    doubtful, wrong = GAPS.get(point.dtype, OWN_GAPS)
    dtype = str(point.dtype).removeprefix("torch.")
    if found <= doubtful:
        result = f"agree with differences of ∇g to {found:.1e} ({dtype})"
        return m.plus(Finding(name, result), point=point)
    result = f"differ from differences of ∇g by {found:.1e} ({dtype})"
    advice = "look for custom backward functions and jumps in ∇g"
    if found <= wrong:
        return m.plus(Finding(name, result, "warning", advice), point=point)
    advice += "; use a method without second derivatives, such as rafbo"
    return m.plus(Finding(name, result, "warning", advice), **without)


def runs_in_double(double: Point) -> bool:
    """Say whether the losses of a point that was cast to float64 stay in float64."""
    try:
        losses = [_losses(each) for each in double.each()]
    except (RuntimeError, TypeError):  # a constant in single precision, or no float64 here
        return False
    return all(loss.dtype == torch.float64 for each in losses for loss in each)


def _losses(point: Point) -> list[Tensor]:
    problem, batch = point.problem, point.batch
    with torch.no_grad():
        return [
            problem.inner(problem.features(point.x, batch.inner), point.y, batch.inner),
            problem.outer(problem.features(point.x, batch.outer), point.y, batch.outer),
        ]
