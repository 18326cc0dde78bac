import os

import pytest
import torch
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # kernels of a GPU run on a CPU

settings.register_profile("rabo", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("rabo")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors on many threads are slower, and tests run one process per core."""
    torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
