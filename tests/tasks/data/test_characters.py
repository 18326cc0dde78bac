"""The shared types refuse what could not be trained on."""

import pytest
import torch

from rabo.tasks.data.characters import Characters
from rabo.tasks.data.images import Images


def test_select_keeps_images_and_names_together():
    images = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 2, 3, 3)
    characters = Characters(images, tuple("AABB"), tuple("wxyz"))
    chosen = characters.select(torch.tensor([3, 1]))
    assert chosen.images[:, 0, 0, 0].tolist() == [3, 1]
    assert (chosen.alphabets, chosen.names) == (("B", "A"), ("z", "x"))
    assert len(chosen) == 2
    assert chosen.to("cpu").names == ("z", "x")


def test_characters_of_another_type_or_with_missing_names_are_refused():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="must be uint8"):
        Characters(images.float(), tuple("AB"), tuple("ab"))
    with pytest.raises(ValueError, match=r"must be uint8 .* \[2, 3, 4\]"):
        Characters(images[..., 0], tuple("AB"), tuple("ab"))
    with pytest.raises(ValueError, match="each of 2 characters, got 2 and 1"):
        Characters(images, tuple("AB"), tuple("a"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 2]), r"train_labels must lie in 0\.\.1, got 0\.\.2"),
        (torch.tensor([-1, 0]), r"train_labels must lie in 0\.\.1, got -1\.\.0"),
        (torch.tensor([0]), r"must be int64 \[2\], got torch.int64 \[1\]"),
        (torch.tensor([0.0, 1.0]), r"must be int64 \[2\], got torch.float32"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: torch.Tensor, message: str):
    images, good = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    Images(images, good, images, good, classes=("a", "b"))
    with pytest.raises(ValueError, match=message):
        Images(images, labels, images, good, classes=("a", "b"))
    with pytest.raises(ValueError, match="test must be uint8"):
        Images(images, good, images.float(), good, classes=("a", "b"))
