"""Lanczos against dense eigenvalues."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rabo.hypergradients import ConjugateGradient
from rabo.hypergradients.curvature import lanczos


def symmetric(values: torch.Tensor, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=values.dtype))
    return q @ torch.diag(values) @ q.T


def test_as_many_products_as_dimensions_give_the_exact_spectrum():
    values = torch.tensor([-2.0, -0.5, 0.1, 1.0, 1.5, 4.0], dtype=torch.float64)
    H = symmetric(values, 0)
    found = lanczos(lambda p: p @ H, torch.zeros(1, 6, dtype=torch.float64), 6)
    assert float(found.largest) == pytest.approx(4.0, rel=1e-6)
    assert float(found.smallest) == pytest.approx(-2.0, rel=1e-6)
    assert float(found.margin) < 1e-6


@given(seed=st.integers(0, 1000), dim=st.integers(1, 60), scale=st.floats(1e-6, 1e6))
def test_bounds_hold_and_an_invariant_subspace_ends_the_search(seed, dim, scale):
    g = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(dim, generator=g, dtype=torch.float64).round(decimals=1)
    H = symmetric(values, seed)
    found = lanczos(lambda p: p @ H, torch.zeros(1, dim, dtype=torch.float64), 10)
    slack = 1e-5 * scale
    assert found.smallest >= values.min() - slack
    spread = values.max() - values.min()
    assert found.largest >= values.max() - 0.15 * spread - slack  # ten products see most of it
    assert found.largest <= values.abs().max() * 2.1 + slack
    assert torch.isfinite(torch.stack(list(found))).all()


@given(seed=st.integers(0, 200))
def test_automatic_damping_makes_an_indefinite_system_solvable(seed):
    g = torch.Generator().manual_seed(seed)
    values = torch.tensor([-1.0, 0.2, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    H = symmetric(values, seed)
    b = torch.randn(1, 6, generator=g, dtype=torch.float64)
    found = ConjugateGradient(num_iterations=30, damping="auto").solve(lambda p: p @ H, b)
    damping = (b - found.v @ H) @ found.v.T / (found.v @ found.v.T)  # (H + λI)v = b gives λ
    assert float(found.residual) < 1e-6
    assert 1.0 < float(damping) < 1.5


def test_automatic_damping_adds_nothing_where_curvature_is_positive():
    H = symmetric(torch.tensor([0.2, 0.5, 1.0, 2.0], dtype=torch.float64), 1)
    b = torch.ones(1, 4, dtype=torch.float64)
    plain = ConjugateGradient(num_iterations=4).solve(lambda p: p @ H, b)
    auto = ConjugateGradient(num_iterations=4, damping="auto").solve(lambda p: p @ H, b)
    assert torch.equal(plain.v, auto.v)
