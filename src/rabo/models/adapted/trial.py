"""Every kernel once, to find out whether they run on a device."""

from typing import Any

import torch

from rabo.models.adapted.convolution import _sums, _window
from rabo.models.adapted.normalisation import _Norm, _NormBack, _NormTwice


def run_all(device: torch.device, half: bool) -> None:
    """Run them on channels that fill a tile, and on some that do not."""
    images = torch.rand(1, 2, 1, 2, 2, device=device)
    for channels in (1, 32):
        weight = torch.rand(1, 32, channels, 3, 3, device=device)
        out = _window(images, weight, False)
        _window(out, weight, True)
        _sums(out, images, 3, half)
        images = out
    ones = torch.ones(1, 32, device=device)
    out, mean, scale = _Norm.forward(images, None, ones, ones, 0.1, 1e-5)
    given: Any = images, None, ones, ones, mean, scale, 0.1
    twice: Any = _NormTwice.forward
    twice(*_NormBack.forward(out, *given), out, *given)
