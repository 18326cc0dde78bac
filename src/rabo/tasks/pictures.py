"""Pictures of few-shot tasks with right and wrong predictions."""

from pathlib import Path

import torch
from torch import Tensor

from rabo.errors import needs
from rabo.tasks.data.episodes import Tasks

SCALE = 2
RIGHT, WRONG, PLAIN = (0, 150, 80), (210, 50, 50), (120, 120, 120)
NUM_QUERIES = 5  # shown of each class


def draw_tasks(tasks: Tasks, guesses: Tensor, path: Path) -> None:
    """Draw one block per task: a row per class, its first support drawing and then some queries.

    A frame is green where the query was recognised and red where it was taken for another class;
    beside a red one stands the support drawing it was taken for.
    """
    with needs("tasks", "pictures of few-shot tasks"):
        from PIL import Image
    blocks = [_block(tasks, guesses, j) for j in range(len(tasks.support))]
    gap = torch.full((3, blocks[0].shape[1], 4 * SCALE), 255, dtype=torch.uint8)
    joined = torch.cat([part for block in blocks for part in (block, gap)][:-1], dim=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(joined.permute(1, 2, 0).contiguous().numpy()).save(path)


def _block(tasks: Tasks, guesses: Tensor, j: int) -> Tensor:
    ways = int(tasks.support_labels.max()) + 1
    shots, queries = (t.shape[1] // ways for t in (tasks.support, tasks.query))
    support = tasks.support[j].reshape(ways, shots, 28, 28)[:, 0].cpu()
    query = tasks.query[j].reshape(ways, queries, 28, 28).cpu()
    guess = guesses[j].reshape(ways, queries).cpu()
    rows = []
    for label in range(ways):
        tiles = [_tile(support[label], PLAIN)]
        for k in range(min(NUM_QUERIES, queries)):
            taken = int(guess[label, k])
            image = query[label, k]
            if taken != label:  # lower right corner: what it was taken for
                image = image.clone()
                image[16:, 16:] = support[taken][::2, ::2][2:, 2:]
            tiles.append(_tile(image, RIGHT if taken == label else WRONG))
        rows.append(torch.cat(tiles, dim=2))
    return torch.cat(rows, dim=1)


def _tile(image: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """Enlarge a drawing, ink dark on white, with a frame."""
    ink = (255 * (1 - image)).to(torch.uint8)
    large = ink.repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1).expand(3, -1, -1).clone()
    for channel, value in enumerate(colour):
        for edge in (large[channel, :SCALE], large[channel, -SCALE:]):
            edge.fill_(value)
        large[channel, :, :SCALE] = value
        large[channel, :, -SCALE:] = value
    return torch.nn.functional.pad(large, (2, 2, 2, 2), value=255)
