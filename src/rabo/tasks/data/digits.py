"""The 1,797 handwritten digits that come with scikit-learn: a real set that needs no download."""

import numpy as np
import torch

from rabo.errors import needs
from rabo.tasks.data.images import Images

CLASSES = tuple("0123456789")
INK = 16  # the largest grey level of the source


def load_digits(seed: int = 0, test_per_class: int = 30) -> Images:
    """8 x 8 digits, of each class test_per_class drawn for the test set and the rest to train."""
    with needs("tasks", "digits"):
        from sklearn import datasets  # slow to import

    pixels, targets = (np.asarray(part) for part in datasets.load_digits(return_X_y=True))
    grey = torch.from_numpy(pixels).to(torch.int64).reshape(-1, 1, 8, 8)
    images = ((grey * 255 + INK // 2) // INK).to(torch.uint8)
    labels = torch.from_numpy(targets).to(torch.int64)
    smallest = int(labels.bincount().min())
    if not 1 <= test_per_class < smallest:
        raise ValueError(
            f"test_per_class must lie in 1..{smallest - 1}, got {test_per_class}; "
            "every class needs images on both sides"
        )
    generator = torch.Generator().manual_seed(seed)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(len(CLASSES)):
        members = (labels == digit).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        test[members[order[:test_per_class]]] = True
    return Images(images[~test], labels[~test], images[test], labels[test], CLASSES)
