"""Operations on named tensors."""

import pytest
import torch

from rabo.tree import plus


@pytest.mark.parametrize(
    "dtypes", [["float32"] * 2, ["float32", "float64"], ["bfloat16", "float32"]]
)
def test_a_step_of_all_tensors_is_that_of_each(dtypes, generator):
    draw = torch.randn(2, len(dtypes), 3, 2, generator=generator)
    here, ways = (
        {f"{i}": t.to(getattr(torch, d)).requires_grad_() for i, (t, d) in enumerate(pairs)}
        for pairs in (zip(each, dtypes, strict=True) for each in draw)
    )
    for factor in (-0.1, torch.tensor(-0.1, dtype=torch.float64)):
        found = plus(here, factor, dict(reversed(ways.items())))
        assert list(found) == list(here)
        for name, value in found.items():
            assert not value.requires_grad
            assert value.dtype == here[name].dtype
            assert torch.equal(value, here[name] - 0.1 * ways[name])


def test_no_tensors_take_no_step():
    assert plus({}, 0.1, {}) == plus({}, torch.tensor(0.1), {}) == {}
