"""A seeded generator of drawn characters, for tests and for runs without Omniglot.

An alphabet has a style, a character of it a set of quadratic Bézier strokes, and every drawing
moves the control points and the whole character a little. Only operations that IEEE 754 rounds
exactly are used (no exp, sin or matrix product), so that a seed gives the same bits everywhere.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rabo.tasks.data.characters import Characters, Split

TRAIN_SHARE = 0.6  # as 30 of Omniglot's 50 alphabets
MAX_STROKES = 5
POINTS_PER_STROKE = 28
DRAWINGS_AT_ONCE = 512  # bounds the memory, and keeps it in the processor's cache

# How much two drawings of one character differ, where the whole image is -1..1.
JITTER = 0.22
SHEAR = 0.28
SHIFT = 0.22

CELL = 0.5  # of the grid in which strokes start and end


class Style(NamedTuple):
    """What the characters of an alphabet share; one entry per alphabet [A, 1, 1]."""

    num_strokes: Tensor  # at least; a character may have one more
    bend: Tensor  # how far a stroke may leave its chord, in chords
    joined: Tensor  # probability that a stroke starts where the last one ended
    half_width: Tensor  # of the pen, in pixels of a 28 x 28 image


class Strokes(NamedTuple):
    """Curves from start to end [..., S, 2] that leave their chord by bend [..., S]."""

    start: Tensor
    end: Tensor
    bend: Tensor
    joined: Tensor  # whether the stroke starts at the end of the one before instead
    used: Tensor  # which stroke to draw in this place: spare places repeat a stroke


def make_glyphs(
    seed: int,
    num_alphabets: int = 50,
    characters_per_alphabet: int = 20,
    drawings: int = 20,
    size: int = 28,
) -> Split:
    """Drawn characters, of which three fifths of the alphabets are for training."""
    check_counts(num_alphabets, characters_per_alphabet, drawings, size)
    generator = torch.Generator().manual_seed(seed)
    style = draw_style(generator, num_alphabets)
    characters = draw_characters(generator, style, characters_per_alphabet)
    curves = redraw(generator, characters, drawings)
    pen = uniform(generator, 0.85, 1.15, *curves.shape[:3]) * style.half_width * (size / 28)
    images = render(curves.flatten(0, 2), pen.flatten(), size).unflatten(0, curves.shape[:3])
    num_train = min(max(round(TRAIN_SHARE * num_alphabets), 1), num_alphabets - 1)
    return Split(
        train=name_characters(images[:num_train], first=0),
        test=name_characters(images[num_train:], first=num_train),
    )


def uniform(generator: Generator, low: float, high: float, *shape: int) -> Tensor:
    """Uniform draws between low and high."""
    return torch.rand(shape, generator=generator) * (high - low) + low


def draw_style(generator: Generator, num_alphabets: int) -> Style:
    """The style of every alphabet."""
    shape = (num_alphabets, 1, 1)
    return Style(
        num_strokes=torch.randint(2, MAX_STROKES, shape, generator=generator),
        bend=uniform(generator, 0, 0.6, *shape),
        joined=uniform(generator, 0.2, 0.9, *shape),
        half_width=uniform(generator, 0.5, 1.0, *shape),
    )


def draw_characters(generator: Generator, style: Style, num_characters: int) -> Strokes:
    """The strokes of every character, [A, num_characters, S, ...]."""
    shape = (len(style.bend), num_characters, MAX_STROKES)
    # The ends lie in the cells of a 3 x 3 grid; a step of 1 to 8 always leads to another cell.
    steps = torch.randint(1, 9, (2, *shape), generator=generator)
    end = steps[0].cumsum(2) % 9
    start = (end + steps[1]) % 9
    joined = torch.rand(shape, generator=generator) < style.joined
    joined[:, :, 0] = False
    extra = torch.randint(0, 2, (*shape[:2], 1), generator=generator)
    return Strokes(
        start=place(generator, start),
        end=place(generator, end),
        bend=uniform(generator, -1, 1, *shape) * style.bend,
        joined=joined,
        used=torch.arange(MAX_STROKES) % (style.num_strokes + extra),
    )


def place(generator: Generator, cell: Tensor) -> Tensor:
    """A point in each cell of the 3 x 3 grid that covers most of -1..1."""
    middle = torch.stack((cell % 3 - 1, cell // 3 - 1), dim=-1) * CELL
    return middle + uniform(generator, -CELL / 3, CELL / 3, *middle.shape)


def redraw(generator: Generator, characters: Strokes, drawings: int) -> Tensor:
    """Every character drawn anew by an unsteady hand: Bézier points [A, C, drawings, S, 3, 2]."""
    start, end, bend, joined, used = (field[:, :, None] for field in characters)
    shape = (*start.shape[:2], drawings, MAX_STROKES)
    start = start + jitter(generator, JITTER, *shape, 2)
    end = end + jitter(generator, JITTER, *shape, 2)
    bend = (bend + jitter(generator, JITTER, *shape))[..., None]
    start = torch.where(joined[..., None], end.roll(1, dims=3), start)
    chord = end - start
    across = torch.stack((-chord[..., 1], chord[..., 0]), dim=-1)
    # A quadratic curve passes its middle control point at half the distance.
    middle = (start + end) / 2 + 2 * bend * across
    curves = torch.stack((start, middle, end), dim=4)
    curves = curves.gather(3, used[..., None, None].expand_as(curves))
    return lean(generator, curves)


def lean(generator: Generator, curves: Tensor) -> Tensor:
    """Every drawing [A, C, drawings, S, 3, 2] scaled, sheared and shifted a little."""
    shape = (*curves.shape[:3], 1, 1)
    x, y = curves.unbind(-1)
    xx, xy, yx, yy = jitter(generator, SHEAR, 4, *shape)
    right, down = jitter(generator, SHIFT, 2, *shape)
    return torch.stack((x + xx * x + xy * y + right, y + yx * x + yy * y + down), dim=-1)


def jitter(generator: Generator, scale: float, *shape: int) -> Tensor:
    """Triangular draws in -scale..scale: mostly small, never far."""
    low, high = uniform(generator, -scale / 2, scale / 2, 2, *shape)
    return low + high


def render(strokes: Tensor, half_width: Tensor, size: int) -> Tensor:
    """Strokes [N, S, 3, 2] in -1..1, drawn with a round pen [N], as uint8 [N, size, size]."""
    time = torch.arange(POINTS_PER_STROKE)[:, None] / (POINTS_PER_STROKE - 1)
    start, middle, end = (strokes[:, :, None, i] for i in range(3))
    points = (1 - time) * (1 - time) * start + 2 * time * (1 - time) * middle + time * time * end
    points = (points.flatten(1, 2) + 1) * ((size - 1) / 2)
    chunks = zip(points.split(DRAWINGS_AT_ONCE), half_width.split(DRAWINGS_AT_ONCE), strict=True)
    return torch.cat([ink(*chunk, size) for chunk in chunks])


def ink(points: Tensor, half_width: Tensor, size: int) -> Tensor:
    """255 within half_width of a point [N, P, 2], fading to 0 over one more pixel."""
    # Only the pixels that a point can reach are visited, a fortieth of all.
    reach = math.ceil(float(half_width.max()) + 0.5)
    pixel = points.floor()[..., None] + torch.arange(1 - reach, 1 + reach)
    off_image = (pixel < 0) | (pixel >= size)
    x, y = (points[..., None] - pixel).square().masked_fill(off_image, torch.inf).unbind(2)
    column, row = pixel.clamp(0, size - 1).long().unbind(2)
    index = (row[..., None] * size + column[..., None, :]).flatten(1)
    squares = (y[..., None] + x[..., None, :]).flatten(1)
    nearest = torch.full((len(points), size * size), torch.inf)
    nearest = nearest.scatter_reduce(1, index, squares, "amin").unflatten(1, (size, size))
    cover = (half_width[:, None, None] + 0.5 - nearest.sqrt()).clamp(0, 1)
    return (cover * 255).round().to(torch.uint8)


def name_characters(images: Tensor, first: int) -> Characters:
    """Images [A, C, drawings, size, size] with names such as Omniglot's."""
    num_alphabets, num_characters = images.shape[:2]
    pairs = [(a, c) for a in range(num_alphabets) for c in range(num_characters)]
    return Characters(
        images=images.flatten(0, 1),
        alphabets=tuple(f"Alphabet_{first + a:02d}" for a, _ in pairs),
        names=tuple(f"character{c + 1:02d}" for _, c in pairs),
    )


def check_counts(num_alphabets: int, num_characters: int, drawings: int, size: int) -> None:
    """Refuse a set that has no part to train or to test on, or nothing to see."""
    if num_alphabets < 2 or min(num_characters, drawings) < 1 or size < 8:
        raise ValueError(
            "glyphs must have at least 2 alphabets, 1 character, 1 drawing and 8 pixels, got "
            f"{num_alphabets}, {num_characters}, {drawings} and {size}; raise the one below"
        )
