"""Rounds as TensorBoard reads them."""

from rabo.errors import needs
from rabo.federation.rounds import Round
from rabo.runs.writers.base import Start, numbers_of


class TensorBoard:
    """RUN/tensorboard, a scalar for each number of a round; `tensorboard --logdir RUN` shows it."""

    def __init__(self) -> None:
        with needs("tensorboard", "runs with --tensorboard"):
            import tensorboard  # noqa: F401  # torch's own error would not name the package
            from torch.utils.tensorboard import SummaryWriter
        self._kind = SummaryWriter

    def begin(self, start: Start) -> None:
        done = len(start.history)
        # a run that goes on hides what was written of rounds that are done again
        self._events = self._kind(
            str(start.folder / "tensorboard"), purge_step=done + 1 if done else None
        )

    def add(self, done: Round) -> None:
        for name, value in numbers_of(done).items():
            self._events.add_scalar(name, value, done.round + 1)

    def end(self, status: str) -> None:
        self._events.close()
