"""Tasks from characters whose every pixel names the drawing it is from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabo.tasks.data.characters import Characters
from rabo.tasks.data.episodes import Tasks, sample_tasks


def numbered(num_characters: int, num_drawings: int) -> Characters:
    """Drawing d of character c has the value c * num_drawings + d in every pixel."""
    values = torch.arange(num_characters * num_drawings, dtype=torch.uint8)
    images = values.reshape(num_characters, num_drawings, 1, 1).repeat(1, 1, 2, 3)
    names = tuple(map(str, range(num_characters)))
    return Characters(images, names, names)


def draw(characters: Characters, seed: int = 0, **counts: int) -> Tasks:
    generator = torch.Generator().manual_seed(seed)
    return sample_tasks(characters, **counts, generator=generator)


def ids(images: torch.Tensor) -> torch.Tensor:
    """Which drawing each image is, from its first pixel."""
    return (images[:, :, 0, 0, 0] * 255).round().long()


@settings(deadline=None)
@given(
    ways=st.integers(1, 6),
    shots=st.integers(1, 3),
    queries=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_a_task_has_distinct_characters_and_no_drawing_twice(
    ways: int, shots: int, queries: int, seed: int
):
    tasks = draw(numbered(6, 7), seed, ways=ways, shots=shots, queries=queries, num_tasks=3)
    assert tasks.support.shape == (3, ways * shots, 1, 2, 3)
    assert tasks.query.shape == (3, ways * queries, 1, 2, 3)
    for j in range(3):
        drawings = torch.cat((ids(tasks.support)[j], ids(tasks.query)[j]))
        labels = torch.cat((tasks.support_labels[j], tasks.query_labels[j]))
        assert len(drawings.unique()) == ways * (shots + queries)
        pairs = torch.stack((drawings // 7, labels), 1).unique(dim=0)
        assert len(pairs) == ways, "a label stands for one character, a character for one label"
        assert labels.bincount().tolist() == [shots + queries] * ways
        assert tasks.support_labels[j].bincount().tolist() == [shots] * ways


def test_pixels_are_scaled_to_one():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    tasks = draw(Characters(images, ("A",), ("a",)), ways=1, shots=1, queries=2, num_tasks=1)
    values = torch.cat((tasks.support, tasks.query), 1).flatten().sort().values
    assert torch.equal(values, torch.tensor([0, 0.2, 1.0]))


def test_queries_are_by_default_the_drawings_that_are_not_shots():
    tasks = draw(numbered(3, 20), ways=2, shots=5, num_tasks=2)
    assert tasks.query.shape[1] == 2 * 15
    both = torch.cat((ids(tasks.support), ids(tasks.query)), 1)
    assert all(len(row.unique()) == 40 for row in both)


def test_the_same_generator_state_gives_the_same_tasks():
    counts = {"ways": 3, "shots": 1, "num_tasks": 4}
    first, again, other = (draw(numbered(9, 4), seed, **counts) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.support, other.support)


def test_every_character_gets_every_label_about_equally_often():
    tasks = draw(numbered(4, 2), ways=2, shots=1, num_tasks=4000)
    for label in range(2):
        counts = (ids(tasks.support)[:, label] // 2).bincount(minlength=4)
        # Binomial(4000, 1/4) has standard deviation 27.4; five of them almost never happen.
        assert (counts - 1000).abs().max() < 137
    assert (ids(tasks.support) % 2).float().mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ways": 4}, "ways must be at most the 3 characters, got 4; lower ways"),
        (
            {"queries": 4},
            r"at most the 4 drawings of a character, got 1 \+ 4; lower shots or queries",
        ),
        ({"ways": 0}, "at least 1, got 0, 1, 1 and 1"),
        ({"shots": 0}, "at least 1, got 2, 0, 1 and 1"),
        ({"num_tasks": 0}, "at least 1, got 2, 1, 1 and 0"),
    ],
)
def test_tasks_that_cannot_be_drawn_are_refused(changed: dict[str, int], message: str):
    counts = {"ways": 2, "shots": 1, "queries": 1, "num_tasks": 1} | changed
    with pytest.raises(ValueError, match=message):
        draw(numbered(3, 4), **counts)


def test_shots_that_leave_no_query_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 2, 4, 0 and 1"):
        draw(numbered(3, 4), ways=2, shots=4, num_tasks=1)
