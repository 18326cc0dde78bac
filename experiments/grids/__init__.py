"""All grids by name."""

from collections.abc import Mapping

from experiments.grid import Grid
from experiments.grids.coverage import COVERAGE
from experiments.grids.errata import ERRATA
from experiments.grids.estimators import ESTIMATORS
from experiments.grids.few_shot import TABLE_1, TABLE_2
from experiments.grids.loss_tuning import LOSS_TUNING
from experiments.grids.studies import (
    CAPACITIES,
    CAPACITIES_OMNIGLOT,
    DIRICHLET,
    DIRICHLET_OMNIGLOT,
    LONGER,
    VARIANTS,
)
from experiments.grids.tuning import TUNING_5_WAY, TUNING_20_WAY, TUNING_LOSS

GRIDS: Mapping[str, Grid] = {
    grid.name: grid
    for grid in (
        TABLE_1,
        TABLE_2,
        COVERAGE,
        LOSS_TUNING,
        CAPACITIES,
        CAPACITIES_OMNIGLOT,
        DIRICHLET,
        DIRICHLET_OMNIGLOT,
        ERRATA,
        ESTIMATORS,
        LONGER,
        VARIANTS,
        TUNING_5_WAY,
        TUNING_20_WAY,
        TUNING_LOSS,
    )
}
