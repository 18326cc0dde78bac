"""What a client does to its answers before they travel: clipping and Gaussian noise."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rabo.exchange.work import Local, Reply, Runtime, Task, Work
from rabo.tree import map_leaves, squared_norm


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Answers of bounded size, drowned in noise.

    The arrays of an answer together are shrunk to an L2 norm of at most `clip`; then every entry
    gets Gaussian noise of deviation noise_multiplier·clip. Numbers beside the arrays (residuals,
    training losses, curvatures, labels, costs) travel as they are. docs/privacy.md lists the limits
    of this protection.

    The noise is drawn from the client's stream of `seed`. Without one it is the run's, so that a
    simulation can be repeated; who knows it can take the noise off again, so a real client must
    have a seed of its own that it tells nobody (`secrets.randbits(63)`).
    """

    clip: float
    noise_multiplier: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.clip < float("inf"):
            raise ValueError(f"clip must be positive and finite, got {self.clip}")
        if not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be at least 0, got {self.noise_multiplier}")

    def __call__(self, reply: Reply, task: Task, local: Local, name: str) -> Reply:
        """Return a reply as it may travel."""
        if not reply.arrays:
            return reply
        norm = squared_norm(reply.arrays).sqrt()
        shrink = (self.clip / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        arrays = map_leaves(lambda t: shrink * t, reply.arrays)
        if self.noise_multiplier:
            generator = self._generator(task, local, name)
            arrays = map_leaves(lambda t: t + self._noise(t, generator), arrays)
        return reply._replace(arrays=arrays)

    def _generator(self, task: Task, local: Local, name: str) -> Generator:
        """Return the stream of one answer: no two answers of a round get the same noise."""
        number = local.memory.get("noisy_answers", 0)
        local.memory["noisy_answers"] = number + 1
        own = task if self.seed is None else task._replace(seed=self.seed)
        return local.stream(own, f"noise {number} {name}")

    def _noise(self, like: Tensor, generator: Generator) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return (self.noise_multiplier * self.clip * drawn).to(like.device)


class Protected:
    """Work whose answers are clipped and noised where it is done, under its own name."""

    def __init__(self, work: Work, privacy: Privacy):
        self.work, self.privacy = work, privacy
        self.__name__, self.__self__ = work.__name__, getattr(work, "__self__", None)

    def __call__(self, task: Task, local: Local) -> Reply:
        return self.privacy(self.work(task, local), task, local, self.__name__)


class Private:
    """A runtime whose clients protect what they send."""

    def __init__(self, runtime: Runtime, privacy: Privacy):
        self.runtime, self.privacy = runtime, privacy

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        return self.runtime.map(Protected(work, self.privacy), tasks)
