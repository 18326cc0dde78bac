"""Conv4, ResNet-12 and ResNet-18 with batch-statistics norm."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rabo.models.kernels.dispatch import is_transformed
from rabo.models.layers import Average, Convolution, Features, average, channels_last, norm


class Conv4(Features):
    """Four blocks of convolution, norm, ReLU and pooling; features are flattened."""

    def __init__(self, channels: int = 64, in_channels: int = 1):
        blocks: list[nn.Module] = []
        for i in range(4):
            width = in_channels if i == 0 else channels
            blocks += [
                Convolution(width, channels, 3),
                norm(channels),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        super().__init__(*blocks, nn.Flatten())


class _Block12(nn.Module):
    """Three convolutions beside a projection, then pooling."""

    def __init__(self, in_channels: int, channels: int, pool: bool):
        super().__init__()
        widths = (in_channels, channels, channels)
        self.convs = nn.ModuleList(Convolution(w, channels, 3) for w in widths)
        self.norms = nn.ModuleList(norm(channels) for _ in widths)
        self.shortcut = Convolution(in_channels, channels, 1)
        self.shortcut_norm = norm(channels)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        norms: Any = self.norms
        beside = self.shortcut_norm(self.shortcut(inputs))
        out = norms[0].activated(self.convs[0](inputs), 0.1)
        out = norms[1].activated(self.convs[1](out), 0.1)
        return self.pool(norms[2].activated(self.convs[2](out), 0.1, beside))


class ResNet12(Features):
    """The few-shot backbone; features are averaged over space.

    64-160-320-640 channels by default; with 28x28 images the last block is 3x3 and not pooled.
    """

    def __init__(self, widths: Sequence[int] = (64, 160, 320, 640), in_channels: int = 1):
        blocks: list[nn.Module] = []
        for i, width in enumerate(widths):
            blocks.append(_Block12(in_channels, width, pool=i < len(widths) - 1))
            in_channels = width
        super().__init__(*blocks, Average(1), nn.Flatten())


class _Block18(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = Convolution(in_channels, channels, 3, stride)
        self.norm1 = norm(channels)
        self.conv2 = Convolution(channels, channels, 3)
        self.norm2 = norm(channels)
        self.shortcut = (
            nn.Sequential(Convolution(in_channels, channels, 1, stride), norm(channels))
            if stride != 1 or in_channels != channels
            else nn.Identity()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(inputs))


class ResNet18(nn.Module):
    """ResNet-18 with the 3x3 stem for 32x32 images, which lie channels-last."""

    def __init__(self, num_classes: int = 10, width: int = 64, in_channels: int = 3):
        super().__init__()
        self.stem = Convolution(in_channels, width, 3)
        self.stem_norm = norm(width)
        stages, channels = [], width
        for i in range(4):
            out, stride = width * 2**i, 1 if i == 0 else 2
            stages += [_Block18(channels, out, stride), _Block18(out, out, 1)]
            channels = out
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if not is_transformed():
            images = channels_last(images)
        out = self.stages(F.relu(self.stem_norm(self.stem(images))))
        return self.classifier(torch.flatten(average(out), 1))
