"""Few-shot classification on Omniglot: Tables 1 and 2 of the paper."""

from collections.abc import Mapping
from typing import Any

from experiments.grid import Grid, Method, Setting, restrict
from experiments.grids.tuned import FIVE_WAY, TABLE_1_TWENTY_WAY

BASE: Mapping[str, Any] = {
    "task": "few-shot",
    "task_options": {
        "dataset": "omniglot",
        "channels": "32,64,128,256",
        "test_tasks": 600,
        "interim_tasks": 100,
    },
    "clients": 10,
    "capacities": "1,1/2,1/4,1/8,1/16",
    "rounds": 200,
}
PER_TASK = {
    "dist-protonet": ("Dist-ProtoNet (full)", "Dist-ProtoNet", "dist-protonet"),
    "dist-maml": ("Dist-MAML (full)", "Dist-MAML", "dist-maml"),
    "fedmbo": ("FedMBO (full)", "FedMBO", "fedmbo"),
    "static": ("Static", "Static", "static"),
    "oap": ("OAP (channels)", "OAP", "oap-structured"),
    "fedrolex": ("FedRolex", "FedRolex", "fedrolex"),
    "fiarse": ("FIARSE (channels)", "FIARSE", "fiarse-structured"),
    "rabo": ("RABO", "RABO", "rabo"),
    "rafbo": ("RAFBO", "RAFBO", "rafbo"),
}
WITHOUT_SHARED_HEAD = ("dist-protonet", "dist-maml")  # they adapt to a task in their own way
SHARED = "-shared"
SHARED_LABEL = ", shared head"
METHODS: Mapping[str, Method] = {
    **{
        name: Method(label=label, paper=paper, run={"algorithm": algorithm})
        for name, (label, paper, algorithm) in PER_TASK.items()
    },
    **{
        name + SHARED: Method(
            label=label + SHARED_LABEL,
            paper=paper,
            run={"algorithm": algorithm, "task_options": {"heads": "shared"}},
        )
        for name, (label, paper, algorithm) in PER_TASK.items()
        if name not in WITHOUT_SHARED_HEAD
    },
}
BOTH_HEADS = ("rabo", "rafbo", "rabo-shared", "rafbo-shared")

# tab:baselines: 5-way 1-shot, 5-way 5-shot, 20-way 1-shot, 20-way 5-shot
PAPER_TABLE_1: Mapping[str, tuple[float, ...]] = {
    "Dist-ProtoNet": (80.76, 89.33, 60.05, 78.01),
    "Dist-MAML": (81.46, 92.01, 61.36, 78.35),
    "FedMBO": (82.66, 93.69, 63.18, 81.64),
    "Static": (72.34, 85.09, 42.99, 51.01),
    "OAP": (73.58, 86.16, 45.45, 51.92),
    "FedRolex": (73.74, 86.95, 47.25, 55.29),
    "FIARSE": (74.33, 87.78, 49.52, 55.87),
    "RABO": (76.05, 89.12, 54.97, 77.41),
    "RAFBO": (75.09, 88.57, 51.37, 71.16),
}
# tab:scalability: 10, 20, 30 and 50 clients
PAPER_TABLE_2: Mapping[tuple[str, int], tuple[float, ...]] = {
    ("RABO", 1): (76.05, 75.81, 74.39, 72.76),
    ("RAFBO", 1): (75.09, 74.85, 73.04, 71.80),
    ("RABO", 5): (89.12, 88.52, 87.76, 86.58),
    ("RAFBO", 5): (88.57, 87.53, 87.03, 86.44),
}
NUM_CLIENTS = (10, 20, 30, 50)


def setting(ways: int, shots: int, column: int) -> Setting:
    """Return a setting of Table 1, with the paper's numbers."""
    queries = {"queries": 5} if ways == 20 else {}
    return Setting(
        label=f"{ways}-way {shots}-shot",
        run={"task_options": {"ways": ways, "shots": shots, **queries}},
        tuned=TABLE_1_TWENTY_WAY if ways == 20 else FIVE_WAY,
        paper={name: numbers[column] for name, numbers in PAPER_TABLE_1.items()},
    )


SETTINGS: Mapping[str, Setting] = {
    "5-way-1-shot": setting(5, 1, 0),
    "5-way-5-shot": setting(5, 5, 1),
    "20-way-1-shot": setting(20, 1, 2),
    "20-way-5-shot": setting(20, 5, 3),
}
TABLE_1 = Grid(
    name="table-1",
    title="Few-shot classification on Omniglot (Table 1 and its figures)",
    base=BASE,
    settings=SETTINGS,
    methods=METHODS,
)


def more_clients(shots: int, clients: int) -> Setting:
    """Return a setting of Table 2, with the paper's numbers."""
    column = NUM_CLIENTS.index(clients)
    return Setting(
        label=f"5-way {shots}-shot, {clients} clients",
        run={"clients": clients, "task_options": {"ways": 5, "shots": shots}},
        paper={name: PAPER_TABLE_2[name, shots][column] for name in ("RABO", "RAFBO")},
    )


TABLE_2 = Grid(
    name="table-2",
    title="More clients (Table 2; Table 1 has the runs of 10 clients)",
    base=BASE,
    settings={
        f"5-way-{shots}-shot-{clients}-clients": more_clients(shots, clients)
        for shots in (1, 5)
        for clients in NUM_CLIENTS[1:]
    },
    methods=restrict(METHODS, BOTH_HEADS),
    tuned=FIVE_WAY,
)
