"""Which items each client holds, as int64 indices in ascending order."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor


def shards(items: Tensor | int, num_clients: int, generator: Generator) -> tuple[Tensor, ...]:
    """Random pieces of equal size (up to one) of the items, given as labels or as a count."""
    num_items = items if isinstance(items, int) else len(items)
    check_clients(num_items, num_clients, "items")
    order = torch.randperm(num_items, generator=generator)
    return tuple(piece.sort().values for piece in order.tensor_split(num_clients))


def iid(labels: Tensor, num_clients: int, generator: Generator) -> tuple[Tensor, ...]:
    """The same share of every class for every client, up to one: dirichlet with alpha → ∞."""
    check_clients(len(labels), num_clients, "items")
    classes = range(len(class_counts(labels)))
    by_class = torch.cat([shuffled_members(labels, label, generator) for label in classes])
    return tuple(by_class[k::num_clients].sort().values for k in range(num_clients))


def character_shards(
    num_characters: int, num_clients: int, generator: Generator
) -> tuple[Tensor, ...]:
    """Random pieces of equal size (up to one): no two clients share a character."""
    check_clients(num_characters, num_clients, "characters")
    return shards(num_characters, num_clients, generator)


def dirichlet(
    labels: Tensor,
    num_clients: int,
    alpha: float,
    generator: Generator,
    min_size: int = 1,
    max_draws: int = 1000,
) -> tuple[Tensor, ...]:
    """Every class is dealt out by its own p ~ Dirichlet(alpha, ..., alpha) over the clients.

    Proportions that leave a client with less than min_size items are drawn again.
    """
    check_clients(len(labels), num_clients, "items")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(
            f"the concentration (alpha) must be positive and finite, got {alpha}; use iid for no "
            "skew"
        )
    # torch draws from a Dirichlet only with its global generator, so numpy takes a seed from ours.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    random = np.random.default_rng(seed)
    class_sizes = class_counts(labels)
    smallest = 0
    for _ in range(max_draws):
        shares = random.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))
        ends = np.rint(shares.cumsum(axis=1) * class_sizes[:, None]).astype(np.int64)
        ends[:, -1] = class_sizes
        sizes = np.diff(ends, axis=1, prepend=0).sum(axis=0)
        smallest = max(smallest, int(sizes.min()))
        if sizes.min() >= min_size:
            return deal(labels, ends, generator)
    raise ValueError(
        f"each of {num_clients} clients must get at least {min_size} of {len(labels)} items, got "
        f"{smallest} at best in {max_draws} draws with alpha = {alpha}; "
        "raise alpha, or lower num_clients or min_size"
    )


def deal(labels: Tensor, ends: np.ndarray, generator: Generator) -> tuple[Tensor, ...]:
    """Client k gets the shuffled items ends[c, k-1]:ends[c, k] of every class c."""
    owners = torch.empty(len(labels), dtype=torch.int64)
    for label, class_ends in enumerate(torch.from_numpy(ends)):
        members = shuffled_members(labels, label, generator)
        owners[members] = torch.searchsorted(class_ends, torch.arange(len(members)), right=True)
    return tuple((owners == client).nonzero().squeeze(1) for client in range(ends.shape[1]))


def long_tail(labels: Tensor, ratio: float, generator: Generator) -> Tensor:
    """A subset with n_i' = ⌊n_i μ^i⌋ items of class i, where μ = ratio^(-1/(C-1)).

    Class 0 stays whole; in a balanced set the last class is ratio times smaller.
    """
    if not (ratio >= 1 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be finite and at least 1, got {ratio}; 1 keeps every item")
    sizes = class_counts(labels)
    kept = []
    for label, size in enumerate(sizes):
        # The small term keeps n / ratio whole where floating point falls just short of it.
        count = int(size * ratio ** (-label / max(len(sizes) - 1, 1)) + 1e-9)
        if count < 1:
            raise ValueError(
                f"ratio must leave at least one item in every class, got {ratio} with {size} items "
                f"of class {label}; lower the ratio"
            )
        kept.append(shuffled_members(labels, label, generator)[:count])
    return torch.cat(kept).sort().values


class Holdout(NamedTuple):
    """Indices to train on and indices to validate on."""

    train: Tensor
    validation: Tensor


def holdout(labels: Tensor, fraction: float, generator: Generator) -> Holdout:
    """Hold out this fraction of every class, rounded, but leave at least one item on each side.

    A class with a single item stays in the training part.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}; 0.2 is usual")
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, size in enumerate(class_counts(labels)):
        if size >= 2:
            count = min(max(round(fraction * int(size)), 1), int(size) - 1)
            held[shuffled_members(labels, label, generator)[:count]] = True
    return Holdout(train=(~held).nonzero().squeeze(1), validation=held.nonzero().squeeze(1))


def shuffled_members(labels: Tensor, label: int, generator: Generator) -> Tensor:
    """The positions of one class in random order."""
    members = (labels.cpu() == label).nonzero().squeeze(1)
    return members[torch.randperm(len(members), generator=generator)]


def class_counts(labels: Tensor) -> np.ndarray:
    """How many items each class 0, 1, ... has."""
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels) or int(labels.min()) < 0:
        raise ValueError(
            "labels must be a non-empty vector of whole numbers from 0, got "
            f"{labels.dtype} {list(labels.shape)}; give the class of every item"
        )
    return labels.cpu().bincount().numpy()


def check_clients(num_items: int, num_clients: int, items: str) -> None:
    """Refuse to leave a client with nothing."""
    if not 1 <= num_clients <= num_items:
        raise ValueError(
            f"the number of clients must lie in 1..{num_items}, the number of {items}, got "
            f"{num_clients}; lower it"
        )
