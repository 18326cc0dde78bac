"""Counting costs imports what it needs when something is first counted."""

import subprocess
import sys

import pytest


def test_triton_is_imported_when_work_is_first_metered():
    pytest.importorskip("triton")
    code = """
import sys, torch, rabo
print("triton" in sys.modules)
from rabo.exchange.cost import measure
_, cost = measure(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
print("triton" in sys.modules, cost.multiply_adds)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", str(2 * 3 * 4)]
