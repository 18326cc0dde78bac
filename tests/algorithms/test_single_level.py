"""Single-level algorithms: masks by hand, steps against plain loops, gradients against formulas."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rabo
from rabo.algorithms import SINGLE_LEVEL, FedAvg, StructuredFIARSE
from rabo.algorithms.fiarse import gate
from rabo.execution import InProcess
from rabo.federation.solve import make_algorithm
from rabo.pruning.channels import declare
from rabo.pruning.policies import ChannelRegions, Full, Regions, Threshold, Whole
from rabo.pruning.policies.regions import deal
from rabo.pruning.submodel import ElementMask
from rabo.runs.experiment import Experiment
from rabo.seeding import stream

NAMES = [name for name in SINGLE_LEVEL if not name.startswith("dist-")]
X = {"w": torch.tensor([[1.0, -8.0], [4.0, 5.0], [-2.0, 7.0], [3.0, 6.0]]), "b": torch.zeros(2)}
Y = {"v": torch.zeros(3, 2)}
GROUPS = declare({"x.w": ("rows", None), "y.v": (None, "columns")}, X, Y)


def entries(policy, width, client=0, round=0, widths=None):
    whole = Whole(GROUPS, X, Y, widths or {})
    return policy(whole, width, client, round, torch.Generator())


def test_the_threshold_keeps_what_is_as_large_as_the_kth_weight():
    parts = entries(Threshold(), 0.5)  # a quarter of eight weights: |w| >= 7
    assert parts.x.held()["w"].tolist() == [[0, 1], [0, 0], [0, 1], [0, 0]]
    assert parts.x.held()["b"].tolist() == [1, 1]
    assert parts.y.held()["v"].all()  # zeros tie, and all that tie are kept


def test_regions_are_ranks_and_the_top_one_is_always_kept():
    """Ranks of |w|: 8 7 | 6 5 | 4 3 | 2 1."""
    kept = {
        (client, round): entries(Regions(), 0.5**0.5, client, round, dict.fromkeys(range(3), 0.71))
        for client in range(3)
        for round in range(2)
    }  # half of the entries: the top region and one more, dealt in turn
    second, third, fourth = ([[0, 0], [0, 1], [0, 0], [0, 1]], [[0, 0], [1, 0], [0, 0], [1, 0]],
                             [[1, 0], [0, 0], [1, 0], [0, 0]])  # fmt: skip
    top = torch.tensor([[0, 1], [0, 0], [0, 1], [0, 0]])
    for (client, round), parts in kept.items():
        other = (second, third, fourth)[(client + round) % 3]
        assert torch.equal(parts.x.held()["w"], (top + torch.tensor(other)).int())


def test_a_client_without_room_for_a_region_keeps_the_best_of_the_top_one():
    parts = entries(Regions(), 0.36)  # an eighth of eight weights
    assert parts.x.held()["w"].nonzero().tolist() == [[0, 1]]


def test_regions_of_channels_keep_whole_channels_in_order_of_importance():
    """Squared norms of the rows: 65, 41, 53, 45; of the columns: none."""
    widths = {0: 0.5, 1: 0.5, 2: 0.5}
    kept = [entries(ChannelRegions(), 0.5, i, 0, widths).kept["rows"].tolist() for i in range(3)]
    assert kept == [[0, 2], [0, 3], [0, 1]]
    assert entries(ChannelRegions(), 0.1).kept["rows"].tolist() == [0]


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8),
    st.integers(0, 20),
    st.integers(1, 5),
)
def test_every_region_is_covered_whenever_the_capacities_allow(fractions, round, num_regions):
    clients = {3 * i + 1: f for i, f in enumerate(fractions)}
    room = [int(f * num_regions + 1e-9) for f in fractions]
    dealt = [deal(clients, i, round, num_regions) for i in clients]
    for regions, fits in zip(dealt, room, strict=True):
        assert len(regions) == len(set(regions)) == (fits if num_regions > 1 else 0)
    allow = max(room) >= 1 and sum(max(0, r - 1) for r in room) >= num_regions - 1
    if allow and num_regions > 1:
        assert set().union(*dealt) == set(range(num_regions))


@given(st.lists(st.sampled_from([1.0, 0.9, 0.75, 0.5, 0.25]), min_size=4, max_size=6))
def test_oap_covers_every_channel_whenever_the_capacities_allow(widths):
    x = {"w": torch.randn(9, 5, generator=stream(0))}
    whole = Whole(declare({"x.w": ("rows", "columns")}, x, {}), x, {}, dict(enumerate(widths)))
    covered = set()
    for client, width in enumerate(widths):
        kept = ChannelRegions()(whole, width, client, 2, torch.Generator()).kept["rows"]
        covered |= set(kept.tolist())
        assert len(kept) <= -(-9 * width // 1) + 2  # regions of nine rows hold two or three
    if sum(int(4 * w) - 1 for w in widths) >= 3:
        assert covered == set(range(9))


def test_the_gradient_of_a_gated_weight_has_the_factor_of_fiarse():
    w = torch.tensor([0.2, -0.5, 0.5, -3.0, 0.0], dtype=torch.float64, requires_grad=True)
    theta, slope = torch.tensor(0.5).double(), torch.tensor([1.0, 2, 3, 4, 5]).double()
    masked = w * gate(w.abs(), theta)
    kept = torch.tensor([0.0, 1, 1, 1, 0]).double()
    assert torch.equal(masked, w * kept)
    (found,) = torch.autograd.grad(masked, w, slope)
    size = w.detach().abs()
    factor = 1 + 2 * theta * size / (size + theta) ** 2
    torch.testing.assert_close(found, slope * factor * kept)


def linear_problem(copies=1, dtype=torch.float64):
    """A backbone and a head in float64, with data that clients do not share."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(dtype)
        y = nn.Linear(8, 3).to(dtype)

    def loss(z, y, data):
        logits = y(z) if copies == 1 else y(z.expand(copies, *z.shape)).mean(dim=0)
        return F.cross_entropy(logits, data[1])

    return rabo.Problem(
        inner=loss,
        outer=loss,
        features=lambda x, data: x(data[0]),
        x=x,
        y=y,
        example=torch.randn(6, 4, dtype=dtype),
        copies=copies,
    )


def clients_of(problem, capacities):
    clients = []
    for i, capacity in enumerate(capacities):
        g = stream(7, i)
        parts = [
            (torch.randn(6, 4, generator=g).double(), torch.randint(3, (6,), generator=g))
            for _ in range(2)
        ]
        clients.append(rabo.Client(problem.on(inner=parts[0], outer=parts[1]), capacity))
    return clients


def run(name, capacities=(1.0, 0.5, 0.5), rounds=3, runtime=None, **options):
    options = {"levels": "both", "beta": 0.1, "momentum": 0.9, "num_inner_steps": 4, **options}
    clients = clients_of(linear_problem(options.pop("copies", 1)), capacities)
    problems = {i: c.problem for i, c in enumerate(clients)}
    return rabo.solve(
        clients,
        algorithm=name,
        rounds=rounds,
        runtime=runtime and runtime(problems),
        **options,
    )


@pytest.mark.parametrize("beta_x", [None, 0.02])
def test_joint_steps_are_those_of_sgd_on_the_mean_of_both_losses(beta_x):
    problem = linear_problem()
    clients = clients_of(problem, [1.0, 1.0])
    ends = []
    for client in clients:
        model, num_x = nn.Sequential(problem.x, problem.y), len(list(problem.x.parameters()))
        weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
        names = [n for n, _ in model.named_parameters()]
        of_x, of_y = weights[:num_x], weights[num_x:]
        groups = [{"params": of_x, "lr": beta_x or 0.1}, {"params": of_y, "lr": 0.1}]
        sgd = torch.optim.SGD(groups, momentum=0.9)
        images, labels = (torch.cat(p) for p in zip(*client.problem.data, strict=True))
        for _ in range(4):
            sgd.zero_grad()
            logits = torch.func.functional_call(
                model, dict(zip(names, weights, strict=True)), images
            )
            F.cross_entropy(logits, labels).backward()
            sgd.step()
        ends.append(weights)
    result = run("fedavg", [1.0, 1.0], rounds=1, beta_x=beta_x)
    found = [*result.x.values(), *result.y.values()]
    for value, *own in zip(found, *ends, strict=True):
        torch.testing.assert_close(value, torch.stack(own).mean(dim=0).detach())


def test_fiarse_on_a_client_is_sgd_through_the_mask_with_its_factor():
    """θ of the round's start, the mask and the factor anew at every step, biases whole."""
    clients = clients_of(linear_problem(), [0.5])
    result = run("fiarse", [0.5], rounds=1, num_inner_steps=6, momentum=0.0, beta=2.0)
    x, y = clients[0].problem.start()
    start = {**{f"x{k}": v for k, v in x.items()}, **{f"y{k}": v for k, v in y.items()}}
    theta = {}
    for level in "xy":
        sizes = torch.cat(
            [v.abs().flatten() for k, v in start.items() if k[0] == level and v.dim() > 1]
        )
        theta[level] = sizes.sort(descending=True).values[round(len(sizes) / 4) - 1]
    weights = {
        k: v * (v.abs() >= theta[k[0]]) if v.dim() > 1 else v.clone() for k, v in start.items()
    }
    held, dropped = {k: v != 0 for k, v in weights.items()}, 0
    (a, la), (b, lb) = clients[0].problem.data
    for _ in range(6):
        kept = {k: v.abs() >= theta[k[0]] if v.dim() > 1 else v == v for k, v in weights.items()}
        dropped += sum(
            int((h & ~n).sum()) for h, n in zip(held.values(), kept.values(), strict=True)
        )
        seen = {k: (v * kept[k]).requires_grad_() for k, v in weights.items()}
        z = [
            torch.tanh(F.linear(torch.tanh(F.linear(i, seen["x0.weight"], seen["x0.bias"])),
                                seen["x2.weight"], seen["x2.bias"])) for i in (a, b)
        ]  # fmt: skip
        logits = [F.linear(t, seen["yweight"], seen["ybias"]) for t in z]
        loss = (F.cross_entropy(logits[0], la) + F.cross_entropy(logits[1], lb)) / 2
        slopes = dict(zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True))
        for k, v in weights.items():
            factor = kept[k].double()
            if v.dim() > 1:
                t = theta[k[0]]
                factor = factor * (1 + 2 * t * v.abs() / (v.abs() + t) ** 2)
            weights[k] = v - 2.0 * slopes[k] * factor
    assert dropped  # the mask was re-evaluated to an effect
    for k, v in start.items():
        truth = torch.where(held[k], weights[k], v) if v.dim() > 1 else weights[k]
        torch.testing.assert_close((result.x if k[0] == "x" else result.y)[k[1:]], truth)


def test_structured_fiarse_differentiates_the_norm_of_a_channel():
    """d/dw of w·m(‖w‖) for a unit: slope + ⟨slope, w⟩·2θ/(s + θ)²·w/s."""
    problem = linear_problem()
    client = clients_of(problem, [0.5])[0].problem
    x, y = client.start()
    cut = rabo.Importance()(Whole(client.channels, x, y), 0.5, 0, 0, torch.Generator())
    small = client.restrict(cut)
    request = rabo.execution.Request(0, 0, 0, cut, {"x": cut.x.extract(x), "y": cut.y.extract(y)})
    algorithm = StructuredFIARSE(levels="both", beta=0.1)
    mask = algorithm.masking(request, rabo.execution.ClientContext(0, small))
    weights = {
        n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in request.arrays.items()
    }
    masked = mask(weights)
    flat = {f"{n}.{k}": v for n, p in weights.items() for k, v in p.items()}
    for n, p in masked.items():
        for k, v in p.items():
            assert torch.equal(v, weights[n][k])  # at the start nothing falls below θ
    slopes = {k: torch.randn(v.shape, generator=stream(k)).double() for k, v in flat.items()}
    loss = sum((masked[k[0]][k[2:]] * s).sum() for k, s in slopes.items())
    found = dict(zip(flat, torch.autograd.grad(loss, list(flat.values())), strict=True))
    axes = {"x.0.weight": [(0, 0)], "x.0.bias": [(0, 0)], "x.2.weight": [(0, 1), (1, 0)],
            "x.2.bias": [(0, 1)], "y.weight": [(1, 1)]}  # fmt: skip
    truth = {k: v.clone() for k, v in slopes.items()}
    for group in (0, 1):  # the hidden layer and the features, four units kept of each
        places = [(k, d) for k, dims in axes.items() for d, g in dims if g == group]
        units = [[flat[k].detach().select(d, u) for k, d in places] for u in range(4)]
        norms = torch.stack([sum(t.square().sum() for t in unit) for unit in units]).sqrt()
        theta = norms.min()
        for u, s in enumerate(norms):
            along = sum(
                (slopes[k].select(d, u) * flat[k].detach().select(d, u)).sum() for k, d in places
            )
            for k, d in places:
                w = flat[k].detach().select(d, u)
                truth[k].select(d, u).add_(along * 2 * theta / (s + theta) ** 2 * w / s)
    for k, v in truth.items():
        torch.testing.assert_close(found[k], v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("copies", [1, 2])
def test_capacity_1_equals_the_full_model(name, copies):
    a = run(name, [1.0] * 3, copies=copies)
    b = run(name, [1.0] * 3, copies=copies, policy=Full())
    for level in ("x", "y"):
        for key, value in getattr(a, level).items():
            assert torch.equal(value, getattr(b, level)[key])


class Deserted(InProcess):
    """Client 2 is asked first and never answers."""

    def map(self, work, requests):
        found = [r for one in [*requests][::-1] for r in super(Deserted, self).map(work, [one])]
        yield from (reply for reply in found[::-1] if reply.client != 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_client_changes_what_is_sent_and_nothing_else(name):
    """As if it were not there, where its width does not decide what others hold."""
    all_three, two = run(name, runtime=Deserted), run(name, (1.0, 0.5))
    for key, value in all_three.x.items():
        assert torch.equal(value, two.x[key]) or name.startswith("oap")
    again = run(name, runtime=Deserted)
    assert all(torch.equal(v, again.x[k]) for k, v in all_three.x.items())
    assert all_three.coverage["x_trained"] == 1.0  # by the client of full width


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_its_state(name):
    clients = clients_of(linear_problem(), [1.0, 0.5])
    algorithm = make_algorithm(name, levels="both", beta=0.1, num_inner_steps=2)
    whole, halves = rabo.Federation(clients, algorithm), rabo.Federation(clients, algorithm)
    list(whole.run(3))
    list(halves.run(2))
    rest = rabo.Federation(clients, algorithm)
    rest.state = replace(halves.state)
    list(rest.run(1))
    assert all(torch.equal(v, whole.state.x[k]) for k, v in rest.state.x.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_round_is_one_exchange_and_travels_what_is_held(name):
    result = run(name, (0.5,), rounds=1)
    entries = result.history[0].entries
    assert len(entries) == 1
    if name in ("fiarse", "oap"):  # a quarter of the weights, all biases
        clients = clients_of(linear_problem(), [0.5])
        x, y = clients[0].problem.start()
        weights = [sum(v.numel() for v in p.values() if v.dim() > 1) for p in (x, y)]
        loose = sum(v.numel() for p in (x, y) for v in p.values() if v.dim() == 1)
        assert entries[0].cost.bytes_up == 8 * (sum(n // 4 for n in weights) + loose)
        assert result.relative_cost["multiply_adds"] == pytest.approx(1)
    elif name == "fedavg":  # published for the full model
        assert result.relative_cost["multiply_adds"] == pytest.approx(1)
    else:
        assert result.relative_cost["multiply_adds"] < 0.6


def test_single_entries_of_a_quadratic_are_trained_alone():
    """Local steps on the masked problem: entries that a client does not hold are zero to it."""
    from rabo.tasks.quadratic import random_quadratic

    problem = random_quadratic(stream(0), 4, 4).client(stream(1))
    x, y = problem.start()
    y = {"y": torch.tensor([4.0, 3.0, 2.0, 1.0]).double()}
    cut = Threshold()(Whole(problem.channels, x, y), 0.5**0.5, 0, 0, torch.Generator())
    assert isinstance(cut.y, ElementMask)
    here = {"y": y["y"].clone().requires_grad_()}
    loss = problem.restrict(cut).inner(cut.x.extract(x), here, None)
    (slope,) = torch.autograd.grad(loss, here["y"])
    m, held = problem.coefficients, torch.tensor([1.0, 1, 0, 0]).double()
    truth = held * (m.H @ (held * y["y"]) - m.B @ x["x"] - m.c)
    torch.testing.assert_close(slope, truth)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": "x"}, "levels must be both or y"),
        ({"levels": "both", "beta": 0.1, "beta_x": 0.0}, "beta_x must be a positive number"),
        ({"levels": "y", "beta": 0.1, "beta_x": 0.1}, "got 0.1 where y is trained alone"),
        ({"clip_gradients": 0.0}, "clip_gradients must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"mask_logits": "all"}, "mask_logits must be none, zero or exclude"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedAvg(**options)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fedavg"])
def test_an_algorithm_that_is_its_masks_refuses_others(name):
    with pytest.raises(ValueError, match="fedavg takes any policy"):
        make_algorithm(name, policy="random")


@pytest.mark.parametrize("policy", [Regions, ChannelRegions])
def test_there_must_be_a_region(policy):
    with pytest.raises(ValueError, match="num_regions must be at least 1, got 0"):
        policy(num_regions=0)


@pytest.mark.parametrize("name", NAMES)
def test_an_untuned_network_learns_on_unequal_clients(name):
    """Digits: ten classes, of which guessing finds a tenth."""
    federation, setup = Experiment(
        task="digits", algorithm=name, clients=3, capacities="1,1/2,1/2", rounds=2
    ).federation()
    accuracies = [done.metrics["accuracy"] for done in federation.run(2)]
    assert accuracies[-1] > 0.6
    assert setup.clients[1].capacity == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_untuned_loss_trains_y_alone(name):
    federation, setup = Experiment(
        task="loss-tuning", algorithm=name, clients=2, capacities="1,1/2", rounds=3
    ).federation()
    start, problem = federation.state, setup.clients[0].problem
    batch = problem.batch(stream(0))
    list(federation.run(3))
    before, after = (float(problem.inner(s.x, s.y, batch[0])) for s in (start, federation.state))
    assert after < 0.8 * before
    assert all(torch.equal(v, start.x[k]) for k, v in federation.state.x.items())


@pytest.mark.parametrize("name", NAMES)
def test_y_of_a_quadratic_comes_nearer_to_its_solution_on_unequal_clients(name):
    federation, _ = Experiment(
        task="quadratic",
        algorithm=name,
        algorithm_options={"num_inner_steps": 3},
        clients=3,
        capacities="1,1,3/4",
    ).federation()
    distances = [done.metrics["inner_distance"] for done in federation.run(8)]
    assert distances[-1] < 0.6 * distances[0]
