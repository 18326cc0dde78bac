"""The implicit hypergradient, compared with central differences of Φ."""

import torch
from torch import Tensor

from rabo.checking.clock import Clock
from rabo.checking.curvature import flat_tolerance
from rabo.checking.losses import gap
from rabo.checking.measured import Measured
from rabo.checking.minimum import minimise
from rabo.checking.point import Point
from rabo.checking.report import Comparison, Finding
from rabo.hypergradients.linearisation import Linearisation
from rabo.hypergradients.solvers import conjugate_gradient
from rabo.seeding import stream
from rabo.tree import Params, flatten, leaves

NUM_DIRECTIONS, NUM_PRODUCTS = 8, 500
GAPS = {torch.float64: (1e-3, 0.1)}  # above which the hypergradient warns and fails
OWN_GAPS = (0.1, 1.0)


def check_hypergradient(m: Measured) -> Measured:
    """Solve the implicit system to the end; compare with Φ(x) = f(x, y*(x)), y* solved anew."""
    name, point = "hypergradient", m.here
    if not (m.is_minimum and m.is_unique):
        why = "g is not convex at the inner minimum" if m.is_solved else "y*(x) was not reached"
        why = "y*(x) is not unique" if m.is_minimum else why
        return m.plus(Finding(name, f"not compared: {why}", "skipped"))
    system = point.system(m.has_second_order)
    mean = torch.stack(m.hessians).mean(dim=0) if m.hessians else None
    v = solve(system, mean, m.clock)
    hypergradient = flat(system.pull_back(v))  # which uses up the graph
    direct = flat(point.system(m.has_second_order).pull_back(torch.zeros_like(v)))
    if not float(hypergradient.norm()) > 0:
        advice = "x has no influence on f at the start: start elsewhere"
        return m.plus(Finding(name, "zero at the start of x", "warning", advice))
    directions = draw_directions(len(hypergradient), m.seed).to(point.flat_x)
    slopes = differences_of_phi(point, directions, m.has_second_order, m.clock)
    found = gap([directions.double() @ hypergradient], [slopes])
    row = _row(name, found, point.dtype, "dense solve" if m.hessians else "CG", len(directions))
    return m.plus(
        row,
        hypergradient=hypergradient,
        direct_slope=direct,
        directions=directions,
        slopes=slopes,
        hypergradient_gap=found,
    )


def _row(name: str, found: float, dtype: torch.dtype, solver: str, number: int) -> Finding:
    result = f"{solver} and differences of Φ along {number} directions agree to {found:.1e}"
    warns, fails = GAPS.get(dtype, OWN_GAPS)
    if found <= warns:
        return Finding(name, result)
    advice = "look for detach() or no_grad() on part of x or y, or jumps in the losses"
    verdict = "warning" if found <= fails else "fails"
    return Finding(name, result.replace("agree to", "differ by"), verdict, advice)


def solve(system: Linearisation, hessian: Tensor | None, clock: Clock) -> Tensor:
    """Solve ∇²_yy g·v = ∇_y f: densely where the Hessian is known, else with many CG steps."""
    if hessian is None:
        tolerance = 100 * torch.finfo(system.rhs.dtype).eps
        product = clock.guard(system.product)
        return conjugate_gradient(product, system.rhs, NUM_PRODUCTS, tolerance).v
    inverse = torch.linalg.pinv(hessian, rtol=flat_tolerance(system.rhs.dtype), hermitian=True)
    return (inverse @ system.rhs.double()[..., None])[..., 0].to(system.rhs)


def differences_of_phi(
    point: Point, directions: Tensor, second_order: bool, clock: Clock
) -> Tensor:
    """Return [Φ(x + hu) − Φ(x − hu)] / 2h for each direction u; y*(x ± hu) starts from y*(x)."""
    x = point.flat_x
    h = float(torch.finfo(point.dtype).eps ** (1 / 3) * (1 + x.norm()))

    def phi(there: Tensor) -> Tensor:
        moved = point.at_x(there)
        found = minimise(moved.view(), moved.flat_y, second_order, clock)
        moved = moved.at_y(found.y)
        with torch.no_grad():
            z = moved.problem.features(moved.x, moved.batch.outer)
            return moved.problem.outer(z, moved.y, moved.batch.outer).double()

    return torch.stack([(phi(x + h * u) - phi(x - h * u)) / (2 * h) for u in directions])


def draw_directions(size: int, seed: int) -> Tensor:
    """Draw orthonormal rows; a whole basis where x is that small."""
    drawn = torch.randn(size, min(size, NUM_DIRECTIONS), generator=stream(seed, "directions"))
    return torch.linalg.qr(drawn.double())[0].T


def flat(params: Params) -> Tensor:
    return flatten(leaves(params))[0].detach().double()


def compare(a: Tensor, b: Tensor) -> Comparison:
    """Compare a vector with the true one."""
    a_norm, b_norm = float(a.norm()), float(b.norm())
    cosine = float(a @ b) / (a_norm * b_norm) if a_norm and b_norm else 0.0
    return Comparison(float((a - b).norm()) / b_norm, cosine, a_norm / b_norm)
