import os

import pytest
import torch
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # kernels of a GPU run on a CPU

# `make test-all` draws many examples: pytest --hypothesis-profile thorough
settings.register_profile("quick", deadline=None, max_examples=8, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("quick")


# Many tests have clients that differ on purpose, and share clients of full and pruned methods.
# pyproject.toml would import rabo before this file, without interpreter and coverage.
IGNORED = ("rabo.federation.alarms.BiasWarning", "rabo.errors.CapacityWarning")


def pytest_configure(config):
    for name in IGNORED:
        config.addinivalue_line("filterwarnings", f"ignore::{name}")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors on many threads are slower, and tests run one process per core."""
    torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
