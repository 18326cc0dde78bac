"""Studies beyond the paper."""

from collections.abc import Mapping
from typing import Any

from experiments.grid import Grid, Method, Setting, merge, restrict
from experiments.grids.few_shot import BASE, METHODS, SETTINGS
from experiments.grids.tuned import FIVE_WAY

FIXED = Setting(label="fixed")
CHANGING = Setting(label="changing", run={"rotate_capacities": True})
SHARDS = Setting(label="shards of characters")
OVER_ALPHABETS = Setting(
    label="Dirichlet(0.1) over alphabets",
    run={"task_options": {"split": "dirichlet", "concentration": 0.1}},
)
OMNIGLOT_5_WAY_1_SHOT = merge(BASE, {"task_options": {"ways": 5, "shots": 1}})
GLYPHS: Mapping[str, Any] = {
    "task": "few-shot",
    "task_options": {
        "dataset": "glyphs",
        "backbone": "conv4",
        "channels": "16",
        "queries": 5,
        "test_tasks": 200,
        "interim_tasks": 20,
    },
    "clients": 5,
    "capacities": "1,1/2,1/4,1/8,1/16",
    "rounds": 20,
}


def untuned(label: str, algorithm: str) -> Method:
    """Return a method with the defaults of its task."""
    return Method(label=label, run={"algorithm": algorithm})


def rabo(label: str, rounds: int = 200, **options: Any) -> Method:
    """Return a variant of RABO with the options that RABO was tuned to."""
    run = {"algorithm": "rabo", "rounds": rounds, "algorithm_options": options}
    return Method(label=label, run=run, tuned_as="rabo")


CAPACITIES = Grid(
    name="study-capacities",
    title="Capacities that change every round against fixed ones (digits)",
    base={"task": "digits", "clients": 10, "capacities": "1,1/2,1/4,1/8,1/16", "rounds": 30},
    settings={"fixed": FIXED, "changing": CHANGING},
    methods={
        "rabo": untuned("RABO", "rabo"),
        "rafbo": untuned("RAFBO", "rafbo"),
        "static": untuned("Static", "static"),
        "fedrolex": untuned("FedRolex", "fedrolex"),
    },
)
CAPACITIES_OMNIGLOT = Grid(
    name="study-capacities-omniglot",
    title="Capacities that change every round against fixed ones (Omniglot, 5-way 1-shot)",
    base=OMNIGLOT_5_WAY_1_SHOT,
    settings={"changing": CHANGING},
    methods=restrict(METHODS, ("static", "fedrolex", "rabo", "rafbo")),
    tuned=FIVE_WAY,
)
DIRICHLET = Grid(
    name="study-dirichlet",
    title="Clients whose alphabets follow Dirichlet(0.1) against shards (glyphs, 5-way 1-shot)",
    base=GLYPHS,
    settings={"shards": SHARDS, "dirichlet": OVER_ALPHABETS},
    methods={
        "fedmbo": untuned("FedMBO (full)", "fedmbo"),
        "static": untuned("Static", "static"),
        "rabo": untuned("RABO", "rabo"),
        "rafbo": untuned("RAFBO", "rafbo"),
    },
)
DIRICHLET_OMNIGLOT = Grid(
    name="study-dirichlet-omniglot",
    title="Clients whose alphabets follow Dirichlet(0.1) against shards (Omniglot, 5-way 1-shot)",
    base=OMNIGLOT_5_WAY_1_SHOT,
    settings={"dirichlet": OVER_ALPHABETS},
    methods=restrict(METHODS, ("fedmbo", "static", "rabo", "rafbo")),
    tuned=FIVE_WAY,
)
VARIANTS = Grid(
    name="study-variants",
    title="RABO with other masks, and with several steps on x",
    base=BASE,
    settings=SETTINGS,
    methods={
        "rabo-rolling": rabo("RABO, masks that roll (FedRolex's)", policy="rolling"),
        "rabo-static": rabo("RABO, first channels (Static's)", policy="static"),
        "rabo-5-steps": rabo("RABO, 5 steps on x", num_outer_steps=5),
        "rabo-rolling-5-steps": rabo(
            "RABO, masks that roll, 5 steps on x", policy="rolling", num_outer_steps=5
        ),
    },
)
LONGER = Grid(
    name="study-longer",
    title="RABO with four times the rounds",
    base=BASE,
    settings=SETTINGS,
    methods={
        "rabo-800": rabo("RABO, 800 rounds", 800),
        "rabo-rolling-800": rabo("RABO, masks that roll, 800 rounds", 800, policy="rolling"),
    },
)
