"""The server's side of a round that asks clients several times."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from rabo.exchange.covering import Covered
from rabo.exchange.request import Reply, Request
from rabo.exchange.rows import counted
from rabo.exchange.state import CURVATURE, Cuts, State
from rabo.exchange.work import Runtime, Work
from rabo.tree import Params

NO_SCALARS: Mapping[str, float] = {}


class Exchanges:
    """The exchanges of one round: a client that misses one is left out of those that follow.

    Full vectors are cut to what each client holds, and replies are averaged over the clients that
    held an entry.
    """

    def __init__(self, state: State, cuts: Cuts, runtime: Runtime, seed: int):
        self.cuts, self.present = cuts, set(cuts)
        self.curvatures: dict[int, float] = {}  # largest curvature, by client
        self._like = {"x": state.x, "y": state.y}
        self._runtime, self._round, self._seed = runtime, state.round, seed

    def send(
        self,
        work: Work,
        arrays: Iterable[tuple[int, Mapping[str, Params]]],
        scalars: Mapping[str, float] = NO_SCALARS,
        steps: Callable[[int], int] = lambda _: 1,
    ) -> Iterator[Reply]:
        """Send every client its own arrays and yield the replies."""
        missing: set[int] = set()

        def requests() -> Iterator[Request]:
            for client, own in arrays:
                missing.add(client)
                cut, exchange = self.cuts[client], self.cuts.answered[client]
                yield Request(
                    client, self._seed, self._round, cut, own, scalars, steps(client), exchange
                )

        for reply in self._runtime.map(work, requests()):
            client = reply.client
            missing.discard(client)
            self.cuts.answered[client] += 1
            if CURVATURE in reply.scalars:
                seen = self.curvatures.get(client, 0.0)
                self.curvatures[client] = max(seen, reply.scalars[CURVATURE])
            yield reply
        self.present -= missing

    def largest_curvature(self) -> float:
        """Return the largest curvature that clients saw, after trimming; 0 if none did."""
        seen = [value for value in self.curvatures.values() if value > 0]
        return self.cuts.aggregate.largest(seen) if seen else 0.0

    def parts_of(
        self, work: Work, arrays: Mapping[str, Params]
    ) -> Iterator[tuple[int, Mapping[str, Params]]]:
        """Yield each present client's part of the same full arrays."""
        parts = {name: self.cuts.extract(work.takes[name], full) for name, full in arrays.items()}
        for client in sorted(self.present):
            yield client, {name: part_of(client) for name, part_of in parts.items()}

    def mean(
        self,
        work: Work,
        arrays: Mapping[str, Params],
        scalars: Mapping[str, float] = NO_SCALARS,
        steps: Callable[[int], int] = lambda _: 1,
    ) -> dict[str, Covered]:
        """Send all clients their parts of the same arrays; average each array of their replies."""
        means = {
            name: self.cuts.aggregate.begin(self._like[level])
            for name, level in work.answers.items()
        }
        for reply in self.send(work, self.parts_of(work, arrays), scalars, steps):
            for name, mean in means.items():
                part = self.cuts[reply.client].of(work.answers[name])
                mean.add(counted(part, reply.rows.get(name)), reply.arrays[name])
        return means
