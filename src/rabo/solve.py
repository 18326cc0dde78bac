"""Run an algorithm over clients: the one function most users call."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from rabo.aggregation import Aggregate
from rabo.algorithms import ALGORITHMS, Algorithm
from rabo.clients import Client
from rabo.errors import lookup
from rabo.federation import Evaluate, Federation, Result, Round, result_of
from rabo.hypergradients import ESTIMATORS
from rabo.masks import POLICIES
from rabo.runtimes import Privacy, Runtime, Tolerance


def make_algorithm(algorithm: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm of a name with its options, which may be names too, or the object."""
    if not isinstance(algorithm, str):
        if options:
            raise ValueError(f"options belong to the algorithm object, got {sorted(options)}")
        return algorithm
    kind = lookup("algorithm", algorithm, ALGORITHMS)
    known = {option.name: option for option in fields(kind)}
    for name in options:
        lookup(f"option of {algorithm}", name, known)
    for name, kinds in (("policy", POLICIES), ("hypergradient", ESTIMATORS)):
        if isinstance(options.get(name), str):
            options[name] = lookup(name, options[name], kinds)()
    return kind(**options)


def solve(
    clients: Sequence[Client],
    *,
    algorithm: str | Algorithm = "rabo",
    rounds: int = 100,
    participation: float = 1.0,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    on_round: Callable[[Round], None] | None = None,
    runtime: Runtime | None = None,
    tolerance: Tolerance | None = None,
    aggregate: Aggregate | None = None,
    privacy: Privacy | None = None,
    **options: Any,
) -> Result:
    """Solve a bilevel problem over clients; options (alpha, beta, ...) are the algorithm's."""
    federation = Federation(
        clients,
        make_algorithm(algorithm, **options),
        participation=participation,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        runtime=runtime,
        tolerance=tolerance,
        aggregate=aggregate,
        privacy=privacy,
    )
    history = []
    for done in federation.run(rounds):
        history.append(done)
        if on_round:
            on_round(done)
    return result_of(federation, history)
