"""Operations on lists of tensors."""

import pytest
import torch

from rabo.tree import plus


@pytest.mark.parametrize(
    "dtypes", [["float32"] * 2, ["float32", "float64"], ["bfloat16", "float32"]]
)
def test_a_step_on_a_list_is_that_of_each_tensor(dtypes, generator):
    here = [torch.randn(3, 2, generator=generator).to(getattr(torch, d)) for d in dtypes]
    ways = [torch.randn(3, 2, generator=generator).to(getattr(torch, d)) for d in dtypes]
    for factor in (-0.1, torch.tensor(-0.1, dtype=torch.float64)):
        for found, h, w in zip(plus(here, factor, ways), here, ways, strict=True):
            assert found.dtype == h.dtype
            assert torch.equal(found, h - 0.1 * w)


def test_no_tensors_take_no_step():
    assert plus([], 0.1, []) == plus([], torch.tensor(0.1), []) == []
