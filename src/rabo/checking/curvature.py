"""The curvature of each client's inner loss in y."""

import torch
from torch import Tensor

from rabo.checking.clock import Clock
from rabo.checking.measured import Measured
from rabo.checking.point import Point
from rabo.checking.report import Finding, Spectrum
from rabo.hypergradients.curvature import lanczos

LARGEST_DENSE = 1000  # entries of y up to which Hessians are formed
NUM_PRODUCTS = 40
FLAT = {torch.float64: 1e-10}  # eigenvalues relative to the largest that count as zero
OWN_FLAT = 1e-5  # in single precision
HARMLESS = 1e-5  # share of ∇_y f along flat directions
ILL_CONDITIONED = 1e4


def check_curvature(m: Measured) -> Measured:
    """Measure the spectrum of every ∇²_yy g_i, at the start and at the inner minimum."""
    start = m.own.each() if m.own.copies == 1 else [m.own.first()]
    before = [_lanczos(point, m) for point in start]
    scale = max(s.largest for s in before)
    hessians: tuple[Tensor, ...] = ()
    if m.here.flat_y.shape[1] <= LARGEST_DENSE:
        hessians = tuple(dense_hessian(p, m.has_second_order, m.clock) for p in m.here.each())
        pairs = zip(m.here.each(), hessians, strict=True)
        spectra = tuple(_dense(point, hessian, scale, m) for point, hessian in pairs)
        mean = _dense(m.here, torch.stack(hessians).mean(dim=0), scale, m)
    else:
        spectra = tuple(_lanczos(point, m) for point in m.here.each())
        mean = spectra[0] if len(m.here) == 1 else _lanczos(m.here, m)
    everywhere = [*before, *spectra]
    largest = max(max(s.largest, -s.smallest) for s in everywhere)
    tolerance = OWN_FLAT * max(largest, 0.0)  # the start is measured in single precision
    is_convex = all(s.smallest >= -tolerance for s in everywhere)
    return m.plus(
        _size(spectra),
        _convexity(before, spectra, is_convex),
        hessians=hessians,
        spectra=spectra,
        largest_curvature=largest,
        is_convex=is_convex,
        is_minimum=m.is_solved and mean.smallest >= -tolerance,
        is_unique=mean.flat_share <= HARMLESS,
    )


def flat_tolerance(dtype: torch.dtype) -> float:
    return FLAT.get(dtype, OWN_FLAT)


def dense_hessian(point: Point, second_order: bool, clock: Clock) -> Tensor:
    """Form ∇²_yy g column by column, one matrix per copy of y."""
    like, columns = point.flat_y, []
    product = clock.guard(point.system(second_order).product)
    for j in range(like.shape[1]):
        unit = torch.zeros_like(like)
        unit[:, j] = 1
        columns.append(product(unit).double())
    matrix = torch.stack(columns, dim=2)
    return (matrix + matrix.mT) / 2


def _dense(point: Point, hessian: Tensor, scale: float, m: Measured) -> Spectrum:
    """Return the extreme eigenvalues, and how much of ∇_y f lies along flat directions.

    The scale is the curvature at the start: where y runs away, all curvature vanishes.
    """
    values, vectors = torch.linalg.eigh(hessian)
    largest = float(values.max())
    is_flat = values.abs() <= flat_tolerance(point.dtype) * max(scale, float(values.abs().max()))
    if bool(is_flat.all()):
        return Spectrum(largest, 0.0, True, values.numel(), 1.0)
    rhs = point.system(m.has_second_order).rhs.double()
    parts = (vectors.mT @ rhs[..., None])[..., 0]
    share = float(parts[is_flat].norm() / rhs.norm().clamp(min=1e-300))
    return Spectrum(largest, float(values[~is_flat].min()), True, int(is_flat.sum()), share)


def _lanczos(point: Point, m: Measured) -> Spectrum:
    product, like = m.clock.guard(point.system(m.has_second_order).product), point.flat_y
    found = lanczos(product, like, NUM_PRODUCTS)
    return Spectrum(float(found.largest), float(found.smallest), like.numel() <= NUM_PRODUCTS)


def _size(spectra: tuple[Spectrum, ...]) -> Finding:
    """Describe the spectra at the inner minimum."""
    largest, smallest = max(s.largest for s in spectra), min(s.smallest for s in spectra)
    num_flat, share = max(s.num_flat for s in spectra), max(s.flat_share for s in spectra)
    bound = "" if spectra[0].is_exact else "at most "
    result = (
        f"largest {_range([s.largest for s in spectra])}, "
        f"smallest {bound}{_range([s.smallest for s in spectra])}"
    )
    row = Finding("curvature of g in y", result)
    if not largest > 0:
        return row._replace(verdict="fails", advice="g must be curved in y: add a penalty on y")
    if num_flat:
        plural = "s" if num_flat > 1 else ""
        row = row._replace(result=f"{result}; zero along {num_flat} direction{plural}")
        if share > HARMLESS:
            advice = "singular, and f changes along flat directions: add a penalty on y to g"
            return row._replace(verdict="warning", advice=advice)
        row = row._replace(advice="harmless: f is flat there too")
    if smallest < 0:
        return row._replace(verdict="warning", advice="indefinite: see the next row")
    condition = max(s.condition for s in spectra)
    row = row._replace(result=f"{row.result}; condition {condition:.3g}")
    if condition > ILL_CONDITIONED:
        advice = "ill-conditioned: a larger penalty on y, or more iterations of the solver"
        return row._replace(verdict="warning", advice=advice)
    return row


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _convexity(before: list[Spectrum], after: tuple[Spectrum, ...], is_convex: bool) -> Finding:
    name = "g convex in y"
    if is_convex:
        return Finding(name, "yes, at the start and at the inner minimum")
    lowest = [min(s.smallest for s in each) for each in (before, after)]
    where = "start" if lowest[0] < lowest[1] else "inner minimum"
    result = f"no: curvature {min(lowest):.3g} at the {where}"
    advice = "the implicit system is indefinite there: conjugate gradients need damping"
    return Finding(name, result, "warning", advice)
