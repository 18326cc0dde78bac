import pytest
import torch

import rabo
from rabo.pruning.channels import declare
from rabo.pruning.policies import POLICIES, Whole
from rabo.pruning.policies.policy import num_kept

X = {"w": torch.tensor([[1.0, 1], [4, 4], [2, 2], [3, 3]])}
Y = {"v": torch.tensor([[1.0, 5.0]])}


@pytest.fixture
def whole():
    return Whole(declare({"x.w": ("rows", "join"), "y.v": (None, "join")}, X, Y), X, Y)


def rows(policy, whole, width=0.5, client=0, round=0):
    generator = torch.Generator().manual_seed(client)
    return policy(whole, width, client, round, generator).kept["rows"].tolist()


def test_importance_keeps_the_units_with_the_largest_weights(whole):
    assert rows(rabo.Importance(), whole) == [1, 3]
    assert rows(rabo.Importance(), whole, 0.25) == [1]


def test_importance_sums_over_all_tensors_that_share_a_unit(whole):
    kept = rabo.Importance()(whole, 0.5, 0, 0, torch.Generator()).kept
    assert kept["join"].tolist() == [1]  # equal in x, larger in y


def test_static_keeps_the_first_units(whole):
    assert [rows(rabo.Static(), whole, round=q) for q in (0, 7)] == [[0, 1], [0, 1]]


def test_rolling_moves_by_one_unit_a_round(whole):
    assert [rows(rabo.Rolling(), whole, round=q) for q in range(4)] == [
        [0, 1],
        [1, 2],
        [2, 3],
        [0, 3],
    ]


def test_random_differs_between_clients_and_repeats_for_a_stream(whole):
    drawn = [tuple(rows(rabo.Random(), whole, client=i)) for i in range(12)]
    assert len(set(drawn)) > 1
    assert drawn == [tuple(rows(rabo.Random(), whole, client=i)) for i in range(12)]


def test_full_keeps_everything_whatever_the_capacity(whole):
    assert rows(rabo.Full(), whole, 0.25) == [0, 1, 2, 3]


def test_segments_partition_the_importance_order(whole):
    policy = rabo.Segments(num_segments=2)
    assert [rows(policy, whole, client=i) for i in (0, 1, 2)] == [[1, 3], [0, 2], [1, 3]]
    named = rabo.Segments(num_segments=2, assignment={0: 1})
    assert rows(named, whole, client=0) == [0, 2]
    listed = rabo.Segments(num_segments=2, assignment=[1, 1])
    assert [rows(listed, whole, client=i) for i in (0, 1, 2)] == [[0, 2], [0, 2], [1, 3]]


def test_segments_refuse_what_cannot_be_divided(whole):
    with pytest.raises(ValueError, match="must have at least 4 units"):
        rows(rabo.Segments(num_segments=4), whole)
    with pytest.raises(ValueError, match=r"must lie in 0\.\.3"):
        rabo.Segments(assignment={0: 4})
    with pytest.raises(ValueError, match=r"client 1 must lie in 0\.\.3"):
        rabo.Segments(assignment=[0, 4])
    with pytest.raises(ValueError, match="num_segments"):
        rabo.Segments(num_segments=0)


def test_magnitude_keeps_the_largest_entries_one_by_one(whole):
    parts = rabo.Magnitude()(whole, 0.5, 0, 0, torch.Generator())
    assert parts.x.num_entries() == 2  # a quarter of eight
    assert parts.x.extract(X)["w"].nonzero()[:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_at_least_one_unit_of_each_group(name):
    x = {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}
    whole = Whole(declare({"x.w": ("rows", "columns")}, x, {}), x, {})
    parts = POLICIES[name]()(whole, 1 / 16, 3, 5, torch.Generator().manual_seed(0))
    assert parts.x.num_entries() >= 1
    assert all(len(units) for units in parts.kept.values())


@pytest.mark.parametrize(
    ("width", "units", "kept"),
    [(1 / 3, 3, 1), (0.5, 5, 3), (1 / 16, 64, 4), (1e-9, 7, 1)],
)
def test_the_number_of_kept_units_is_the_ceiling(width, units, kept):
    assert num_kept(width, units) == kept


def test_clients_of_different_segments_set_the_coverage_by_hand():
    """C*_x = 2 with eight clients on four segments, 1 with four (the paper's figure 3)."""
    from rabo.seeding import stream
    from rabo.tasks.quadratic import random_quadratic

    family = random_quadratic(stream(0), 8, 8)
    for clients, expected in ((8, 2), (4, 1)):
        problems = [family.client(stream(1, i)) for i in range(clients)]
        policy = rabo.Segments(num_segments=4)
        result = rabo.solve([rabo.Client(p, 1 / 4) for p in problems], rounds=3, policy=policy)
        assert result.coverage["x_min"] == result.coverage["y_min"] == expected
        assert result.coverage["x_trained"] == 1.0
