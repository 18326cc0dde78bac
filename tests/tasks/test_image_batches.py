import pytest
import torch

from rabo.problem import Batch
from rabo.seeding import stream
from rabo.tasks.image_batches import ImageBatches, crop, draw_places, prepare
from rabo.tree import leaves


def images_of(number, seed):
    images = torch.randint(256, (number, 3, 8, 8), generator=stream(seed), dtype=torch.uint8)
    return images, torch.arange(number)


def test_crops_and_flips_only_move_pixels():
    images = torch.arange(2 * 3 * 8 * 8.0).reshape(2, 3, 8, 8) + 1

    def moved_by(seed):
        return crop(images, draw_places(2, (8, 8), stream(seed)))

    for seed in range(5):
        for image, source in zip(moved_by(seed), images, strict=True):
            kept = image[image > 0]
            assert set(kept.tolist()) <= set(source.flatten().tolist())
            assert len(kept) >= 3 * 4 * 4
    assert any(not torch.equal(moved_by(seed), images) for seed in range(3))


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
        judged = prepare(data.outer[0][batch.outer[1]])
        assert torch.equal(batch.outer[0], judged)


def test_a_client_with_few_images_gets_all_of_them():
    data = Batch(images_of(3, 0), images_of(2, 1))
    [first, second] = ImageBatches(7, 5, True).many(data, [stream(0), stream(1)])
    assert sorted(first.inner[1].tolist()) == sorted(second.inner[1].tolist()) == [0, 1, 2]
    assert first.outer[0].shape == (2, 3, 8, 8)
