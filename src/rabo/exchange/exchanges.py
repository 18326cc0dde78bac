"""The server's side of a round that asks clients several times."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from rabo.exchange.covering import Covered
from rabo.exchange.rows import counted
from rabo.exchange.state import CURVATURE, Cuts, State
from rabo.exchange.work import Reply, Runtime, Task, Work
from rabo.pruning.submodel import level_of
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

    def ask(
        self,
        work: Work,
        tasks: Iterable[tuple[int, Mapping[str, Params]]],
        scalars: Mapping[str, float] = NO_SCALARS,
        num_steps: Callable[[int], int] = lambda _: 1,
    ) -> Iterator[tuple[int, Reply]]:
        """Send every client its own vectors and yield the replies."""
        missing: set[int] = set()

        def sent() -> Iterator[tuple[int, Task]]:
            for client, arrays in tasks:
                missing.add(client)
                cut, steps = self.cuts[client], num_steps(client)
                number = self.cuts.answered[client]
                yield client, Task(self._seed, self._round, cut, arrays, scalars, steps, number)

        for client, reply in self._runtime.map(work, sent()):
            missing.discard(client)
            self.cuts.answered[client] += 1
            if CURVATURE in reply.scalars:
                seen = self.curvatures.get(client, 0.0)
                self.curvatures[client] = max(seen, reply.scalars[CURVATURE])
            yield client, reply
        self.present -= missing

    def largest_curvature(self) -> float:
        """Return the largest curvature that clients saw, after trimming; 0 if none did."""
        seen = [value for value in self.curvatures.values() if value > 0]
        return self.cuts.aggregate.largest(seen) if seen else 0.0

    def parts_of(self, vectors: Mapping[str, Params]) -> Iterator[tuple[int, Mapping[str, Params]]]:
        """Yield what every client that is still there holds of the same vectors."""
        parts = {name: self.cuts.extract(level_of(name), full) for name, full in vectors.items()}
        for client in sorted(self.present):
            yield client, {name: part_of(client) for name, part_of in parts.items()}

    def mean(
        self,
        work: Work,
        vectors: Mapping[str, Params],
        *names: str,
        scalars: Mapping[str, float] = NO_SCALARS,
        num_steps: Callable[[int], int] = lambda _: 1,
    ) -> list[Covered]:
        """Send all clients their parts of the same vectors; average what they reply, by name."""
        means = {n: self.cuts.aggregate.begin(self._like[level_of(n)]) for n in names}
        for client, reply in self.ask(work, self.parts_of(vectors), scalars, num_steps):
            for name, mean in means.items():
                part = getattr(self.cuts[client], level_of(name))
                mean.add(counted(part, reply.rows.get(name)), reply.arrays[name])
        return list(means.values())
