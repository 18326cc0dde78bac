"""Splits are partitions, and their sizes follow their formulas."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from rabo.tasks.data.splits import (
    character_shards,
    deal,
    dirichlet,
    holdout,
    iid,
    long_tail,
    shards,
)

seeds = st.integers(0, 2**32)
label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=60)
light = settings(deadline=None)


def generator(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def assert_partition(pieces: Sequence[Tensor], num_items: int) -> None:
    """Disjoint, complete, and each in ascending order."""
    assert torch.equal(torch.cat(list(pieces)).sort().values, torch.arange(num_items))
    assert all(torch.equal(piece, piece.sort().values) for piece in pieces)
    assert all(piece.dtype == torch.int64 for piece in pieces)


@light
@given(num_items=st.integers(1, 80), num_clients=st.integers(1, 80), seed=seeds)
def test_shards_are_a_partition_into_equal_sizes(num_items: int, num_clients: int, seed: int):
    assume(num_clients <= num_items)
    labels = torch.zeros(num_items, dtype=torch.int64)
    pieces = shards(num_items, num_clients, generator(seed))
    assert_partition(pieces, num_items)
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == num_clients
    assert max(sizes) - min(sizes) <= 1
    for others in (
        shards(labels, num_clients, generator(seed)),
        character_shards(num_items, num_clients, generator(seed)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(pieces, others, strict=True))


@light
@given(labels=label_lists, num_clients=st.integers(1, 6), seed=seeds)
def test_iid_gives_every_client_the_same_share_of_every_class(
    labels: list[int], num_clients: int, seed: int
):
    assume(num_clients <= len(labels))
    pieces = iid(torch.tensor(labels), num_clients, generator(seed))
    assert_partition(pieces, len(labels))
    for label in set(labels):
        counts = [sum(labels[i] == label for i in piece.tolist()) for piece in pieces]
        assert max(counts) - min(counts) <= 1
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_shards_are_random_and_follow_the_generator():
    first, again, other = (shards(100, 2, generator(seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Of 50 random items about 25 lie in the first half; 50 would mean they are not shuffled.
    assert 12 < int((first < 50).sum()) < 38


@pytest.mark.parametrize("num_clients", [0, 4])
def test_more_clients_than_items_or_none_are_refused(num_clients: int):
    labels = torch.tensor([0, 1, 1])
    message = rf"number of clients must lie in 1\.\.3, the number of items, got {num_clients}"
    for split in (
        lambda: shards(3, num_clients, generator()),
        lambda: iid(labels, num_clients, generator()),
        lambda: dirichlet(labels, num_clients, 1.0, generator()),
    ):
        with pytest.raises(ValueError, match=message):
            split()
    with pytest.raises(ValueError, match="the number of characters"):
        character_shards(3, num_clients, generator())


@light
@given(labels=label_lists, num_clients=st.integers(1, 6), alpha=st.floats(0.05, 1000), seed=seeds)
def test_dirichlet_is_a_partition_for_any_alpha(
    labels: list[int], num_clients: int, alpha: float, seed: int
):
    assume(num_clients <= len(labels))
    everything = torch.tensor(labels)
    pieces = dirichlet(everything, num_clients, alpha, generator(seed), min_size=0)
    assert len(pieces) == num_clients
    assert_partition(pieces, len(labels))


def test_dirichlet_goes_from_one_class_per_client_to_equal_shares():
    labels = torch.arange(10).repeat_interleave(200)
    even = dirichlet(labels, 4, 1e6, generator())
    for piece in even:
        counts = labels[piece].bincount(minlength=10)
        assert (counts - 50).abs().max() <= 1
    skewed = dirichlet(labels, 4, 0.01, generator())
    counts = torch.stack([labels[piece].bincount(minlength=10) for piece in skewed])
    assert (counts.amax(0) > 190).sum() >= 7, "nearly every class lies with one client"


def test_dirichlet_takes_shuffled_items_and_follows_the_generator():
    labels = torch.zeros(1000, dtype=torch.int64)
    first, again, other = (dirichlet(labels, 2, 100.0, generator(s))[0] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.max() > 900
    assert first.min() < 100


def test_dirichlet_deals_exactly_the_drawn_shares():
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 0])
    pieces = deal(labels, np.array([[0, 3, 4], [2, 2, 3]]), generator())
    counts = [labels[piece].bincount(minlength=2).tolist() for piece in pieces]
    assert counts == [[0, 2], [3, 0], [1, 1]]


def test_dirichlet_redraws_until_everyone_has_the_least_size():
    labels = torch.arange(3).repeat(100)
    for seed in range(5):
        sizes = [len(p) for p in dirichlet(labels, 6, 0.3, generator(seed), min_size=20)]
        assert min(sizes) >= 20
        assert sum(sizes) == 300


def test_dirichlet_gives_up_after_the_allowed_draws():
    labels = torch.zeros(100, dtype=torch.int64)
    message = r"each of 10 clients must get at least 10 of 100 items, got \d at best in 5 draws"
    with pytest.raises(ValueError, match=message):
        dirichlet(labels, 10, 0.1, generator(), min_size=10, max_draws=5)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_not_positive_and_finite_is_refused(alpha: float):
    with pytest.raises(ValueError, match="must be positive and finite"):
        dirichlet(torch.tensor([0, 1]), 2, alpha, generator())


def test_long_tail_of_cifar_at_ratio_100_has_the_known_counts():
    labels = torch.arange(10).repeat(5000)
    kept = labels[long_tail(labels, 100, generator())].bincount()
    assert kept.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert int(kept.sum()) == 12406


@pytest.mark.parametrize(("size", "ratio"), [(30, 30), (60, 7), (490, 10), (49, 49), (98, 49)])
def test_the_last_class_is_ratio_times_smaller(size: int, ratio: int):
    labels = torch.arange(6).repeat(size)
    kept = labels[long_tail(labels, ratio, generator())].bincount()
    assert kept[0] == size
    assert kept[-1] == size // ratio


@light
@given(labels=label_lists, seed=seeds)
def test_ratio_one_keeps_everything(labels: list[int], seed: int):
    given_labels = torch.tensor(labels)
    assume(int(given_labels.bincount().min()) > 0)
    assert torch.equal(long_tail(given_labels, 1, generator(seed)), torch.arange(len(labels)))


def test_long_tail_keeps_random_items():
    labels = torch.arange(2).repeat(500)
    first, again, other = (long_tail(labels, 10, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique()) == len(first) == 550


def test_long_tail_refuses_to_lose_a_class():
    with pytest.raises(ValueError, match="got 20 with 10 items of class 1; lower the ratio"):
        long_tail(torch.arange(2).repeat(10), 20, generator())
    with pytest.raises(ValueError, match="with 0 items of class 1"):
        long_tail(torch.tensor([0, 2]), 1, generator())
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        long_tail(torch.tensor([0, 1]), 0.5, generator())


@light
@given(labels=label_lists, fraction=st.floats(0.01, 0.99), seed=seeds)
def test_holdout_has_every_larger_class_on_both_sides(
    labels: list[int], fraction: float, seed: int
):
    everything = torch.tensor(labels)
    parts = holdout(everything, fraction, generator(seed))
    assert_partition(parts, len(labels))
    train, held = (everything[part].bincount(minlength=5) for part in parts)
    for size, kept, validated in zip((train + held).tolist(), train, held, strict=True):
        if size >= 2:
            assert kept >= 1
            assert validated >= 1
            assert abs(int(validated) - fraction * size) <= 1
        else:
            assert validated == 0


def test_holdout_of_a_fifth_is_a_fifth_of_every_class():
    labels = torch.arange(4).repeat_interleave(torch.tensor([100, 50, 10, 5]))
    held = labels[holdout(labels, 0.2, generator()).validation].bincount()
    assert held.tolist() == [20, 10, 2, 1]
    first, other = (holdout(labels, 0.2, generator(seed)).validation for seed in (0, 1))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, float("nan")])
def test_a_fraction_that_leaves_a_side_empty_is_refused(fraction: float):
    with pytest.raises(ValueError, match="fraction must lie between 0 and 1"):
        holdout(torch.tensor([0, 0]), fraction, generator())


@pytest.mark.parametrize(
    "labels", [torch.tensor([0.0, 1.0]), torch.tensor([-1, 0]), torch.tensor([[0, 1]])]
)
def test_labels_that_are_not_a_vector_of_classes_are_refused(labels: Tensor):
    with pytest.raises(ValueError, match="labels must be a non-empty vector of whole numbers"):
        holdout(labels, 0.5, generator())
