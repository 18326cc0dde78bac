"""Omniglot (Lake, Salakhutdinov and Tenenbaum, Science 2015) as 28 x 28 characters."""

import hashlib
import io
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rabo.errors import needs
from rabo.tasks.data.archives import Drawings, UnpackedDrawings, ZippedDrawings
from rabo.tasks.data.character_cache import cached
from rabo.tasks.data.characters import Characters, Split
from rabo.tasks.data.root import data_root, fetch, user_cache

URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
DRAWINGS = 20
SOURCE_SIZE = 105
SIZE = 28
# Part of every fingerprint: change it whenever the pixels that render() gives change.
RENDERING = "lanczos 28, ink 255, version 1"


class Part(NamedTuple):
    """One official archive and what it holds."""

    name: str
    md5: str
    num_alphabets: int
    num_characters: int


BACKGROUND = Part("images_background", "68d2efa1b9178cc56df9314c21c6e718", 30, 964)
EVALUATION = Part("images_evaluation", "6b91aef0f799c5bb55b94e3f2daec811", 20, 659)


def load_omniglot(root: str | Path | None = None, download: bool = False) -> Split:
    """The 30 background alphabets to train on and the 20 evaluation alphabets to test on."""
    folder = data_root(root)
    return Split(
        train=load_part(folder, BACKGROUND, download),
        test=load_part(folder, EVALUATION, download),
    )


def load_part(root: Path, part: Part, download: bool) -> Characters:
    """The characters of one archive, resized once and then taken from the cache."""
    source = find(root, part, download)
    stamps = source.stamps()
    fingerprint = hashlib.sha256(repr((RENDERING, sorted(stamps.items()))).encode()).hexdigest()
    folders = (root / "rabo-cache", user_cache() / "rabo-cache")
    return cached(
        part.name, fingerprint, folders, lambda: read_characters(source, part, list(stamps))
    )


def find(root: Path, part: Part, download: bool) -> Drawings:
    """The archive or unpacked folder below root or root/omniglot, else a download."""
    for folder in (root, root / "omniglot"):
        if (folder / f"{part.name}.zip").is_file():
            return ZippedDrawings(folder / f"{part.name}.zip")
        if (folder / part.name).is_dir():
            return UnpackedDrawings(folder / part.name)
    url, path = f"{URL}/{part.name}.zip", root / "omniglot" / f"{part.name}.zip"
    if download:
        return ZippedDrawings(fetch(url, f"md5:{part.md5}", path))
    raise FileNotFoundError(
        f"{part.name}.zip or the folder {part.name} must lie below {root} or {root / 'omniglot'}, "
        f"got neither; use --download (download=True), put {url} there, or name another folder "
        "with --data-root"
    )


def read_characters(source: Drawings, part: Part, names: list[str]) -> Characters:
    """Every drawing of a part, grouped by character in the order of their names."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        folder, alphabet, character, _ = name.split("/")
        if folder == part.name:
            groups[alphabet, character].append(name)
    check_complete(source, part, groups)
    ordered = [name for group in groups.values() for name in group]
    contents = zip(ordered, source.read(ordered), strict=True)
    pixels = np.stack([render(data, source.path, name) for name, data in contents])
    return Characters(
        images=torch.from_numpy(pixels).reshape(len(groups), DRAWINGS, SIZE, SIZE),
        alphabets=tuple(alphabet for alphabet, _ in groups),
        names=tuple(character for _, character in groups),
    )


def check_complete(source: Drawings, part: Part, groups: dict[tuple[str, str], list[str]]) -> None:
    """Refuse a set with an alphabet, a character or a drawing too few or too many."""
    advice = (
        f"delete {source.path} and load again with --download (download=True), or put {URL} there"
    )
    for (alphabet, character), group in groups.items():
        if len(group) != DRAWINGS:
            raise ValueError(
                f"{part.name}/{alphabet}/{character} in {source.path} must have {DRAWINGS} "
                f"drawings, got {len(group)}; {advice}/{part.name}.zip"
            )
    num_alphabets = len({alphabet for alphabet, _ in groups})
    if (num_alphabets, len(groups)) != (part.num_alphabets, part.num_characters):
        raise ValueError(
            f"{source.path} must hold {part.num_characters} characters of {part.num_alphabets} "
            f"alphabets below {part.name}/, got {len(groups)} of {num_alphabets}; "
            f"{advice}/{part.name}.zip"
        )


def render(data: bytes, path: Path, name: str) -> np.ndarray:
    """One 105 x 105 drawing with ink 0 as 28 x 28 pixels with ink 255."""
    with needs("tasks", "drawings"):
        from PIL import Image
    try:
        # In mode "1" pillow would pick the nearest pixel; only grey levels are antialiased.
        drawing = Image.open(io.BytesIO(data), formats=("PNG",)).convert("L")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{name} in {path} must be a PNG drawing, got {len(data)} bytes that cannot be read "
            f"({error}); delete {path} and fetch it again"
        ) from error
    if drawing.size != (SOURCE_SIZE, SOURCE_SIZE):
        raise ValueError(
            f"{name} in {path} must be {SOURCE_SIZE} x {SOURCE_SIZE} pixels, got "
            f"{drawing.width} x {drawing.height}; put the official drawings there"
        )
    return 255 - np.asarray(drawing.resize((SIZE, SIZE), Image.Resampling.LANCZOS))
