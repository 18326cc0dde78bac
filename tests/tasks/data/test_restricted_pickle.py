"""Only arrays and plain values come out of a pickle."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from rabo.tasks.data.restricted_pickle import load_arrays


def short(text: bytes) -> bytes:
    """A string as Python 2 pickles it."""
    return b"U" + bytes([len(text)]) + text


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 with numpy 1 writes for {"data": pixels, "labels": labels}."""
    rows, columns = (b"J" + struct.pack("<i", size) for size in pixels.shape)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b")
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    state = b"(K\x01" + rows + columns + b"\x86" + dtype + b"\x89" + raw + b"t"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    items = short(b"data") + array + b"\x87R" + state + b"b" + short(b"labels") + numbers
    return b"\x80\x02}(" + items + b"u."


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_of_python_2_gives_its_arrays():
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    value = load_arrays(python2_pickle(pixels, [7, 8, 9]), "data_batch_1")
    assert np.array_equal(value[b"data"], pixels)
    assert value[b"data"].dtype == np.uint8
    assert value[b"labels"] == [7, 8, 9]


@pytest.mark.parametrize("protocol", range(5))
def test_a_pickle_of_python_3_gives_its_arrays(protocol: int):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.dumps({b"data": pixels, b"labels": [1]}, protocol)
    assert np.array_equal(load_arrays(content, "batch")[b"data"], pixels)


def test_what_could_run_code_is_refused_by_name_and_does_not_run(tmp_path: Path):
    content = pickle.dumps({b"data": Evil(tmp_path / "ran")})
    with pytest.raises(ValueError, match=rf"data_batch_1 must .*{os.mkdir.__module__}.mkdir is re"):
        load_arrays(content, "data_batch_1")
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists(), "the test would have seen it run"


@pytest.mark.parametrize("name", ["builtins\neval", "numpy\nload", "numpy\nfromfile", "os\nsystem"])
def test_other_functions_are_refused_even_from_numpy(name: str):
    with pytest.raises(ValueError, match=f"{name}".replace("\n", r"\.") + " is refused"):
        load_arrays(b"c" + name.encode() + b"\n.", "batch")


@pytest.mark.parametrize("keep", [0, 1, 20, -1])
def test_a_truncated_pickle_is_named_with_its_size(keep: int):
    content = pickle.dumps({b"data": np.zeros(9)}, 2)[:keep]
    with pytest.raises(ValueError, match=f"batch must be a complete .* got {len(content)} bytes"):
        load_arrays(content, "batch")
