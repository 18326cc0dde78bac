"""Every test has its own user cache and no data root from the environment."""

from pathlib import Path

import pooch
import pytest


@pytest.fixture(autouse=True)
def user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty user cache, so that no test sees or leaves files of the user."""
    folder = tmp_path / "user-cache"
    monkeypatch.setattr(pooch, "os_cache", lambda name: folder / name)
    return folder / "rabo"
