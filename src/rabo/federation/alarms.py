"""Warnings about a run that goes wrong, with the cause and the remedy."""

import warnings
from collections.abc import Mapping
from math import sqrt
from statistics import median

from rabo.errors import DIVERGENCE_REMEDY
from rabo.exchange.state import HYPERGRADIENT_NORM, INNER_DISAGREEMENT

WINDOW, GROWTH = 5, 10.0  # a norm above the first, and ten times the median of the last five
UNLIKE = 0.5  # of √(n−1), the disagreement of n orthogonal changes


class DivergenceWarning(UserWarning):
    """A hypergradient that grows from round to round."""


class BiasWarning(UserWarning):
    """Clients so unlike that the mean of their hypergradients is not the gradient."""


class Alarms:
    """Follow the metrics of a run and warn once of each kind of trouble."""

    def __init__(self, uses_local_hessians: bool):
        self._norms: list[float] = []
        self._watches_bias = uses_local_hessians
        self._has_warned = False

    def see(self, round: int, metrics: Mapping[str, float], num_clients: int) -> None:
        """Look at the metrics of one round."""
        self._see_norm(metrics.get(HYPERGRADIENT_NORM))
        if round == 0 and num_clients > 1 and INNER_DISAGREEMENT in metrics:
            self._see_disagreement(metrics[INNER_DISAGREEMENT] / sqrt(num_clients - 1))

    def _see_norm(self, norm: float | None) -> None:
        if norm is None or self._has_warned:
            return
        before = self._norms[-WINDOW:]
        if len(before) == WINDOW and norm > max(GROWTH * median(before), self._norms[0]):
            self._has_warned = True
            warnings.warn(
                f"the hypergradient's norm grew to {norm:.2g} within {WINDOW} rounds, from a "
                f"median of {median(before):.2g}: the run may diverge. {DIVERGENCE_REMEDY}",
                DivergenceWarning,
                stacklevel=2,
            )
        self._norms.append(norm)

    def _see_disagreement(self, share: float) -> None:
        if self._watches_bias and share > UNLIKE:
            warnings.warn(
                "clients move y in different directions: if their data differ, the mean of their "
                "local hypergradients is biased. rabo.check(clients) measures the bias; "
                "algorithm='simrabo' (or 'simrafbo') and hessian='global' avoid it",
                BiasWarning,
                stacklevel=2,
            )
