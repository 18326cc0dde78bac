"""CIFAR-10 in its layouts, with four small images in every file."""

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rabo.tasks.data import cifar10
from rabo.tasks.data.cifar10 import BINARY, NAMES, PYTHON, Layout, load_cifar10

PER_FILE = 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "IMAGES_PER_FILE", PER_FILE)


def batch(number: int) -> tuple[np.ndarray, list[int]]:
    """Pixels and labels of one file, different for every file."""
    random = np.random.default_rng(number)
    pixels = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
    return pixels, random.integers(0, 10, PER_FILE).tolist()


def files(layout: Layout) -> dict[str, bytes]:
    """The six files of a layout."""
    contents = {}
    for number, name in enumerate(layout.files):
        pixels, labels = batch(number)
        records = np.concatenate((np.array(labels, np.uint8)[:, None], pixels), axis=1)
        fields = {b"data": pixels, b"labels": labels, b"batch_label": b"made for a test"}
        contents[name] = records.tobytes() if layout is BINARY else pickle.dumps(fields, 2)
    return contents


def write_folder(root: Path, layout: Layout, contents: dict[str, bytes]) -> None:
    (root / layout.folder).mkdir(parents=True)
    for name, content in contents.items():
        (root / layout.folder / name).write_bytes(content)


def write_archive(root: Path, layout: Layout, contents: dict[str, bytes]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / layout.archive, "w:gz") as archive:
        for name in reversed(contents):  # the order in the archive must not matter
            member = tarfile.TarInfo(f"{layout.folder}/{name}")
            member.size = len(contents[name])
            archive.addfile(member, io.BytesIO(contents[name]))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", [BINARY, PYTHON])
@pytest.mark.parametrize("write", [write_folder, write_archive])
@pytest.mark.parametrize("below", ["", "cifar10"])
def test_every_layout_gives_the_images_in_order(
    layout: Layout, write: Callable[[Path, Layout, dict[str, bytes]], None], below: str, tmp_path
):
    write(tmp_path / below, layout, files(layout))
    images = load_cifar10(tmp_path)
    truth = [batch(number) for number in range(6)]
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in truth]))
    labels = torch.tensor([label for _, labels in truth for label in labels])
    assert torch.equal(torch.cat((images.train, images.test)).flatten(1), pixels)
    assert torch.equal(torch.cat((images.train_labels, images.test_labels)), labels)
    assert images.train.shape == (20, 3, 32, 32)
    assert images.test.shape == (4, 3, 32, 32)
    assert images.classes[3] == "cat"
    assert len(images.classes) == 10


@pytest.mark.usefixtures("small")
def test_red_lies_before_green_and_rows_before_columns(tmp_path: Path):
    contents = files(BINARY)
    records = np.zeros((PER_FILE, 3073), np.uint8)
    records[0, 1 + 1 * 1024 + 5 * 32 + 7] = 200
    write_folder(tmp_path, BINARY, contents | {"data_batch_1.bin": records.tobytes()})
    image = load_cifar10(tmp_path).train[0]
    assert image[1, 5, 7] == 200
    assert int(image.sum()) == 200


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path):
    contents = dict.fromkeys(BINARY.files, b"0" * 100)
    write_folder(tmp_path, BINARY, contents)
    message = r"data_batch_1\.bin must have 30730000 bytes, got 100; delete it and fetch http"
    with pytest.raises(ValueError, match=message):
        load_cifar10(tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", [BINARY, PYTHON])
@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_a_missing_file_is_named(
    layout: Layout, write: Callable[[Path, Layout, dict[str, bytes]], None], tmp_path: Path
):
    contents = files(layout)
    del contents[layout.files[2]]
    write(tmp_path, layout, contents)
    with pytest.raises(ValueError, match=r"must hold all 6 files .*data_batch_3.*fetch http"):
        load_cifar10(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_truncated_archive_is_named(tmp_path: Path):
    write_archive(tmp_path, BINARY, files(BINARY))
    path = tmp_path / BINARY.archive
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=rf"{path} must be a complete tar archive, got 5000"):
        load_cifar10(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_label_above_nine_is_named(tmp_path: Path):
    contents = files(BINARY)
    contents["test_batch.bin"] = b"\x0a" + contents["test_batch.bin"][1:]
    write_folder(tmp_path, BINARY, contents)
    with pytest.raises(ValueError, match=r"test_batch.bin must have labels in 0\.\.9, got 10"):
        load_cifar10(tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "fields",
    [
        [1, 2],
        {b"data": np.zeros((PER_FILE, 3072), np.uint8)},
        {b"data": np.zeros((PER_FILE, 3071), np.uint8), b"labels": [0] * PER_FILE},
        {b"data": np.zeros((PER_FILE, 3072)), b"labels": [0] * PER_FILE},
        {b"data": np.zeros((PER_FILE, 3072), np.uint8), b"labels": [0] * (PER_FILE - 1)},
        {b"data": np.zeros((PER_FILE, 3072), np.uint8), b"labels": [10] * PER_FILE},
    ],
)
def test_a_pickle_of_other_fields_is_named(fields: object, tmp_path: Path):
    contents = files(PYTHON) | {"data_batch_2": pickle.dumps(fields, 2)}
    write_folder(tmp_path, PYTHON, contents)
    with pytest.raises(ValueError, match=r"data_batch_2 must have uint8 data \[4, 3072\]"):
        load_cifar10(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_member_that_points_outside_the_archive_is_not_followed(tmp_path: Path):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(files(BINARY)["data_batch_1.bin"])
    root = tmp_path / "root"
    root.mkdir()
    with tarfile.open(root / BINARY.archive, "w:gz") as archive:
        for name in BINARY.files:
            member = tarfile.TarInfo(f"{BINARY.folder}/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, str(outside)
            archive.addfile(member)
        archive.addfile(tarfile.TarInfo("../escaped"))
    with pytest.raises(ValueError, match=r"must hold all 6 files .*data_batch_1"):
        load_cifar10(root)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["outside.bin", "root"]


@pytest.mark.usefixtures("small")
def test_a_missing_set_is_downloaded_only_when_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def fetch(url: str, checksum: str, path: Path) -> Path:
        asked.append((url, checksum))
        write_archive(path.parent, BINARY, files(BINARY))
        return path

    monkeypatch.setattr(cifar10, "fetch", fetch)
    with pytest.raises(FileNotFoundError, match=r"got none; use --download .*, put http"):
        load_cifar10(tmp_path)
    assert asked == []
    assert len(load_cifar10(tmp_path, download=True).train) == 20
    assert asked == [
        (
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
        )
    ]
    assert len(load_cifar10(tmp_path).train) == 20


def test_the_layouts_name_the_official_files():
    numbered = [f"data_batch_{i}" for i in (1, 2, 3, 4, 5)]
    assert [*numbered, "test_batch"] == list(NAMES)
    assert BINARY.files[-1] == "test_batch.bin"
    assert PYTHON.files[-1] == "test_batch"


@pytest.mark.skipif("RABO_DATA" not in os.environ, reason="RABO_DATA names no real data")
def test_the_real_set_has_its_published_counts_and_means():
    images = load_cifar10()
    assert images.train_labels.bincount().tolist() == [5000] * 10
    assert images.test_labels.bincount().tolist() == [1000] * 10
    means = images.train.float().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
