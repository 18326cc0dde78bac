"""Parameters and submodules of a module in a loss, as attributes."""

import pytest
import torch
from torch import nn

import rabo
from rabo.problems.bound import Bound
from rabo.tree import leaves


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, z):
        return self.head(self.body(z)) * self.scale

    def encode(self, z):
        return self.body(z)


def bound(copies=1):
    net = Net().double()
    lead = (copies,) if copies > 1 else ()
    params = {n: torch.randn(*lead, *p.shape).double() for n, p in net.named_parameters()}
    return net, params, Bound(net, params, copies)


@pytest.mark.parametrize("copies", [1, 3])
def test_attributes_are_the_given_parameters(copies):
    _, params, y = bound(copies)
    assert y.scale is params["scale"]
    assert y.head.weight is params["head.weight"]
    assert list(y.named_parameters()) == list(params.items())
    assert all(a is b for a, b in zip(y.parameters(), params.values(), strict=True))
    assert list(y.head) == ["weight", "bias"]


@pytest.mark.parametrize("copies", [1, 3])
def test_submodules_are_called_with_the_given_parameters(copies):
    _, params, y = bound(copies)
    lead = (copies,) if copies > 1 else ()
    z = torch.randn(*lead, 4, 3).double()
    torch.testing.assert_close(y.head(y.body(z)) * y.scale.unsqueeze(-2), y(z))
    weight, bias = params["body.0.weight"], params["body.0.bias"]
    truth = torch.tanh(z @ weight.mT + bias.unsqueeze(-2))
    torch.testing.assert_close(y.body(z), truth)


def test_the_mode_is_that_of_the_module():
    net, _, y = bound()
    assert y.training
    net.eval()
    assert not y.training
    assert not y.head.training


@pytest.mark.parametrize("name", ["encode", "wieght", "state_dict"])
def test_anything_else_is_refused_with_the_names_there_are(name):
    """A method of the module would compute with the module's own parameters."""
    y = bound()[2]
    with pytest.raises(AttributeError, match=rf"'{name}'.*head\.weight.*head\(\.\.\.\)"):
        getattr(y, name)
    assert not hasattr(y, name)


@pytest.mark.parametrize("capacity", [1.0, 0.5])
def test_a_penalty_on_parameters_is_that_on_values(capacity):
    """Also of narrowed modules, whose own parameters hold no memory."""

    def solved(penalty):
        torch.manual_seed(0)
        x, y = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 2)
        data = torch.randn(8, 3), torch.randn(8, 2)

        def loss(x, y, data):
            return (y(x(data[0])) - data[1]).square().mean() + 0.1 * penalty(x, y)

        problem = rabo.Problem(inner=loss, outer=loss, x=x, y=y, example=data[0])
        client = rabo.Client(problem.on(inner=data, outer=data), capacity)
        return rabo.solve([client], rounds=2)

    by_value = solved(lambda x, y: y["weight"].norm() + sum(w.norm() for w in x.values()))
    by_name = solved(lambda x, y: y.weight.norm() + sum(w.norm() for w in x.parameters()))
    for a, b in zip(leaves((by_value.x, by_value.y)), leaves((by_name.x, by_name.y)), strict=True):
        assert torch.equal(a, b)
