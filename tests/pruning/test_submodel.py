import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rabo.exchange.covering import CoveredMean
from rabo.pruning.channels import declare
from rabo.pruning.submodel import ElementMask, cut

X = {"w": torch.arange(24.0).reshape(4, 3, 2), "b": torch.arange(4.0)}
Y = {"v": torch.arange(15.0).reshape(5, 3)}
AXES = {"x.w": ("out", "in", None), "x.b": ("out",), "y.v": (None, "in")}


def channels():
    return declare(AXES, X, Y)


def dense_mask(kept):
    rows = torch.zeros(4).index_fill(0, kept["out"], 1)
    columns = torch.zeros(3).index_fill(0, kept["in"], 1)
    return {"w": (rows[:, None] * columns)[:, :, None].expand(4, 3, 2), "b": rows}


kept_units = st.fixed_dictionaries(
    {
        "out": st.sets(st.integers(0, 3), min_size=1),
        "in": st.sets(st.integers(0, 2), min_size=1),
    }
).map(lambda d: {k: torch.tensor(sorted(v)) for k, v in d.items()})


@given(kept_units)
def test_extract_then_expand_is_the_masked_tensor(kept):
    parts = cut(channels(), kept)
    expanded = parts.x.expand(parts.x.extract(X))
    for name, mask in dense_mask(kept).items():
        assert torch.equal(expanded[name], X[name] * mask)
    assert parts.x.extract(X)["w"].shape == (len(kept["out"]), len(kept["in"]), 2)


@given(kept_units)
def test_a_submodel_counts_what_it_holds(kept):
    parts = cut(channels(), kept)
    held = dense_mask(kept)
    assert parts.x.num_entries() == sum(int(mask.sum()) for mask in held.values())
    for name, mask in held.items():
        assert torch.equal(parts.x.held()[name].expand_as(mask).float(), mask)


@given(st.lists(kept_units, min_size=1, max_size=4))
def test_the_covered_mean_is_the_mean_over_the_clients_that_hold_an_entry(clients):
    mean = CoveredMean(X)
    total = {k: torch.zeros_like(v) for k, v in X.items()}
    count = {k: torch.zeros_like(v) for k, v in X.items()}
    for i, kept in enumerate(clients):
        part = cut(channels(), kept).x
        mean.add(part, {k: v + i for k, v in part.extract(X).items()})
        for name, mask in dense_mask(kept).items():
            total[name] += mask * (X[name] + i)
            count[name] += mask
    stepped = mean.step(X, 0.5)
    for name in X:
        truth = total[name] / count[name].clamp(min=1)
        torch.testing.assert_close(mean.mean()[name], truth)
        untouched = count[name] == 0
        assert torch.equal(stepped[name][untouched], X[name][untouched])  # bit for bit


def test_gradients_flow_through_expand_to_the_part_alone():
    part = cut(channels(), {"out": torch.tensor([1, 3]), "in": torch.tensor([0])}).x
    small = {k: v.requires_grad_() for k, v in part.extract(X).items()}
    loss = sum((v**3).sum() for v in part.expand(small).values())
    slopes = torch.autograd.grad(loss, list(small.values()), create_graph=True)
    for slope, value in zip(slopes, small.values(), strict=True):
        torch.testing.assert_close(slope, 3 * value**2)
    (second,) = torch.autograd.grad(slopes[0].sum(), small["w"])
    torch.testing.assert_close(second, 6 * small["w"])


def test_a_middle_dimension_left_whole_keeps_its_place():
    full = {"t": torch.arange(24.0).reshape(2, 3, 4)}
    part = cut(
        declare({"x.t": ("a", None, "c")}, full, {}),
        {"a": torch.tensor([1]), "c": torch.tensor([0, 2])},
    ).x
    assert torch.equal(part.extract(full)["t"], full["t"][[1]][:, :, [0, 2]])
    total = torch.zeros(24)
    total[part.positions] = part.flatten(part.extract(full))
    assert torch.equal(total.reshape(2, 3, 4), part.expand(part.extract(full))["t"])


def test_an_element_mask_holds_single_entries():
    mask = ElementMask({"w": X["w"] % 2 == 0, "b": torch.ones(4, dtype=torch.bool)})
    assert mask.num_entries() == 12 + 4
    assert mask.index_bytes() == 3 + 1
    mean = CoveredMean(X)
    mean.add(mask, X)
    assert torch.equal(mean.mean()["w"], X["w"] * (X["w"] % 2 == 0))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"x.nope": ("a",)}, "must name parameters"),
        ({"x.w": ("a",)}, "must have 3 labels"),
        ({"x.b": "a"}, "must be a list of labels"),
        ({"x.w": ("a", None, None), "x.b": ("a",), "y.v": ("a", None)}, "must have one size"),
    ],
)
def test_wrong_axes_say_what_must_hold(axes, message):
    with pytest.raises(ValueError, match=message):
        declare(axes, X, Y)


def test_cutting_only_x_keeps_groups_that_join_x_and_y_whole():
    only_x = channels().restricted_to("x")
    assert dict(only_x.units) == {"out": 4}
    assert "joins" in only_x.whole["in"]
    part = cut(only_x, {"out": torch.tensor([2])})
    assert part.x.extract(X)["w"].shape == (1, 3, 2)
    assert part.y.extract(Y)["v"].shape == (5, 3)
