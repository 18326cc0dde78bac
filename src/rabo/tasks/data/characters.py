"""Sets of drawn characters: what Omniglot and the glyph generator both return."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Characters:
    """Drawings of characters as uint8 [num_characters, num_drawings, height, width], ink = 255.

    alphabets and names have one entry per character.
    """

    images: Tensor
    alphabets: tuple[str, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(
                "images must be uint8 [characters, drawings, height, width], got "
                f"{self.images.dtype} {list(self.images.shape)}; scale ink to 0..255 and stack"
            )
        counts = (len(self.alphabets), len(self.names))
        if counts != (len(self), len(self)):
            raise ValueError(
                f"alphabets and names must have one entry for each of {len(self)} characters, "
                f"got {counts[0]} and {counts[1]}; repeat the alphabet for every character"
            )

    def __len__(self) -> int:
        return self.images.shape[0]

    def select(self, indices: Tensor) -> "Characters":
        """The characters at these positions, such as one client's share."""
        chosen = indices.tolist()
        return Characters(
            images=self.images[indices.to(self.images.device)],
            alphabets=tuple(self.alphabets[i] for i in chosen),
            names=tuple(self.names[i] for i in chosen),
        )

    def to(self, device: torch.device | str) -> "Characters":
        """The same characters with their images on another device."""
        return replace(self, images=self.images.to(device))


class Split(NamedTuple):
    """Characters to learn from, and characters of other alphabets to test on."""

    train: Characters
    test: Characters
