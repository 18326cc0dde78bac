"""The digits of scikit-learn, split anew for every seed."""

import numpy as np
import pytest
import torch
from sklearn import datasets

from rabo.tasks.data.digits import load_digits


def test_the_test_set_is_balanced_and_nothing_is_lost():
    images = load_digits(seed=1, test_per_class=25)
    assert images.test_labels.bincount().tolist() == [25] * 10
    assert images.train.shape == (1797 - 250, 1, 8, 8)
    assert images.test.shape == (250, 1, 8, 8)
    parts = torch.cat((images.train, images.test)).flatten(1).float()
    source = np.asarray(datasets.load_digits(return_X_y=True)[0])
    expected = np.sort((source * 255 / 16).round().sum(1))
    assert parts.sum(1).sort().values.numpy() == pytest.approx(expected, abs=32)


def test_pixels_are_scaled_to_255_with_their_labels():
    images = load_digits()
    source, targets = (np.asarray(part) for part in datasets.load_digits(return_X_y=True))
    assert (int(images.train.min()), int(images.train.max())) == (0, 255)
    levels = torch.cat((images.train, images.test)).unique().tolist()
    assert levels == [(grey * 255 + 8) // 16 for grey in range(17)]
    scaled = (source * 255 / 16 + 0.5).astype(int)
    known = {row.tobytes(): label for row, label in zip(scaled, targets, strict=True)}
    rows = images.test.flatten(1).numpy().astype(int)
    assert [known[row.tobytes()] for row in rows] == images.test_labels.tolist()


def test_the_split_follows_the_seed():
    first, again, other = (load_digits(seed).test for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("count", [0, 174])
def test_a_test_set_that_leaves_a_side_empty_is_refused(count: int):
    with pytest.raises(ValueError, match=r"must lie in 1\.\.173, got"):
        load_digits(test_per_class=count)
