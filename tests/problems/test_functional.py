"""Calling a module with given parameters, against torch's own way."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from rabo.problems.functional import call
from rabo.seeding import seeded_layers


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 3, batch_first=True)

    def forward(self, inputs):
        return self.cell(inputs.unsqueeze(0))[0]


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        return self.scale * inputs


MODULES = {
    "linear": lambda: nn.Linear(4, 2),
    "nested": lambda: nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 2))),
    "tied": Tied,
    "recurrent": Recurrent,
    "bare": Bare,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_it_computes_the_same_values_and_gradients_as_torch_and_leaves_the_module_as_it_was(name):
    torch.manual_seed(0)
    module, inputs = MODULES[name](), torch.randn(6, 4)
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    for _ in range(2):
        params = {n: torch.randn_like(p).requires_grad_() for n, (p, _) in before.items()}
        found = call(module, params, (inputs,))
        truth = functional_call(module, dict(params), (inputs,))
        assert torch.equal(found, truth)
        slopes = [torch.autograd.grad(v.square().sum(), params.values()) for v in (found, truth)]
        assert all(map(torch.equal, *slopes))
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    for key, (parameter, value) in before.items():
        assert after[key] is parameter
        assert torch.equal(parameter, value)


def test_a_module_that_fails_gets_its_parameters_back():
    module = nn.Linear(4, 2)
    weight = module.weight
    with pytest.raises(RuntimeError):
        call(module, {n: p.detach() for n, p in module.named_parameters()}, (torch.ones(3),))
    assert module.weight is weight


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_seeded_layers_draw_what_torch_draws_after_manual_seed_and_restore_the_generators(device):
    inputs, layer = torch.ones(1000, device=device), nn.Dropout(0.5)
    torch.manual_seed(5)
    truth = layer(inputs)
    torch.manual_seed(7)
    undisturbed = layer(inputs)
    torch.manual_seed(7)
    with seeded_layers(5, [inputs]):
        found = layer(inputs)
    assert torch.equal(found, truth)
    assert torch.equal(layer(inputs), undisturbed)
    assert not torch.equal(truth, undisturbed)
