"""Generated characters: the same for a seed, and neither trivial nor noise."""

import hashlib

import pytest
import torch

from rabo.tasks.data.characters import Characters
from rabo.tasks.data.episodes import sample_tasks
from rabo.tasks.data.glyphs import ink, make_glyphs


def nearest_neighbour_accuracy(characters: Characters) -> float:
    """5-way 1-shot accuracy of the nearest image in raw pixels."""
    generator = torch.Generator().manual_seed(0)
    tasks = sample_tasks(characters, ways=5, shots=1, queries=5, num_tasks=300, generator=generator)
    distances = torch.cdist(tasks.query.flatten(2), tasks.support.flatten(2))
    guesses = tasks.support_labels.gather(1, distances.argmin(2))
    return (guesses == tasks.query_labels).float().mean().item()


def test_a_seed_gives_the_same_bits_on_every_machine():
    train, test = make_glyphs(7, num_alphabets=3, characters_per_alphabet=2, drawings=2)
    content = train.images.numpy().tobytes() + test.images.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == (
        "60da02cba70414390af2ce3fc01469df997e1858a66d40f825b2f0fd3752196a"
    )


def test_another_seed_gives_other_characters():
    first, second = (make_glyphs(seed, 2, 2, 2).train.images for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("num_alphabets", "num_train"), [(50, 30), (5, 3), (2, 1), (3, 2)])
def test_three_fifths_of_the_alphabets_are_for_training(num_alphabets: int, num_train: int):
    train, test = make_glyphs(0, num_alphabets, characters_per_alphabet=2, drawings=1)
    assert len(set(train.alphabets)) == num_train
    assert len(set(test.alphabets)) == num_alphabets - num_train
    assert not set(train.alphabets) & set(test.alphabets)
    assert train.images.shape == (2 * num_train, 1, 28, 28)
    assert train.names[:2] == ("character01", "character02")


def test_nearest_neighbour_is_above_chance_and_far_from_perfect():
    test = make_glyphs(0).test
    assert test.images.shape == (400, 20, 28, 28)
    assert 0.35 < nearest_neighbour_accuracy(test) < 0.7


def test_drawings_of_a_character_differ_and_every_one_has_ink():
    images = make_glyphs(3, num_alphabets=5).train.images.flatten(2).float() / 255
    coverage = images.mean(2)
    assert coverage.min() > 0.005
    assert coverage.max() < 0.5
    assert (images[:, 0] - images[:, 1]).abs().sum(1).min() > 1


def test_size_changes_the_resolution_not_the_character():
    small = make_glyphs(1, 2, 3, 2, size=28).train.images.float()
    large = make_glyphs(1, 2, 3, 2, size=56).train.images.float()
    assert large.shape[-1] == 56
    assert float(large.mean()) == pytest.approx(float(small.mean()), rel=0.1)
    shrunk = torch.nn.functional.avg_pool2d(large, 2)
    both = torch.stack((shrunk.flatten(), small.flatten()))
    assert torch.corrcoef(both)[0, 1] > 0.9


def test_the_ink_of_a_point_fades_with_the_distance():
    pixels = ink(torch.tensor([[[4.0, 2.0]]]), half_width=torch.tensor([1.0]), size=8)[0]
    assert pixels[2, 2:7].tolist() == [0, 128, 255, 128, 0]  # 1.5 - distance, between 0 and 1
    assert pixels[1:4, 4].tolist() == [128, 255, 128]
    assert pixels[3, 5] == round(255 * (1.5 - 2**0.5))


@pytest.mark.parametrize("counts", [(1, 1, 1, 28), (2, 0, 1, 28), (2, 1, 0, 28), (2, 1, 1, 7)])
def test_counts_that_leave_nothing_are_refused(counts: tuple[int, int, int, int]):
    with pytest.raises(ValueError, match="at least 2 alphabets"):
        make_glyphs(0, *counts)
