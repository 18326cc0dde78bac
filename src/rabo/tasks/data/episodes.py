"""Few-shot tasks: N characters, K drawings of each to learn from, others to be judged on."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rabo.tasks.data.characters import Characters


class Tasks(NamedTuple):
    """J tasks; images are float [J, ways * shots or queries, 1, height, width] in 0..1.

    Within a task the images lie by class: all of label 0, then all of label 1, and so on.
    """

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor


def sample_tasks(
    characters: Characters,
    *,
    ways: int,
    shots: int,
    queries: int | None = None,
    num_tasks: int,
    generator: Generator,
) -> Tasks:
    """Draw tasks of distinct characters in random order, their drawings without replacement.

    queries are per class, and by default all drawings that are not shots. The draws are made on
    the CPU, so that they are the same wherever the images lie.
    """
    num_characters, num_drawings = characters.images.shape[:2]
    queries = num_drawings - shots if queries is None else queries
    check_task(num_characters, num_drawings, ways, shots, queries, num_tasks)
    order = torch.rand(num_tasks, num_characters, generator=generator).argsort(dim=1)
    chosen = order[:, :ways, None]
    order = torch.rand(num_tasks, ways, num_drawings, generator=generator).argsort(dim=2)
    drawings = order[:, :, : shots + queries]
    support, query = (chosen * num_drawings + drawings).split([shots, queries], dim=2)
    index = torch.cat([support.flatten(1), query.flatten(1)], dim=1)
    both = gather(characters.images, index)
    return Tasks(
        support=both[:, : ways * shots],
        support_labels=label(characters.images.device, num_tasks, ways, shots),
        query=both[:, ways * shots :],
        query_labels=label(characters.images.device, num_tasks, ways, queries),
    )


def gather(images: Tensor, index: Tensor) -> Tensor:
    """The drawings at index [J, n] as float [J, n, 1, height, width]."""
    drawings = images.flatten(0, 1)[index.to(images.device, non_blocking=True)]
    return drawings.unsqueeze(2).float() / 255


@lru_cache(maxsize=16)
def label(device: torch.device, num_tasks: int, ways: int, per_class: int) -> Tensor:
    """The labels 0, ..., 0, 1, ..., ways - 1 of every task."""
    return torch.arange(ways, device=device).repeat_interleave(per_class).repeat(num_tasks, 1)


def check_task(
    num_characters: int, num_drawings: int, ways: int, shots: int, queries: int, num_tasks: int
) -> None:
    """Refuse tasks that these characters cannot give."""
    if min(ways, shots, queries, num_tasks) < 1:
        raise ValueError(
            "ways, shots, queries and num_tasks must be at least 1, got "
            f"{ways}, {shots}, {queries} and {num_tasks}; raise the one that is not"
        )
    if ways > num_characters:
        raise ValueError(
            f"ways must be at most the {num_characters} characters, got {ways}; "
            "lower ways, or spread the characters over fewer clients"
        )
    if shots + queries > num_drawings:
        raise ValueError(
            f"shots + queries must be at most the {num_drawings} drawings of a character, got "
            f"{shots} + {queries}; lower shots or queries"
        )
