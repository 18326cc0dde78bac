"""Algorithm options chosen on held-out data: the best candidates of `tuning`.

A test compares them with the recorded runs of the tuning grids.
"""

from collections.abc import Mapping
from typing import Any

FIVE_WAY: Mapping[str, Mapping[str, Any]] = {
    "dist-protonet": {"beta": 0.03, "num_inner_steps": 3},
    "dist-maml": {"beta": 1.0, "adapt_rate": 0.5, "num_inner_steps": 1},
    "fedmbo": {"alpha": 1.0},
    "static": {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 5},
    "oap": {"beta": 30.0, "beta_x": 0.03, "num_inner_steps": 5},
    "fedrolex": {"beta": 30.0, "beta_x": 0.03, "num_inner_steps": 5},
    "fiarse": {"beta": 30.0, "beta_x": 0.03, "num_inner_steps": 5},
    "rabo": {"alpha": 0.3},
    "rafbo": {"alpha": 0.3},
    "fedmbo-shared": {"alpha": 0.3},
    "static-shared": {"beta": 10.0, "beta_x": 0.03, "num_inner_steps": 5},
    "oap-shared": {"beta": 10.0, "beta_x": 0.1, "num_inner_steps": 5},
    "fedrolex-shared": {"beta": 10.0, "beta_x": 0.03, "num_inner_steps": 5},
    "fiarse-shared": {"beta": 10.0, "beta_x": 0.03, "num_inner_steps": 5},
    "rabo-shared": {"alpha": 0.3},
    "rafbo-shared": {"alpha": 0.3},
}
TWENTY_WAY: Mapping[str, Mapping[str, Any]] = {
    "dist-maml": {"beta": 1.0, "adapt_rate": 30.0, "adapt_rate_x": 0.1, "num_inner_steps": 1},
    "fedmbo": {"outer_step": "adam", "alpha": 0.001},
    "static": {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 10},
    "oap": {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 10},
    "fedrolex": {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 10},
    "fiarse": {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 10},
    "rabo": {"alpha": 0.3},
    "rafbo": {"alpha": 1.0},
    "fedmbo-shared": {"alpha": 1.0},
    "static-shared": {"beta": 0.1, "num_inner_steps": 5},
    "oap-shared": {"beta": 0.1, "num_inner_steps": 5},
    "fedrolex-shared": {"beta": 0.1, "num_inner_steps": 5},
    "fiarse-shared": {"beta": 0.1, "num_inner_steps": 5},
    "rabo-shared": {"alpha": 0.3},
    "rafbo-shared": {"alpha": 0.3},
}
LOSS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"beta": {"name": "cosine", "start": 0.02}, "momentum": 0.9},
    "fedmbo": {"alpha": 0.02},
}

# Table 1 was run before FedMBO was tuned at 20-way, so it keeps its options of 5-way there.
TABLE_1_TWENTY_WAY: Mapping[str, Mapping[str, Any]] = {
    **FIVE_WAY,
    **{name: own for name, own in TWENTY_WAY.items() if not name.startswith("fedmbo")},
}
