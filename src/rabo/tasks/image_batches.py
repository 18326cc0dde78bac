"""Random batches of labelled images: drawn on the CPU, made where the images lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from rabo.problems.bilevel import Batch

MARGIN = 4  # pixels by which a crop is shifted at most


@dataclass(frozen=True)
class ImageBatches:
    """Batches to train on, and to judge by; those of several steps are made by the same kernels."""

    inner: int
    outer: int
    augment: bool  # crops and flips of what is trained on

    def __call__(self, data: Batch, generator: Generator) -> Batch:
        return self.many(data, [generator])[0]

    def many(self, data: Batch, generators: Sequence[Generator]) -> list[Batch]:
        """Return what the generators draw one by one."""
        size = data.inner[0].shape[-2:]
        drawn = [self._draw(data, size, generator) for generator in generators]
        images, labels = _take(data.inner, [d.inner for d in drawn])
        places = [d.places for d in drawn if d.places is not None]
        if places:
            images = crop(images, torch.cat(places))
        held, held_labels = _take(data.outer, [d.outer for d in drawn])
        parts = [t.chunk(len(drawn)) for t in (images, labels, held, held_labels)]
        return [Batch((i, n), (h, m)) for i, n, h, m in zip(*parts, strict=True)]

    def _draw(self, data: Batch, size: Sequence[int], generator: Generator) -> "_Drawn":
        inner = torch.randperm(len(data.inner[1]), generator=generator)[: self.inner]
        places = draw_places(len(inner), size, generator) if self.augment else None
        outer = torch.randperm(len(data.outer[1]), generator=generator)[: self.outer]
        return _Drawn(inner, places, outer)


class _Drawn(NamedTuple):
    inner: Tensor
    places: Tensor | None
    outer: Tensor


def prepare(images: Tensor) -> Tensor:
    """Scale bytes to about zero mean and unit size."""
    return (images.float() / 255 - 0.47) / 0.25


def draw_places(number: int, size: Sequence[int], generator: Generator) -> Tensor:
    """Draw, for each image, the rows and then the columns of the padded image that it becomes."""
    height, width = size
    down, right = torch.randint(2 * MARGIN + 1, (2, number, 1), generator=generator)
    columns = torch.arange(width).expand(number, -1)
    mirrored = torch.rand(number, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns) + right
    return torch.cat([torch.arange(height) + down, columns], dim=1)


def crop(images: Tensor, places: Tensor) -> Tensor:
    """Shift images by up to MARGIN pixels and mirror some, as drawn."""
    number, height = len(images), images.shape[2]
    padded = F.pad(images, [MARGIN] * 4).permute(0, 2, 3, 1)
    places = places.to(images.device, non_blocking=True)
    rows, columns = places[:, :height, None], places[:, None, height:]
    which = torch.arange(number, device=images.device)[:, None, None]
    return padded[which, rows, columns].permute(0, 3, 1, 2).contiguous()


def _take(part: tuple[Tensor, Tensor], chosen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = part
    index = torch.cat(list(chosen)).to(labels.device, non_blocking=True)
    return prepare(images[index]), labels[index]
