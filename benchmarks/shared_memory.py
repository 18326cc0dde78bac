"""Recordings that share memory on a GPU: is x that of the plain path?

Usage: python -m benchmarks shared_memory (less than a minute on an H200)
"""

from collections.abc import Sequence

import torch

from rabo.algorithms import RABO, FedAvg, FedMBO
from rabo.execution import RUNTIMES, room
from rabo.federation.clients import Client
from rabo.federation.federation import Federation
from rabo.tasks.few_shot import FewShotTask

ROUNDS = 6
ALGORITHMS = {
    "rabo": RABO(num_inner_steps=4, momentum=0.8),
    "fedmbo": FedMBO(num_inner_steps=3, num_terms=3),
    "fedavg": FedAvg(levels="both", beta=1.0, beta_x=0.1, num_inner_steps=3),
}


def clients() -> Sequence[Client]:
    task = FewShotTask(
        backbone="conv4", channels="8", tasks=2, queries=3, test_tasks=2, penalty=0.3
    )
    return task.build([1.0, 0.5, 0.25, 0.5, 1.0, 1.0], ROUNDS, 0, "cuda").clients


def reached(algorithm: str, runtime: str, parts: int) -> torch.Tensor:
    """Return x after some rounds, with recordings that may hold one of so many parts of memory."""
    room._parts = parts
    own = clients()
    kind = RUNTIMES[runtime]({i: client.problem for i, client in enumerate(own)})
    federation = Federation(own, ALGORITHMS[algorithm], runtime=kind)
    list(federation.run(ROUNDS))
    return torch.cat([value.reshape(-1) for value in federation.state.x.values()]).double()


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for algorithm in ALGORITHMS:
        plain = reached(algorithm, "plain", room.PARTS)
        for runtime in ("recorded", "grouped"):
            for how, parts in (("own", room.PARTS), ("shared", 10**13)):
                gap = (reached(algorithm, runtime, parts) - plain).norm() / plain.norm()
                print(f"{algorithm}, {runtime}, {how} pools: {gap:.1e} from plain", flush=True)
