"""Medians and trimmed means per entry, over the clients that hold it."""

from dataclasses import replace
from statistics import fmean, median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rabo
from known_problems import distance, federated_quadratics
from rabo import Aggregate
from rabo.exchange.covering import CoveredMean
from rabo.execution import InProcess
from rabo.pruning.channels import declare
from rabo.pruning.policies import Whole
from rabo.pruning.submodel import ElementMask, cut
from rabo.seeding import stream

KINDS = ["mean", "median", "trimmed"]
CHANNELS = declare({"x.w": ("units",)}, {"w": torch.zeros(4)}, {})


def holds(*units):
    """A client that holds some entries of a vector of four."""
    return cut(CHANNELS, {"units": torch.tensor(units)}).x


def test_entries_by_hand():
    """Five clients hold entry 0, four entry 1, one entry 2, none entry 3."""
    replies = [
        (holds(0, 1), [1.0, 10.0]),
        (holds(0, 1), [2.0, 20.0]),
        (holds(0, 1), [900.0, -900.0]),
        (holds(0, 1), [4.0, 30.0]),
        (holds(0, 2), [3.0, 7.0]),
    ]
    found = {}
    for kind in KINDS:
        collected = Aggregate(kind, trim=0.2).begin({"w": torch.zeros(4)})
        for part, values in replies:
            collected.add(part, {"w": torch.tensor(values)})
        found[kind] = collected
    assert found["mean"].mean()["w"].tolist() == [182.0, -210.0, 7.0, 0.0]
    assert found["median"].mean()["w"].tolist() == [3.0, 15.0, 7.0, 0.0]
    assert found["trimmed"].mean()["w"].tolist() == [3.0, -210.0, 7.0, 0.0]  # ⌊0.2·4⌋ is none
    for collected in found.values():
        assert collected.count["w"].tolist() == [5, 4, 1, 0]
        full = torch.tensor([1.0, 1.0, 1.0, 0.1])
        assert collected.step({"w": full}, 0.5)["w"][3] == full[3]  # nobody: bit for bit
        sums = collected.mean()["w"] * torch.tensor([5, 4, 1, 0])
        assert collected.sum()["w"].tolist() == sums.tolist()


def dense(values, kind, trim):
    """One entry by the definition, from the values of those who hold it."""
    if not values:
        return 0.0
    if kind == "median":
        return median(values)
    skipped = int(trim * len(values) + 1e-9) if kind == "trimmed" else 0
    return fmean(sorted(values)[skipped : len(values) - skipped])


@given(
    st.integers(0, 2**16),
    st.integers(0, 9),
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.1, 0.25, 0.4]),
    st.booleans(),
)
def test_it_is_what_a_loop_over_entries_gives(seed, num_clients, kind, trim, by_channel):
    generator = torch.Generator().manual_seed(seed)
    full = {"w": torch.zeros(3, 4).double(), "b": torch.zeros(()).double()}
    collected, held_by = Aggregate(kind, trim).begin(full), {}
    for _ in range(num_clients):
        if by_channel:
            rows = torch.randperm(3, generator=generator)[:2].sort().values
            part = cut(declare({"x.w": ("rows", None)}, full, {}), {"rows": rows}).x
        else:
            mask = torch.rand(3, 4, generator=generator) < 0.6
            part = ElementMask({"w": mask, "b": torch.tensor(True)})
        whole = {
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in full.items()
        }
        values = {name: value.clone() for name, value in part.extract(whole).items()}
        collected.add(part, values)
        for value in values.values():
            value.fill_(float("nan"))  # a reply may be overwritten once it has been taken in
        for name, held in part.held().items():
            for at in held.expand_as(full[name]).nonzero().tolist():
                held_by.setdefault((name, *at), []).append(float(whole[name][tuple(at)]))
    found = collected.mean()
    for name, value in full.items():
        for at in torch.ones_like(value).nonzero().tolist():
            wanted = dense(held_by.get((name, *at), []), kind, trim)
            assert float(found[name][tuple(at)]) == pytest.approx(wanted, abs=1e-12)


@given(st.integers(0, 2**16), st.floats(-1e300, 1e300), st.sampled_from(["median", "trimmed"]))
def test_one_corrupted_client_in_ten_stays_within_the_range_of_the_honest(seed, lie, kind):
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    collected = Aggregate(kind, trim=0.1).begin({"w": torch.zeros(4).double()})
    for values in [*honest, torch.full((4,), lie, dtype=torch.float64)]:
        collected.add(holds(0, 1, 2, 3), {"w": values})
    found = collected.mean()["w"]
    assert (found >= honest.amin(dim=0) - 1e-12).all()
    assert (found <= honest.amax(dim=0) + 1e-12).all()


@given(st.integers(0, 2**16), st.integers(1, 6))
def test_trimming_nothing_is_the_mean(seed, num_clients):
    generator = torch.Generator().manual_seed(seed)
    full = {"x": torch.randn(6, generator=generator).double()}
    whole = Whole(rabo.pruning.channels.declare({"x.x": ("x",)}, full, {}), full, {})
    collected, plain = Aggregate("trimmed", trim=0.0).begin(full), CoveredMean(full)
    for i in range(num_clients):
        part = rabo.Random()(whole, 0.5, i, 0, stream(seed, i)).x
        for each in (collected, plain):
            each.add(part, part.extract(full))
    torch.testing.assert_close(collected.step(full, 0.3), plain.step(full, 0.3))
    torch.testing.assert_close(collected.sum(), plain.sum())


def test_the_largest_number_that_counts():
    values = [3.0, 1e9, 1.0, 2.0, 4.0]
    assert Aggregate().largest(values) == 1e9
    assert Aggregate("median").largest(values) == 3.0
    assert Aggregate("trimmed", trim=0.2).largest(values) == 4.0
    assert Aggregate("median").largest([5.0]) == 5.0


class Liar(InProcess):
    """One client of five sends its answers times −100, and a curvature of a billion."""

    def map(self, work, requests):
        for reply in super().map(work, requests):
            if reply.client == 3:
                arrays = {
                    name: {key: -100 * value for key, value in tree.items()}
                    for name, tree in reply.arrays.items()
                }
                reply = replace(reply, arrays=arrays, scalars=dict.fromkeys(reply.scalars, 1e9))
            yield reply


@pytest.mark.filterwarnings("ignore::rabo.federation.alarms.DivergenceWarning")  # of the mean
@pytest.mark.parametrize("hessian", ["local", "global"])
@pytest.mark.parametrize("kind", KINDS)
def test_rabo_finds_the_solution_beside_a_liar_unless_it_takes_means(kind, hessian):
    """Clients are alike but for the liar, so that the solution of any of them is that of all."""
    problems = federated_quadratics(1) * 5
    clients = [rabo.Client(problem) for problem in problems]
    result = rabo.solve(
        clients,
        rounds=30,
        alpha=0.3,
        outer_step="descent",
        num_inner_steps=3,
        hessian=hessian,
        hypergradient=rabo.ConjugateGradient(num_iterations=4),
        runtime=Liar(dict(enumerate(problems))),
        aggregate=Aggregate(kind, trim=0.2),
        tolerance=rabo.Tolerance(on_fault="drop"),
    )
    if kind == "mean":
        assert distance(problems, result.x) > 0.1
    else:
        assert distance(problems, result.x) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mode"}, "aggregate must be mean, median or trimmed"),
        ({"trim": 0.5}, r"trim must lie in \[0, 0.5\)"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Aggregate(**options)
