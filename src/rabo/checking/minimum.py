"""y*(x) by Newton steps, each solved with conjugate gradients."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rabo.checking.clock import Clock
from rabo.checking.measured import Measured
from rabo.checking.report import Finding
from rabo.hypergradients.linearisation import View, gradient
from rabo.hypergradients.solvers import Product, conjugate_gradient

NUM_STEPS, STEP_PRODUCTS, MOST_PRODUCTS = 100, 50, 3000
SOLVED = {torch.float64: 1e-6}  # ‖∇_y g‖ over that at the start
OWN_SOLVED = 1e-3  # in single precision


class Minimum(NamedTuple):
    y: Tensor
    slope: float  # ‖∇_y g‖ over that at the start
    num_steps: int


def check_minimum(m: Measured) -> Measured:
    """Minimise the mean of the inner losses over y at the start of x."""
    point = m.here
    found = minimise(point.view(), point.flat_y, m.has_second_order, m.clock)
    is_solved = found.slope <= SOLVED.get(point.dtype, OWN_SOLVED)
    fell = f"‖∇g‖ fell to {found.slope:.1e} of its start in {found.num_steps} steps"
    row = Finding("inner minimum", fell)
    if not is_solved:
        advice = "y*(x) may lie at infinity or be hard to reach: add a penalty on y to g"
        row = row._replace(verdict="warning", advice=advice)
    return m.plus(row, point=point.at_y(found.y), inner_slope=found.slope, is_solved=is_solved)


def minimise(view: View, start: Tensor, second_order: bool, clock: Clock) -> Minimum:
    """Descend g(x, ·) until its gradient no longer falls, or enough products were taken."""
    y, num_steps, num_products = start, 0, 0
    loss, slope, product = _expand(view, y, second_order)
    first = norm = float(slope.norm())
    rounding = 100 * torch.finfo(start.dtype).eps
    while num_steps < NUM_STEPS and num_products < MOST_PRODUCTS and norm > rounding * 0.1 * first:
        clock.tick()
        tolerance = min(0.1, (norm / first) ** 0.5)
        solution = conjugate_gradient(clock.guard(product), -slope, STEP_PRODUCTS, tolerance)
        step = _downhill(solution.v, slope, product)
        decrease = float((slope * step).sum())
        # below the rounding of the loss, the gradient decides
        is_close = -decrease <= rounding * abs(loss)
        moved = y + step if is_close else _search(view, y, step, loss, decrease)
        if moved is None:
            break
        loss, new_slope, product = _expand(view, moved, second_order)
        num_steps, num_products = num_steps + 1, num_products + solution.iterations
        if is_close and not float(new_slope.norm()) < norm:
            break
        y, slope, last, norm = moved, new_slope, norm, float(new_slope.norm())
        if is_close and norm > 0.5 * last:
            break
    return Minimum(y, norm / first if first else 0.0, num_steps)


def _expand(view: View, y: Tensor, second_order: bool) -> tuple[float, Tensor, Product]:
    """Return g, ∇_y g and products with ∇²_yy g."""
    y = y.detach().requires_grad_()
    loss = view.inner(y)
    (slope,) = gradient(loss, [y], create_graph=second_order)

    def exact(p: Tensor) -> Tensor:
        return gradient(slope, [y], p, retain_graph=True)[0]

    def difference(p: Tensor) -> Tensor:
        here, eps = y.detach(), torch.finfo(p.dtype).eps
        size = eps ** (1 / 3) * (1 + here.norm()) / p.norm().clamp(min=1e-30)
        shifted = [(here + sign * size * p).requires_grad_() for sign in (1, -1)]
        plus, minus = (gradient(view.inner(each), [each])[0] for each in shifted)
        return (plus - minus) / (2 * size)

    return float(loss.detach()), slope.detach(), exact if second_order else difference


def _downhill(step: Tensor, slope: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a Newton step; a gradient step for copies whose curvature is not positive."""
    stands = step.norm(dim=1, keepdim=True) == 0
    if not bool(stands.any()):
        return step
    curvature = (slope * product(slope)).sum().abs() / slope.square().sum()
    return torch.where(stands, -slope / curvature.clamp(min=1e-12), step)


def _search(view: View, y: Tensor, step: Tensor, loss: float, decrease: float) -> Tensor | None:
    """Halve a step until g falls enough; return the new y."""
    size = 1.0
    while size > 1e-9:
        with torch.no_grad():
            if float(view.inner(y + size * step)) <= loss + 1e-4 * size * decrease:
                return y + size * step
        size /= 2
    return None
