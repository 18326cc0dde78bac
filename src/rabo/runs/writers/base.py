"""What hears of every round of a run beside its folder, and the numbers of a round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rabo.federation.rounds import Round


class Start(NamedTuple):
    """What is known of a run before its next round."""

    folder: Path
    config: Mapping[str, Any]
    headline: str  # the metric a reader looks at first
    falls: bool  # whether a smaller headline is better
    rounds: int  # Q
    history: Sequence[Round]  # rounds that were done before it was stopped
    evaluate_every: int = 1

    def evaluates(self, number: int) -> bool:
        """Say whether the round of some number, counted from 1, ends with an evaluation."""
        return number % self.evaluate_every == 0 or number == self.rounds


class Writer(Protocol):
    """Hears of a run while it goes on; `end` is called whatever happens after `begin`."""

    def begin(self, start: Start) -> None: ...

    def add(self, done: Round) -> None: ...

    def end(self, status: str) -> None:
        """Close; the status is finished, interrupted or failed."""
        ...


@contextmanager
def following(writers: Sequence[Writer], start: Start) -> Iterator[Callable[[Round], None]]:
    """Give what tells all writers of a round, and close them however the run ends."""
    status = "failed"

    def tell(done: Round) -> None:
        for writer in writers:
            writer.add(done)

    with ExitStack() as opened:
        for writer in writers:
            writer.begin(start)
            opened.callback(lambda writer=writer: writer.end(status))
        try:
            yield tell
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise


def numbers_of(done: Round) -> dict[str, float]:
    """Return all numbers of a round by name; lists have a number for each entry that has one."""
    return {
        **done.metrics,
        **{
            f"{name}/{i}": value
            for name, values in done.vectors.items()
            for i, value in enumerate(values)
            if value is not None
        },
        **{f"cost/{name}": value for name, value in done.cost._asdict().items()},
        **{f"total_cost/{name}": value for name, value in done.total._asdict().items()},
        **{f"relative_cost/{name}": value for name, value in done.relative_cost.items()},
        **{
            f"coverage_{level}/{name}": value
            for level, coverage in done.coverage.items()
            for name, value in coverage._asdict().items()
        },
        "seconds": done.seconds,
        "clients/present": len(done.present),
        "clients/absent": len(done.absent),
        "clients/faults": len(done.faults),
    }
