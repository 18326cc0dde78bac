"""`rabo.check`: compare a bilevel problem with an independent solution before training."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from rabo.checking.advice import advise
from rabo.checking.clock import Clock, OutOfTimeError
from rabo.checking.curvature import check_curvature
from rabo.checking.derivatives import check_second_derivatives
from rabo.checking.estimators import check_estimators
from rabo.checking.heterogeneity import check_heterogeneity
from rabo.checking.implicit import check_hypergradient
from rabo.checking.losses import check_finite, check_repeatable
from rabo.checking.measured import Measured
from rabo.checking.minimum import check_minimum
from rabo.checking.point import Point
from rabo.checking.report import Finding, ProblemCheck, ProblemCheckError
from rabo.checking.use import check_use
from rabo.federation.clients import Client, check_clients

CHECKS: dict[str, Callable[[Measured], Measured]] = {
    "finite losses": check_finite,
    "repeated evaluations": check_repeatable,
    "use of x and y": check_use,
    "second derivatives": check_second_derivatives,
    "inner minimum": check_minimum,
    "curvature": check_curvature,
    "hypergradient": check_hypergradient,
    "estimators": check_estimators,
    "local against global": check_heterogeneity,
}


def check(
    clients: Sequence[Client],
    *,
    seed: int = 0,
    max_clients: int = 10,
    max_seconds: float = 120.0,
    raise_exception: bool = False,
    on_check: Callable[[str], None] | None = None,
) -> ProblemCheck:
    """Check a bilevel problem, as `torch.autograd.gradcheck` checks a function.

    Clients are the same as for `rabo.solve`; the first `max_clients` are checked, at full width and
    on one batch each, at the start of x. Losses must be finite, repeatable and use x and y. The
    curvature of g in y, the error of every estimator, and the bias of local Hessians follow.
    Reference solutions use float64 where the losses run in it: dense for up to 1,000 entries of y,
    otherwise central differences of Φ with y solved anew.

    Failing checks set `passed` to False, or raise with `raise_exception=True`. Warnings do neither.
    Checks that exceed `max_seconds` are skipped. `on_check` is called with the name of each check
    before it starts. Clients and global random states stay as they are.
    """
    check_clients(clients)
    if getattr(clients[0].problem, "has_one_loss", False):
        raise ValueError("rabo.check needs a bilevel problem, got a problem of one loss")
    if max_clients < 1:
        raise ValueError(f"max_clients must be at least 1, got {max_clients}")
    if not max_seconds > 0:
        raise ValueError(f"max_seconds must be positive, got {max_seconds}")
    clock, number = Clock(max_seconds), min(len(clients), max_clients)
    with _kept_random_states():
        torch.default_generator.manual_seed(seed)
        m = _run(Measured(Point.of(clients, number, seed), clock, seed), on_check)
    found = _result(m, len(clients))
    if raise_exception and not found.passed:
        first = found.problems[0]
        raise ProblemCheckError(f"{first.check}: {first.result}; {first.advice}\n\n{found}")
    return found


def _run(m: Measured, on_check: Callable[[str], None] | None) -> Measured:
    """Run checks in order, until one fails or the time is up."""
    for name, run in CHECKS.items():
        if on_check:
            on_check(name)
        try:
            m.clock.tick()
            m = run(m)
        except OutOfTimeError:
            result = f"stopped after {m.clock.seconds:g} s; later checks did not run"
            m = m.plus(Finding(name, result, "skipped", "raise max_seconds"))
            break
        if m.fails:
            break
    return advise(m)


def _result(m: Measured, num_clients: int) -> ProblemCheck:
    return ProblemCheck(
        findings=m.findings,
        num_clients=num_clients,
        num_checked=len(m.own),
        precision=str(m.here.dtype).removeprefix("torch."),
        uses=m.uses,
        repeat_gap=m.repeat_gap,
        spectra=m.spectra,
        largest_curvature=m.largest_curvature,
        is_convex=m.is_convex,
        inner_slope=m.inner_slope,
        hypergradient_gap=m.hypergradient_gap,
        estimators=m.estimators,
        local=m.local,
        direct=m.direct,
        options=m.options,
        beta=m.beta,
        seconds=m.clock.elapsed,
    )


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python, which losses may use."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)
