"""CIFAR-10 (Krizhevsky 2009) from either official layout, unpacked or as its archive."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rabo.tasks.data.archives import read_tar
from rabo.tasks.data.images import Images
from rabo.tasks.data.restricted_pickle import load_arrays
from rabo.tasks.data.root import data_root, fetch

URL = "https://www.cs.toronto.edu/~kriz"
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SHAPE = (3, 32, 32)
NUM_PIXELS = 3 * 32 * 32
IMAGES_PER_FILE = 10_000
VALID_LABELS = range(len(CLASSES))


class Batch(NamedTuple):
    """One file of the set: uint8 pixels [images, 3072] and labels [images]."""

    pixels: np.ndarray
    labels: np.ndarray


class Layout(NamedTuple):
    """One official way to store the set; the last file is the test set."""

    folder: str
    archive: str
    md5: str
    files: tuple[str, ...]
    decode: Callable[[bytes, str], Batch]


def load_cifar10(root: str | Path | None = None, download: bool = False) -> Images:
    """The 50,000 training and 10,000 test images."""
    layout, files = find(data_root(root), download)
    batches = [layout.decode(files[name], name) for name in files]
    pixels = np.concatenate([batch.pixels for batch in batches]).reshape(-1, *SHAPE)
    labels = np.concatenate([batch.labels for batch in batches]).astype(np.int64)
    num_train = len(labels) - len(batches[-1].labels)
    return Images(
        train=torch.from_numpy(pixels[:num_train]),
        train_labels=torch.from_numpy(labels[:num_train]),
        test=torch.from_numpy(pixels[num_train:]),
        test_labels=torch.from_numpy(labels[num_train:]),
        classes=CLASSES,
    )


def find(root: Path, download: bool) -> tuple[Layout, Mapping[str, bytes]]:
    """The layout found below root or root/cifar10 with the content of its files by full name."""
    for folder in (root, root / "cifar10"):
        for layout in LAYOUTS:
            if (folder / layout.folder).is_dir():
                return layout, read_folder(folder / layout.folder, layout)
        for layout in LAYOUTS:
            if (folder / layout.archive).is_file():
                return layout, read_archive(folder / layout.archive, layout)
    path = root / "cifar10" / BINARY.archive
    if download:
        fetch(f"{URL}/{BINARY.archive}", f"md5:{BINARY.md5}", path)
        return BINARY, read_archive(path, BINARY)
    raise FileNotFoundError(
        f"one of {[layout.folder for layout in LAYOUTS]} or their archives must lie below {root} "
        f"or {root / 'cifar10'}, got none; use --download (download=True), put "
        f"{URL}/{BINARY.archive} there, or name another folder with --data-root"
    )


def read_folder(folder: Path, layout: Layout) -> Mapping[str, bytes]:
    """The files of an unpacked layout, in order."""
    missing = [name for name in layout.files if not (folder / name).is_file()]
    check_none_missing(folder, missing, layout)
    return {str(folder / name): (folder / name).read_bytes() for name in layout.files}


def read_archive(path: Path, layout: Layout) -> Mapping[str, bytes]:
    """The files of an archive, in order."""
    members = [f"{layout.folder}/{name}" for name in layout.files]
    found = read_tar(path, members)
    check_none_missing(path, [name for name in members if name not in found], layout)
    return {f"{path}:{name}": found[name] for name in members}


def check_none_missing(source: Path, missing: list[str], layout: Layout) -> None:
    """Refuse a set of which a file is not there."""
    if missing:
        raise ValueError(
            f"{source} must hold all {len(layout.files)} files of CIFAR-10, got none named "
            f"{missing}; delete {source} and fetch {URL}/{layout.archive} again"
        )


def decode_binary(content: bytes, name: str) -> Batch:
    """Records of one label byte and 3072 pixel bytes: red, green, blue, each row by row."""
    expected = IMAGES_PER_FILE * (1 + NUM_PIXELS)
    if len(content) != expected:
        raise ValueError(
            f"{name} must have {expected} bytes, got {len(content)}; "
            f"delete it and fetch {URL}/{BINARY.archive} again"
        )
    records = np.frombuffer(content, np.uint8).reshape(IMAGES_PER_FILE, 1 + NUM_PIXELS)
    if records[:, 0].max() not in VALID_LABELS:
        raise ValueError(
            f"{name} must have labels in 0..9, got {records[:, 0].max()}; "
            f"delete it and fetch {URL}/{BINARY.archive} again"
        )
    return Batch(pixels=records[:, 1:], labels=records[:, 0])


def decode_python(content: bytes, name: str) -> Batch:
    """A pickled dict with the pixels under data and the labels under labels."""
    batch = load_arrays(content, name)
    if not is_batch(batch):
        raise ValueError(
            f"{name} must have uint8 data [{IMAGES_PER_FILE}, {NUM_PIXELS}] and {IMAGES_PER_FILE} "
            f"labels in 0..9, got something else in its {len(content)} bytes; "
            f"delete it and fetch {URL}/{PYTHON.archive} again"
        )
    return Batch(batch[b"data"], np.array(batch[b"labels"]))


def is_batch(batch: Any) -> bool:
    """Whether an unpickled value has the fields of one file."""
    if not isinstance(batch, dict):
        return False
    pixels, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        return False
    sizes = (pixels.shape, len(labels)) == ((IMAGES_PER_FILE, NUM_PIXELS), IMAGES_PER_FILE)
    return sizes and pixels.dtype == np.uint8 and all(label in VALID_LABELS for label in labels)


NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
BINARY = Layout(
    folder="cifar-10-batches-bin",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    files=tuple(f"{name}.bin" for name in NAMES),
    decode=decode_binary,
)
PYTHON = Layout(
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    md5="c58f30108f718f92721af3b95e74349a",
    files=NAMES,
    decode=decode_python,
)
LAYOUTS = (BINARY, PYTHON)
