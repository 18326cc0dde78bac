"""Omniglot from small archives with known drawings."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rabo.tasks.data import omniglot
from rabo.tasks.data.omniglot import Part, load_omniglot, load_part

PART = Part("images_background", "0" * 32, num_alphabets=2, num_characters=3)
FOLDERS = ("Greek/character01", "Greek/character02", "Tagalog/character01")


def png(pixels: np.ndarray) -> bytes:
    """A one-bit PNG, as the official drawings are."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8) * 255).convert("1").save(buffer, "PNG")
    return buffer.getvalue()


BLANK = png(np.ones((105, 105)))
FULL = png(np.zeros((105, 105)))
LEFT = png(np.broadcast_to(np.arange(105) >= 60, (105, 105)))  # ink in the left 60 columns = 16/28


def drawings(part: Part = PART) -> dict[str, bytes]:
    """Character 1 is all ink except a blank last drawing, character 2 half, 3 blank."""
    files = {}
    for number, folder in enumerate(FOLDERS):
        for k in range(1, 21):
            content = (FULL if k < 20 else BLANK, LEFT, BLANK)[number]
            files[f"{part.name}/{folder}/{number:04d}_{k:02d}.png"] = content
    return files


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(files, reverse=True):  # the order in the archive must not matter
            archive.writestr(name, files[name])
    return path


def write_folder(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_ink_is_255_and_drawings_are_resized_in_the_order_of_their_names(tmp_path: Path):
    write_zip(tmp_path / "images_background.zip", drawings())
    characters = load_part(tmp_path, PART, download=False)
    assert characters.images.shape == (3, 20, 28, 28)
    assert characters.alphabets == ("Greek", "Greek", "Tagalog")
    assert characters.names == ("character01", "character02", "character01")
    assert (characters.images[0, :19] == 255).all()
    assert (characters.images[0, 19] == 0).all()
    assert (characters.images[2] == 0).all()
    half = characters.images[1].float()
    assert (half[..., :13] == 255).all()
    assert (half[..., 19:] == 0).all()
    assert half.mean() == pytest.approx(255 * 60 / 105, rel=0.02)


def test_a_thin_line_is_antialiased_not_dropped(tmp_path: Path):
    for column in range(50, 54):
        line = png(np.broadcast_to(np.arange(105) != column, (105, 105)))
        pixels = omniglot.render(line, tmp_path, "line.png")
        # The nearest pixel would give 0 or 255; Lanczos adds a little contrast to 255 * 28 / 105.
        assert 68 < pixels.sum() / 28 < 100
        assert pixels.max() < 100


@pytest.mark.parametrize("below", ["", "omniglot"])
def test_a_zip_and_a_folder_give_the_same_characters(below: str, tmp_path: Path):
    write_zip(tmp_path / "zipped" / below / "images_background.zip", drawings())
    write_folder(tmp_path / "unpacked" / below, drawings())
    zipped = load_part(tmp_path / "zipped", PART, download=False)
    unpacked = load_part(tmp_path / "unpacked", PART, download=False)
    assert torch.equal(zipped.images, unpacked.images)
    assert (zipped.alphabets, zipped.names) == (unpacked.alphabets, unpacked.names)


def test_what_operating_systems_leave_beside_drawings_is_ignored(tmp_path: Path):
    extra = {
        "images_background/": b"",
        "images_background/Greek/character01/._0000_01.png": b"x",
        "__MACOSX/Greek/character01/0000_01.png": b"x",
        "images_background/.DS_Store": b"x",
    }
    write_zip(tmp_path / "images_background.zip", drawings() | extra)
    assert len(load_part(tmp_path, PART, download=False)) == 3


def test_load_omniglot_trains_on_background_and_tests_on_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = PART._replace(name="images_evaluation")
    monkeypatch.setattr(omniglot, "BACKGROUND", PART)
    monkeypatch.setattr(omniglot, "EVALUATION", other)
    write_zip(tmp_path / "images_background.zip", drawings())
    blank = dict.fromkeys(drawings(other), BLANK)
    write_zip(tmp_path / "images_evaluation.zip", blank)
    split = load_omniglot(tmp_path)
    assert split.train.images.any()
    assert not split.test.images.any()


def test_a_missing_set_says_what_to_do(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"images_background\.zip .*download=True.*http"):
        load_omniglot(tmp_path)


def test_a_missing_set_is_downloaded_with_the_official_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def fetch(url: str, checksum: str, path: Path) -> Path:
        asked.append((url, checksum))
        return write_zip(path, drawings())

    monkeypatch.setattr(omniglot, "fetch", fetch)
    assert len(load_part(tmp_path, PART, download=True)) == 3
    assert asked == [(f"{omniglot.URL}/images_background.zip", "md5:" + "0" * 32)]
    assert len(load_part(tmp_path, PART, download=False)) == 3


def test_a_truncated_zip_is_named(tmp_path: Path):
    path = write_zip(tmp_path / "images_background.zip", drawings())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=rf"{path} must be a complete zip.*fetch it again"):
        load_part(tmp_path, PART, download=False)


def test_a_zip_with_a_flipped_byte_is_named(tmp_path: Path):
    path = write_zip(tmp_path / "images_background.zip", drawings())
    content = bytearray(path.read_bytes())
    content[200] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} must be"):
        load_part(tmp_path, PART, download=False)


def test_a_missing_drawing_is_named(tmp_path: Path):
    files = drawings()
    del files["images_background/Greek/character02/0001_07.png"]
    write_zip(tmp_path / "images_background.zip", files)
    message = r"images_background/Greek/character02 in .* must have 20 drawings, got 19; delete"
    with pytest.raises(ValueError, match=message):
        load_part(tmp_path, PART, download=False)


def test_a_missing_character_folder_is_counted(tmp_path: Path):
    files = {name: data for name, data in drawings().items() if "Tagalog" not in name}
    write_folder(tmp_path, files)
    with pytest.raises(ValueError, match=r"must hold 3 characters of 2 alphabets .* got 2 of 1"):
        load_part(tmp_path, PART, download=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LEFT[: len(LEFT) // 2], "must be a PNG drawing"),
        (b"", "must be a PNG drawing, got 0 bytes"),
        (png(np.ones((105, 104))), "must be 105 x 105 pixels, got 104 x 105"),
    ],
    ids=["half", "empty", "narrow"],
)
def test_a_damaged_drawing_is_named(content: bytes, message: str, tmp_path: Path):
    name = "images_background/Greek/character02/0001_07.png"
    write_folder(tmp_path, drawings() | {name: content})
    with pytest.raises(ValueError, match=f"{name} in .* {message}"):
        load_part(tmp_path, PART, download=False)


def test_a_changed_drawing_is_seen_although_there_is_a_cache(tmp_path: Path):
    write_folder(tmp_path, drawings())
    assert not load_part(tmp_path, PART, download=False).images[2].any()
    changed = tmp_path / "images_background/Tagalog/character01/0002_01.png"
    changed.write_bytes(FULL)
    os.utime(changed, ns=(1, 1))
    assert (load_part(tmp_path, PART, download=False).images[2, 0] == 255).all()


@pytest.mark.skipif("RABO_DATA" not in os.environ, reason="RABO_DATA names no real data")
def test_the_real_set_has_964_and_659_characters():
    split = load_omniglot()
    assert split.train.images.shape == (964, 20, 28, 28)
    assert split.test.images.shape == (659, 20, 28, 28)
    assert (len(set(split.train.alphabets)), len(set(split.test.alphabets))) == (30, 20)
    assert split.train.images.flatten(2).amax(2).min() > 100  # no drawing is blank
    assert not set(split.train.alphabets) & set(split.test.alphabets)
