"""Read a pickle of plain values and numpy arrays, and nothing that could run code."""

import _codecs
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

# numpy names this function differently in its versions 1 and 2; an array knows its own.
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _codecs.encode,
}


class ArrayUnpickler(pickle.Unpickler):
    """Finds only what numpy arrays need."""

    def find_class(self, module_name: str, global_name: str, /) -> Callable[..., Any]:
        if (module_name, global_name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is refused")
        return ALLOWED[module_name, global_name]


def load_arrays(content: bytes, source: str) -> Any:
    """The pickled value, with the strings of Python 2 as bytes; source names it in errors."""
    try:
        return ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise ValueError(
            f"{source} must be a complete pickle of numpy arrays and plain values, got "
            f"{len(content)} bytes that cannot be read ({error}); delete it and fetch it again"
        ) from error
