"""The cache returns what was written, or nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rabo.tasks.data.character_cache import cached
from rabo.tasks.data.characters import Characters

FINGERPRINT = "f" * 64


class Builder:
    """Builds known characters and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Characters:
        self.count += 1
        images = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4).to(torch.uint8)
        return Characters(images, ("Ελληνικό", "Old_Church"), ("a", "b"))


def same(a: Characters, b: Characters) -> bool:
    return torch.equal(a.images, b.images) and (a.alphabets, a.names) == (b.alphabets, b.names)


def test_characters_are_built_once_and_come_back_unchanged(tmp_path: Path):
    build = Builder()
    for _ in range(3):
        assert same(cached("part", FINGERPRINT, [tmp_path / "a"], build), Builder()())
    assert build.count == 1
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_another_fingerprint_builds_again(tmp_path: Path):
    build = Builder()
    cached("part", FINGERPRINT, [tmp_path], build)
    cached("part", "e" * 64, [tmp_path], build)
    cached("part", FINGERPRINT[:16] + "0" * 48, [tmp_path], build)  # the same file name
    assert build.count == 3


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def empty(content: bytes) -> bytes:
    return content[:0]


@pytest.mark.parametrize("damage", [flip_last, cut, empty])
def test_a_damaged_cache_is_built_again(damage: Callable[[bytes], bytes], tmp_path: Path):
    build = Builder()
    cached("part", FINGERPRINT, [tmp_path], build)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert same(cached("part", FINGERPRINT, [tmp_path], build), Builder()())
    assert build.count == 2
    cached("part", FINGERPRINT, [tmp_path], build)
    assert build.count == 2, "the cache was not repaired"


def test_the_second_folder_is_used_where_the_first_cannot_be_written(tmp_path: Path):
    (tmp_path / "first").write_text("a file, so no folder can be made here")
    build = Builder()
    folders = [tmp_path / "first", tmp_path / "second"]
    for _ in range(2):
        assert same(cached("part", FINGERPRINT, folders, build), Builder()())
    assert build.count == 1
    assert len(list((tmp_path / "second").iterdir())) == 1


def test_characters_are_returned_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "first").touch()
    assert same(cached("part", FINGERPRINT, [tmp_path / "first"], Builder()), Builder()())


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cached("part", FINGERPRINT, [tmp_path], Builder())
    assert list(tmp_path.iterdir()) == []
