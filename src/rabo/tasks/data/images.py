"""A labelled set of images: what CIFAR-10 and the digits both return."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """Images as uint8 [images, channels, height, width] with int64 labels below len(classes)."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        check_labelled("train", self.train, self.train_labels, len(self.classes))
        check_labelled("test", self.test, self.test_labels, len(self.classes))


def check_labelled(part: str, images: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse images or labels that a model could not be trained on."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"{part} must be uint8 [images, channels, height, width], got "
            f"{images.dtype} {list(images.shape)}; scale to 0..255 and stack"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{part}_labels must be int64 [{images.shape[0]}], got "
            f"{labels.dtype} {list(labels.shape)}; give one label per image"
        )
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"{part}_labels must lie in 0..{num_classes - 1}, got "
            f"{int(labels.min())}..{int(labels.max())}; the file may be damaged, fetch it again"
        )
