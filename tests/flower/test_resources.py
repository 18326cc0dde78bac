"""What a node says it has becomes the width it asks for, and nothing else leaves it."""

import psutil
import pytest
from flwr.app import RecordDict

import rabo
from rabo.exchange.budgets import WIDTHS, Absent, Budget
from rabo.federation.federation import Federation
from rabo.flower import resources
from rabo.flower.resources import ask_width
from rabo.flower.runtime import width_records
from rabo.tasks import TASKS

ALGORITHM = rabo.RABO(num_inner_steps=2, beta=0.1)


@pytest.fixture(scope="module")
def problem():
    return TASKS["digits"](width=16).build([1.0] * 2, 2, 0, "cpu").clients[0].problem


@pytest.fixture(scope="module")
def measured(problem):
    """What a round costs at each width."""
    federation = Federation([rabo.Client(problem)], ALGORITHM)
    return {width: federation.cost_at(0, width) for width in WIDTHS}


def ask(node, problem, otherwise=0.75, kept=None):
    kept = RecordDict() if kept is None else kept
    return ask_width(node, otherwise, problem, ALGORITHM, kept)


def test_a_capacity_is_a_width_and_without_any_it_is_the_run_that_says(problem):
    assert ask({"capacity": 0.5}, problem) == 0.5
    assert ask({"capacity": "1/4"}, problem) == 0.25
    assert ask({"partition-id": 0}, problem) == 0.75
    with pytest.raises(ValueError, match="capacity must lie"):
        ask({"capacity": 2}, problem)


@pytest.mark.parametrize("name", ["memory", "multiply-adds", "traffic"])
def test_a_budget_gives_the_widest_submodel_that_fits_it(problem, measured, name):
    spent = {
        "memory": lambda c: c.peak_memory_bytes,
        "multiply-adds": lambda c: c.multiply_adds,
        "traffic": lambda c: c.bytes_up + c.bytes_down,
    }[name]
    costs = {width: spent(cost) for width, cost in measured.items()}
    for limit in (costs[0.5], costs[0.25], costs[1.0]):
        expected = max(width for width, cost in costs.items() if cost <= limit)
        assert ask({name: str(limit)}, problem) == expected
        own = Budget(**{name.replace("-", "_"): limit})
        assert ask({}, problem, otherwise=own) == expected
        assert ask({name: limit, "capacity": 0.125}, problem) == min(expected, 0.125)
    assert isinstance(ask({name: 1}, problem), Absent)


def test_costs_are_measured_once_and_kept_on_the_node(problem, monkeypatch):
    kept = RecordDict()
    width = ask({"memory": "100kB"}, problem, kept=kept)
    monkeypatch.setattr(Federation, "cost_at", None)  # may not be asked again
    assert ask({"memory": "100kB"}, problem, kept=kept) == width


def test_auto_follows_the_free_memory_and_the_speed_of_the_machine(problem, monkeypatch):
    federation, kept = Federation([rabo.Client(problem)], ALGORITHM), RecordDict()
    half, full = (federation.cost_at(0, width) for width in (0.5, 1.0))
    free, fast = [2 * full.peak_memory_bytes], [1e12]
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: type("Memory", (), {"available": free[0]})
    )
    monkeypatch.setattr(resources, "speed", lambda: fast[0])
    assert ask({"capacity": "auto"}, problem, kept=kept) == 1.0
    free[0] = 2 * half.peak_memory_bytes  # another program has taken memory
    narrow = ask({"capacity": "auto"}, problem, kept=kept)
    assert 0.5 <= narrow < 1.0
    free[0] = 10**12
    fast[0] = half.multiply_adds / (resources.EFFICIENCY * 2)
    assert 0.5 <= ask({"capacity": "auto", "seconds": 2}, problem, kept=kept) < 1.0
    assert ask({"capacity": "auto", "memory": 1}, problem, kept=kept) != 1.0


def test_the_speed_of_this_machine_can_be_measured():
    assert resources.speed() > 1e6


def test_the_server_learns_the_width_alone():
    answer = width_records(3, 0.5).config_records["width"]
    assert dict(answer) == {"client": 3, "width": 0.5}
