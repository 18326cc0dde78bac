import pytest
import torch
import torch.nn.functional as F

from rabo.problems.bilevel import Batch
from rabo.seeding import stream
from rabo.tasks.image_batches import MARGIN, ImageBatches, crop, draw_places, prepare
from rabo.tree import leaves


def images_of(number, seed):
    images = torch.randint(256, (number, 3, 8, 8), generator=stream(seed), dtype=torch.uint8)
    return images, torch.arange(number)


def test_crops_and_flips_only_move_pixels():
    images = torch.arange(6 * 3 * 8 * 8.0).reshape(6, 3, 8, 8) + 1
    padded = F.pad(images, [MARGIN] * 4)
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # all shifts, down and right
    seen = set()
    for seed in range(5):
        moved = crop(images, draw_places(6, (8, 8), stream(seed)))
        for image, shifts in zip(moved, windows, strict=True):
            found = [
                (down, right, mirrored)
                for down in range(2 * MARGIN + 1)
                for right in range(2 * MARGIN + 1)
                for mirrored in (False, True)
                if torch.equal(image, shifts[:, down, right].flip([2] if mirrored else []))
            ]
            assert len(found) == 1
            seen |= set(found)
    assert len(seen) > 20
    assert {mirrored for _, _, mirrored in seen} == {False, True}


@pytest.mark.parametrize("augment", [False, True])
def test_batches_of_several_steps_are_those_of_each(augment):
    data = Batch(images_of(30, 0), images_of(11, 1))
    sample = ImageBatches(7, 5, augment)
    together = sample.many(data, [stream(s) for s in range(4)])
    assert len(together) == 4
    for seed, batch in enumerate(together):
        alone = sample(data, stream(seed))
        assert all(map(torch.equal, leaves(batch), leaves(alone)))
        assert len(set(batch.inner[1].tolist())) == 7  # without replacement
        if not augment:
            assert torch.equal(batch.inner[0], prepare(data.inner[0][batch.inner[1]]))
        judged = prepare(data.outer[0][batch.outer[1]])
        assert torch.equal(batch.outer[0], judged)


def test_a_client_with_few_images_gets_all_of_them():
    data = Batch(images_of(3, 0), images_of(2, 1))
    [first, second] = ImageBatches(7, 5, True).many(data, [stream(0), stream(1)])
    assert sorted(first.inner[1].tolist()) == sorted(second.inner[1].tolist()) == [0, 1, 2]
    assert first.outer[0].shape == (2, 3, 8, 8)
