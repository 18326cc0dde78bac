# What a kernel's helpers return differs by version of triton; they are not checked.
from typing import Any

def __getattr__(name: str) -> Any: ...
