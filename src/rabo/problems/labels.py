"""Class labels of a problem and of one client's data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rabo.tree import Params

MaskedLogits: TypeAlias = Literal["none", "zero", "exclude"]


@dataclass(frozen=True, eq=False)
class OwnLabels:
    """The labels in one client's data, and the tensors of y with one row per class."""

    labels: tuple[int, ...]
    absent: Tensor  # by class: whether the client has no example of it
    tensors: tuple[str, ...]

    def mask(self, logits: Any, how: MaskedLogits) -> Tensor:
        """Set the logits of absent classes to zero, or take these classes out of the softmax."""
        number = len(self.absent)
        if not isinstance(logits, Tensor) or logits.dim() == 0 or logits.shape[-1] != number:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"mask_logits needs a y that returns one logit per class ({number}) in its last "
                f"dimension, got {got}"
            )
        # a finite number: -inf times a zero gradient would be NaN
        value = 0.0 if how == "zero" else torch.finfo(logits.dtype).min
        return logits.masked_fill(self.absent, value)

    def rows(self) -> dict[str, tuple[int, ...]]:
        """Return the rows that belong to the client's labels, by tensor."""
        return dict.fromkeys(self.tensors, self.labels)


def find_labels(found: Sequence[Any], y: Params, tensors: Sequence[str]) -> OwnLabels:
    """Collect the labels of a client's data."""
    for part in found:
        if not isinstance(part, Tensor) or part.is_floating_point() or part.is_complex():
            kind = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"labels must return a tensor of whole numbers, got {kind}")
    rows = y[tensors[0]]
    labels = torch.cat([part.reshape(-1).long() for part in found]).unique().tolist()
    if labels and not (labels[0] >= 0 and labels[-1] < len(rows)):
        raise ValueError(
            f"labels must lie in 0..{len(rows) - 1}, the rows of {tensors[0]}, got "
            f"{labels[0]}..{labels[-1]}; if the classifier has other names, give class_rows="
        )
    absent = torch.ones(len(rows), dtype=torch.bool)
    absent[labels] = False
    return OwnLabels(tuple(labels), absent.to(rows.device), tuple(tensors))


def check_class_rows(
    given: Sequence[str] | None, part: nn.Module | Params, y: Params
) -> tuple[str, ...]:
    """Return the tensors of y with one row per class: as given, or of the last linear layer."""
    names = tuple(given) if given is not None else _last_linear(part)
    if not names:
        raise ValueError(
            "labels= needs a classifier: y has no linear layer, so give class_rows=, the names of "
            "its tensors with one row per class"
        )
    for name in names:
        if name not in y:
            raise ValueError(f"class_rows must name tensors of y ({', '.join(y)}), got {name!r}")
    if any(y[name].dim() == 0 for name in names) or len({len(y[name]) for name in names}) != 1:
        shapes = ", ".join(f"{name} {tuple(y[name].shape)}" for name in names)
        raise ValueError(f"class_rows must name tensors with one row per class, got {shapes}")
    return names


def _last_linear(part: nn.Module | Params) -> tuple[str, ...]:
    if not isinstance(part, nn.Module):
        return ()
    layers = [(n, m) for n, m in part.named_modules() if isinstance(m, nn.Linear)]
    if not layers:
        return ()
    name, layer = layers[-1]
    return tuple(f"{name}.{key}" if name else key for key, _ in layer.named_parameters())
