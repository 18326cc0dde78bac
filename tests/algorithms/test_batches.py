"""Which batches an algorithm's slopes are computed on: fresh ones, or the same at two points."""

import pytest
import torch

import rabo
from rabo.algorithms import ALGORITHMS, Cohort
from rabo.execution import InProcess

STEPS = 3


class Spy(InProcess):
    """Remembers, for every piece of work, the batches on which g and f were evaluated."""

    def __init__(self, problems, log):
        super().__init__(problems)
        self.log, self.seen = log, []

    def map(self, work, requests):
        for reply in super().map(work, requests):
            self.seen.append((work.name, list(self.log)))
            self.log.clear()
            yield reply

    def of(self, name, level):
        return [[i for lv, i in seen if lv == level] for work, seen in self.seen if work == name]


def play(name, **options):
    log = []

    def loss(level):
        def value(x, y, data):
            log.append((level, int(data)))
            return (y["y"] - x["x"]).square().sum() + (x["x"] + y["y"]).square().sum()

        return value

    def sample(data, generator):
        drawn = torch.randint(2**40, (2,), generator=generator)
        return rabo.Batch(drawn[0], drawn[0])

    problem = rabo.Problem(
        inner=loss("g"),
        outer=loss("f"),
        x={"x": torch.ones(3).double()},
        y={"y": torch.zeros(3).double()},
        sample=sample,
    ).on(inner=torch.zeros(1), outer=torch.zeros(1))
    algorithm = ALGORITHMS[name](beta=0.05, **options)
    spy = Spy({0: problem}, log)
    state = algorithm.init(problem)
    log.clear()
    algorithm.round(state, Cohort(problem.channels, {0: 1.0}), spy)
    return spy


@pytest.mark.parametrize("name", ["fednest", "aggitd"])
@pytest.mark.parametrize(("work", "level"), [("correct_inner", "g"), ("correct_outer", "f")])
def test_a_corrected_step_after_the_first_takes_both_slopes_on_one_batch_and_on_a_new_one(
    name, work, level
):
    spy = play(name, num_inner_steps=2, num_local_steps=STEPS)
    exchanges = spy.of(work, level)
    assert exchanges
    steps = []
    for batches in exchanges:
        assert len(batches) == 2 * (STEPS - 1)  # in the first step both slopes are the same
        assert batches[::2] == batches[1::2]  # at the start and here, on the same batch
        steps += batches[::2]
    assert len(set(steps)) == len(steps)  # fresh in every step of every exchange


@pytest.mark.parametrize("name", ["simfbo", "shrofbo", "fedbio"])
def test_every_local_step_on_x_y_and_v_has_a_batch_of_its_own(name):
    spy = play(name, num_local_steps=STEPS)
    (inner,), (outer,) = (spy.of("take_steps", level) for level in ("g", "f"))
    assert sorted(set(inner)) == sorted(set(outer))
    assert len(set(inner)) == STEPS


def test_accelerated_steps_take_both_directions_on_one_batch():
    spy = play("fedbioacc", num_local_steps=STEPS)
    (batches,) = spy.of("take_directed_steps", "f")
    assert batches[::2] == batches[1::2]
    assert len(set(batches)) == STEPS


def test_fedmbo_draws_afresh_in_every_exchange():
    spy = play("fedmbo", num_inner_steps=STEPS, num_terms=4, smoothness=8.0)
    inner = [i for batches in spy.of("inner_slope", "g") for i in batches]
    assert len(set(inner)) == STEPS
    used = [i for _, seen in spy.seen for _, i in seen]
    names = [work for work, _ in spy.seen]
    assert len(set(used)) >= len(names)  # no two exchanges share a batch


@pytest.mark.parametrize("name", ["rabo", "rafbo"])
def test_the_hypergradient_has_one_batch_that_no_inner_step_had(name):
    spy = play(name, num_inner_steps=STEPS)
    (inner,) = spy.of("update_inner", "g")
    assert len(set(inner)) == STEPS
    (products,), (slopes,) = (spy.of("estimate_outer", level) for level in ("g", "f"))
    assert len(set(products) | set(slopes)) == 1
    assert not set(products) & set(inner)
