"""What options that are given as text mean: values, devices, capacities."""

import json
from fractions import Fraction
from typing import Any

import torch

from rabo.errors import lookup
from rabo.exchange.budgets import Budget, Now, check_capacity


def parse_option(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, where a value is a number, a list such as [1,2,4], or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"an option must be NAME=VALUE, got {text!r}")
    try:
        return name.strip().replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.strip().replace("-", "_"), value


def choose_device(name: str) -> str:
    """Resolve "auto" to the GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(
            f"device must be auto, cpu or cuda (cuda:1 is the second GPU), got {name!r}"
        )
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"no GPU is available here, got --device {name}; use cpu or auto")
    return name


def device_name(name: str) -> str:
    """Return what a run is done on, in words."""
    device = choose_device(name)
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def parse_capacities(text: str) -> list[Now]:
    """Read "1,1/2,0.25" and budgets such as "memory:64MB" or "multiply-adds:2G"."""
    return [_parse_capacity(item.strip()) for item in text.split(",")]


def _parse_capacity(item: str) -> Now:
    kind, colon, amount = item.partition(":")
    if colon:
        names = {"memory": "memory", "multiply-adds": "multiply_adds", "traffic": "traffic"}
        return Budget(**{lookup("budget", kind, names): amount})
    try:
        return check_capacity(float(Fraction(item)))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"a capacity must be a fraction of the width in (0, 1] such as 1/2, or a budget "
            f"such as memory:64MB, got {item!r}"
        ) from error
