"""What a client does to its answers before they travel: clipping and Gaussian noise."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from rabo.exchange.client import ClientContext
from rabo.exchange.request import Answer, Reply, Request
from rabo.exchange.work import Levels, Runtime, Work
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

    def __call__(
        self, answer: Answer, request: Request, client: ClientContext, name: str
    ) -> Answer:
        """Clip an answer and add noise to it, as the work of a name returns it."""
        if not answer.arrays:
            return answer
        norm = squared_norm(answer.arrays).sqrt()
        shrink = (self.clip / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        arrays = map_leaves(lambda t: shrink * t, answer.arrays)
        if self.noise_multiplier:
            generator = self._generator(request, client, name)
            arrays = map_leaves(lambda t: t + self._noise(t, generator), arrays)
        return answer._replace(arrays=arrays)

    def _generator(self, request: Request, client: ClientContext, name: str) -> Generator:
        """Return the stream of one answer: no two answers of a round get the same noise."""
        number = client.memory.get("noisy_answers", 0)
        client.memory["noisy_answers"] = number + 1
        own = request if self.seed is None else replace(request, seed=self.seed)
        return client.stream(own, f"noise {number} {name}")

    def _noise(self, like: Tensor, generator: Generator) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return (self.noise_multiplier * self.clip * drawn).to(like.device)


@dataclass(frozen=True)
class Protected(Work):
    """Work whose answers are clipped and noised on the client, under its own name."""

    work: Work
    privacy: Privacy

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.work.name

    @property
    def takes(self) -> Levels:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.work.takes

    @property
    def answers(self) -> Levels:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.work.answers

    @property
    def numbers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.work.numbers

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        return self.privacy(self.work(request, client), request, client, self.name)


class Private:
    """A runtime whose clients protect what they send."""

    def __init__(self, runtime: Runtime, privacy: Privacy):
        self.runtime, self.privacy = runtime, privacy

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        return self.runtime.map(Protected(work, self.privacy), requests)
