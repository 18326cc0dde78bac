"""Run an algorithm over clients: the one function most users call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from rabo.algorithms import Algorithm, find_algorithm
from rabo.algorithms.steps import OUTER_STEPS, SCHEDULES, STEP_SIZES
from rabo.errors import lookup
from rabo.exchange.aggregation import Aggregate
from rabo.execution import Privacy, Runtime, Tolerance
from rabo.federation.clients import Client
from rabo.federation.federation import Evaluate, Federation, result_of
from rabo.federation.rounds import Result, Round
from rabo.hypergradients import ESTIMATORS
from rabo.pruning.policies import POLICIES

# options that are objects, by the names they have in plain options
NAMED: Mapping[str, Mapping[str, Any]] = {
    "policy": POLICIES,
    "hypergradient": ESTIMATORS,
    "outer_step": OUTER_STEPS,
    **dict.fromkeys(STEP_SIZES, SCHEDULES),
}
# option names of other software, and ours
SYNONYMS: Mapping[str, Sequence[str]] = {
    "lr": ("alpha", "beta"),
    "learning_rate": ("alpha", "beta"),
    "outer_lr": ("alpha",),
    "inner_lr": ("beta",),
    "hlr": ("alpha",),
    "neumann": ("num_terms", "hypergradient"),
    "local_ep": ("num_local_steps",),
    "local_epochs": ("num_local_steps",),
    "local_steps": ("num_local_steps", "num_inner_steps"),
    "tau": ("num_local_steps", "num_inner_steps"),
    "outer_tau": ("num_local_steps_x", "num_outer_steps"),
    "inner_ep": ("num_inner_steps",),
    "inner_steps": ("num_inner_steps",),
    "outer_steps": ("num_outer_steps", "num_local_steps_x"),
    "num_rounds": ("rounds",),
    "epochs": ("rounds",),
    "frac": ("participation",),
}


def over_all(rounds: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Let schedules that are plain options run over all rounds, unless they say over how many."""
    return {
        name: {"rounds": rounds, **value}
        if name in STEP_SIZES and isinstance(value, Mapping)
        else value
        for name, value in options.items()
    }


def make_algorithm(algorithm: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm of a name with its options, or the object.

    Options that are objects may be given by name too, or as a mapping of a name and options of
    their own: {"name": "neumann", "num_terms": 5}.
    """
    if not isinstance(algorithm, str):
        if options:
            raise ValueError(f"options belong to the algorithm object, got {sorted(options)}")
        return algorithm
    kind = find_algorithm(algorithm)
    known = {option.name: option for option in fields(kind)}
    hints = get_type_hints(kind)
    for name, value in options.items():
        lookup(f"option of {algorithm}", name, known, SYNONYMS)
        _check_number(name, value, hints[name])
    return kind(**{name: _made(name, value) for name, value in options.items()})


def with_default_step(algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Let the server step by Adam unless the options name another outer step.

    Steps that clients take on x themselves (num_outer_steps > 1) need plain descent.
    """
    known = {option.name for option in fields(find_algorithm(algorithm))}
    if "outer_step" not in known or options.get("num_outer_steps", 1) != 1:
        return dict(options)
    return {"outer_step": "adam", **options}


def _check_number(option: str, value: Any, hint: Any) -> None:
    """Refuse what is no number where nothing else is meant."""
    kinds = set(get_args(hint) or (hint,)) - {NoneType}
    if value is None or not kinds <= {int, float}:
        return
    if kinds == {int} and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise ValueError(f"{option} must be a whole number, got {value!r}")
    if not isinstance(value, Real):
        raise ValueError(f"{option} must be a number, got {value!r}")


def _made(option: str, value: Any) -> Any:
    """Make the object that a plain option names; what names none stays as it is."""
    if option not in NAMED or value == "auto" or not isinstance(value, (str, Mapping)):
        return value
    name, own = (value, {}) if isinstance(value, str) else (value.get("name", ""), dict(value))
    own.pop("name", None)
    known = {**NAMED[option], **({"auto": None} if option == "beta" else {})}
    try:
        return lookup(option, name, known)(**own)
    except TypeError as error:
        raise ValueError(
            f"{option} {name} must be given with its own options, as {{'name': '{name}', ...}} "
            f"(on the command line JSON, with double quotes): {error}"
        ) from error


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
    """Solve a problem over clients; options (alpha, beta, ...) are the algorithm's.

    An algorithm given by name steps on x with Adam on the server and alpha = 0.01 unless the
    options say otherwise; `outer_step="descent"` is the plain step of the paper, with alpha = 0.1.
    """
    if isinstance(algorithm, str):
        kind = find_algorithm(algorithm)
        known = {option.name for option in fields(kind)} | signature(solve).parameters.keys()
        for name in options:
            names = dict.fromkeys(known - {"options"})
            lookup(f"option of solve with {algorithm}", name, names, SYNONYMS)
        options = with_default_step(algorithm, options)
    federation = Federation(
        clients,
        make_algorithm(algorithm, **over_all(rounds, options)),
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
