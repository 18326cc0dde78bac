"""Warnings about runs that go wrong, and the disagreement of clients that they look at."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rabo
from known_problems import federated_quadratics
from rabo.algorithms import ALGORITHMS, FedNest
from rabo.exchange.aggregation import Aggregate
from rabo.exchange.covering import CoveredMean
from rabo.execution import InProcess
from rabo.federation.alarms import Alarms, BiasWarning, DivergenceWarning
from rabo.federation.federation import Federation
from rabo.pruning.channels import declare
from rabo.pruning.submodel import ElementMask, cut
from rabo.seeding import stream
from rabo.tasks.quadratic import random_quadratic

F64 = {"dtype": torch.float64}


def warned(run, kind):
    """The warnings of a kind that a run has given, as texts."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if issubclass(w.category, kind)]


def follow(norms):
    alarms = Alarms(uses_local_hessians=True)
    for q, norm in enumerate(norms):
        alarms.see(q, {"hypergradient_norm": norm}, 3)


@pytest.mark.parametrize(
    ("norms", "number"),
    [
        ([2.0] * 5 + [20.1], 1),
        ([2.0] * 5 + [19.9], 0),
        ([0.5] + [5.0] * 4 + [20.0], 0),  # the median counts, neither the first
        ([1.0, 1.0, 9.0, 1.0, 9.0, 11.0], 1),  # nor the largest
        ([2.0] * 4 + [100.0], 0),  # five rounds are not known yet
        ([1.0, 1.0, 9.0, 1.0, 1.0, 9.0, 1.0, 1.0, 9.0], 0),  # single rounds of noise
        ([3.0**q for q in range(12)], 1),
        ([1.3**q for q in range(60)], 0),  # less than tenfold within five rounds
        ([0.5**q for q in range(12)], 0),
        ([7.0] * 12, 0),
        ([30.0] + [2.0] * 5 + [29.0], 0),  # no more than at the start
        ([1.0] * 5 + [100.0] * 6 + [1e4] * 6, 1),  # once is enough
    ],
)
def test_a_norm_that_grows_tenfold_within_five_rounds_is_warned_of_once(norms, number):
    assert len(warned(lambda: follow(norms), DivergenceWarning)) == number


def test_rounds_without_a_norm_are_no_growth():
    def run():
        alarms = Alarms(uses_local_hessians=True)
        # the last is the fifth that is known
        for q, norm in enumerate((None, 1.0, None, 1.0, 1.0, None, 1.0, 50.0)):
            alarms.see(q, {} if norm is None else {"hypergradient_norm": norm}, 3)

    assert warned(run, DivergenceWarning) == []


def test_a_run_that_diverges_names_the_causes_and_the_remedies():
    clients = [rabo.Client(p) for p in federated_quadratics()]

    def run():
        options = {"outer_step": "descent", "max_outer_step": None, "alpha": 2.0}
        rabo.solve(clients, rounds=12, num_inner_steps=1, **options)

    [text] = warned(run, DivergenceWarning)
    for remedy in ("alpha", "max_outer_step", "hessian='global'", "simrabo", "rabo.check"):
        assert remedy in text


def test_a_run_that_converges_is_not_warned_of():
    clients = [rabo.Client(p) for p in federated_quadratics()]
    assert warned(lambda: rabo.solve(clients, rounds=20), DivergenceWarning) == []


def quadratics(heterogeneity, num_clients=4, sigma=0.0):
    family = random_quadratic(stream(0, "family"), 6, 5, heterogeneity=heterogeneity)
    return [
        rabo.Client(family.client(stream(0, i), sigma_f=sigma, sigma_g=sigma))
        for i in range(num_clients)
    ]


@pytest.mark.parametrize(
    "algorithm",
    [
        rabo.RABO(alpha=0.2, hessian="global"),
        FedNest(alpha=0.1, num_inner_steps=1, num_local_steps=1),
    ],
    ids=["beta that changes", "chains of random length"],
)
def test_a_norm_that_varies_far_below_its_start_is_no_divergence(algorithm):
    def run():
        history = rabo.solve(quadratics(0.3), algorithm=algorithm, rounds=50).history
        norms = [done.metrics["hypergradient_norm"] for done in history]
        assert max(norms[10:]) < norms[0] / 2

    assert warned(run, DivergenceWarning) == []


def test_like_clients_are_not_warned_of_when_their_run_goes_on_after_a_pause():
    """Near the solution noise is all by which y moves."""
    whole, after = (Federation(quadratics(0.0, sigma=0.1), rabo.RABO()) for _ in range(2))
    assert warned(lambda: list(whole.run(60)), BiasWarning) == []
    after.restore(whole.snapshot())
    assert warned(lambda: list(after.run(5)), BiasWarning) == []


UNLIKE = 1e6  # clients share next to nothing


@pytest.mark.parametrize(
    ("algorithm", "clients", "rounds", "number"),
    [
        ("rabo", quadratics(UNLIKE), 8, 1),
        ("rafbo", quadratics(UNLIKE), 3, 1),
        ("rabo", quadratics(UNLIKE), 1, 1),
        ("rabo", quadratics(UNLIKE, 1), 8, 0),  # nobody to differ from
        ("rabo", quadratics(0.0), 8, 0),
        ("rabo", quadratics(0.05), 8, 0),
        ("simrabo", quadratics(UNLIKE), 8, 0),
        ("simrafbo", quadratics(UNLIKE), 8, 0),
        (rabo.RABO(hessian="global"), quadratics(UNLIKE), 8, 0),
        (rabo.RAFBO(hessian="global"), quadratics(UNLIKE), 8, 0),
    ],
)
def test_clients_that_differ_make_methods_with_local_hessians_warn_of_their_bias_once(
    algorithm, clients, rounds, number
):
    found = warned(lambda: rabo.solve(clients, algorithm=algorithm, rounds=rounds), BiasWarning)
    assert len(found) == number
    for text in found:
        assert "simrabo" in text
        assert "hessian='global'" in text


@pytest.mark.parametrize("name", [n for n, kind in ALGORITHMS.items() if not kind.is_episodic])
def test_only_rabo_and_rafbo_are_watched_for_the_bias_of_local_hessians(name):
    assert ALGORITHMS[name]().uses_local_hessians == (name in ("rabo", "rafbo"))


def dense_disagreement(values, held):
    """(Σ_i‖h_i − mean‖²/Σ_i‖mean‖²)^½ over the entries that a client shares with others."""
    count = held.sum(axis=0)
    mean = (values * held).sum(axis=0) / np.maximum(count, 1)
    shared = held & (count > 1)
    size = (shared * mean**2).sum()
    return ((shared * (values - mean) ** 2).sum() / size) ** 0.5 if size else 0.0


SHAPES = {"a": (3, 4), "b": (3,)}


@st.composite
def replies(draw):
    """Clients that hold rows of two tensors, or single entries of them."""
    by_row, number = draw(st.booleans()), draw(st.integers(0, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    full = {name: torch.zeros(shape, **F64) for name, shape in SHAPES.items()}
    channels = declare({"x.a": ("rows", None), "x.b": ("rows",)}, full, {})
    parts = []
    for _ in range(number):
        if by_row:
            size = int(torch.randint(1, 4, (), generator=g))
            rows = torch.randperm(3, generator=g)[:size].sort().values
            parts.append(cut(channels, {"rows": rows}).x)
        else:
            masks = {k: torch.rand(v.shape, generator=g) < 0.5 for k, v in full.items()}
            parts.append(ElementMask(masks))
    scale = 10.0 ** draw(st.integers(-3, 3))
    offset = draw(st.sampled_from([0.0, 1.0, 30.0]))  # how much all have in common
    values = scale * (offset + torch.randn(number, 15, generator=g, **F64))
    return full, parts, values


def test_disagreement_with_a_median_is_about_the_median():
    full = {"a": torch.zeros(2, **F64)}
    collected = Aggregate("median").begin(full)
    whole = cut(declare({}, full, {}), {}).x
    for row in ((1.0, 0.0), (1.0, 0.0), (-9.0, 0.0)):
        collected.add(whole, {"a": torch.tensor(row, **F64)})
    assert float(collected.disagreement()) == pytest.approx((100 / 3) ** 0.5)  # the median is 1


@given(replies())
def test_disagreement_follows_its_definition_on_submodels_that_overlap(case):
    full, parts, values = case
    collected, held = CoveredMean(full), []
    for part, flat in zip(parts, values, strict=True):
        tree = {"a": flat[:12].reshape(3, 4), "b": flat[12:]}
        collected.add(part, part.extract(tree))
        held.append(torch.cat([t.flatten() for t in part.held().values()]).tolist())
    truth = dense_disagreement(values.numpy(), np.array(held, dtype=bool).reshape(-1, 15))
    assert float(collected.disagreement()) == pytest.approx(truth, rel=1e-6, abs=1e-6)


def test_clients_that_share_no_entry_do_not_disagree():
    full = {"a": torch.zeros(3, 4, **F64), "b": torch.zeros(3, **F64)}
    channels = declare({"x.a": ("rows", None), "x.b": ("rows",)}, full, {})
    collected = CoveredMean(full)
    for row in range(3):
        part = cut(channels, {"rows": torch.tensor([row])}).x
        collected.add(part, part.extract({k: v + row + 1 for k, v in full.items()}))
    assert float(collected.disagreement()) == 0.0


def test_clients_at_right_angles_disagree_by_the_root_of_one_less_than_their_number():
    full = {"a": torch.zeros(4, **F64)}
    collected = CoveredMean(full)
    whole = cut(declare({}, full, {}), {}).x
    for row in torch.eye(4, **F64):
        collected.add(whole, {"a": row})
    assert float(collected.disagreement()) == pytest.approx(3**0.5)


class Spy(InProcess):
    """Keeps what clients have answered, by name."""

    def __init__(self, problems):
        super().__init__(problems)
        self.answered = {}

    def map(self, work, requests):
        for reply in super().map(work, requests):
            for name, tree in reply.arrays.items():
                self.answered.setdefault(name, []).append(next(iter(tree.values())))
            yield reply


def test_the_metrics_hold_the_disagreement_about_x_and_about_y():
    problems = federated_quadratics()
    spy = Spy(dict(enumerate(problems)))
    federation = Federation([rabo.Client(p) for p in problems], rabo.RABO(), runtime=spy)
    for done in federation.run(3):
        for name, metric in (("x", "disagreement"), ("y", "inner_disagreement")):
            values = torch.stack(spy.answered[name]).numpy()
            truth = dense_disagreement(values, np.ones(values.shape, dtype=bool))
            assert done.metrics[metric] == pytest.approx(truth, rel=1e-9)
        spy.answered.clear()
