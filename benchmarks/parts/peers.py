"""Other libraries' hypergradients of the same problem at the same point, where they are installed.

Each gets the plain losses and ten iterations, through the function of the library that computes the
hypergradient, without the loop around it: what is timed is what is compared.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import grad

from benchmarks.parts.problems import Case

NUM_ITERATIONS = 10
Work = Callable[[], Sequence[Tensor]]


class Peer(NamedTuple):
    """A library: its name on the package index, what it computes, and how it is asked to."""

    package: str
    method: str
    prepare: Callable[[Case], Work]

    @property
    def version(self) -> str | None:
        """The version that is installed; None: it is not."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def torchopt(case: Case) -> Work:
    """Differentiate a root of ∇_y g that is given: implicit, by the library's own CG."""
    implicit = import_module("torchopt.diff.implicit")
    solver = import_module("torchopt.linear_solve").solve_cg(maxiter=NUM_ITERATIONS, rtol=0.0)

    def optimality(y: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda y: case.inner(x, y))(y)

    @implicit.custom_root(optimality, argnums=1, solve=solver)
    def solution(y: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return y

    def work() -> Sequence[Tensor]:
        x, y = fresh(case)
        return grad(case.outer(x, solution(tuple(y), tuple(x))), x)

    return work


def betty(case: Case) -> Work:
    """Ask for the path upper, lower, upper, as its engine does.

    Since 0.2 it can also synchronise gradients between processes, which is not wanted here.
    """
    get_grads = import_module("betty.hypergradient").get_grads
    options = {"do_sync": False} if "do_sync" in signature(get_grads).parameters else {}
    config = import_module("betty.configs").Config(type="cg", cg_iterations=NUM_ITERATIONS)

    def work() -> Sequence[Tensor]:
        x, y = fresh(case)
        lower = SimpleNamespace(
            paths=[],
            config=config,
            cur_batch=None,
            training_step_exec=lambda _: case.inner(x, y),
            parameters=lambda: y,
            trainable_parameters=lambda: y,
            meta_trainable_parameters=lambda: y,
        )
        upper = SimpleNamespace(_strategy="default", trainable_parameters=lambda: x)
        loss = case.outer(x, y)
        indirect = get_grads(loss, [upper, lower, upper], retain_graph=True, **options)
        direct = grad(loss, x, allow_unused=True, materialize_grads=True)
        return [a + b for a, b in zip(direct, indirect, strict=True)]

    return work


def boat(case: Case) -> Work:
    """Call its operator CG; it works on I − ηH, here with η = 1/l_{g,1}."""
    operator = import_module("boat_torch.na_ol").CG

    def work() -> Sequence[Tensor]:
        x, y = fresh(case)
        solver = operator(
            ll_objective=lambda *_, **__: case.inner(x, y),
            ul_objective=lambda *_, **__: case.outer(x, y),
            ll_model=None,
            ul_model=None,
            ll_var=y,
            ul_var=x,
            solver_config={
                "gm_op": ["NGD"],
                "lower_level_opt": torch.optim.SGD(y, lr=case.step),
                "CG": {"tolerance": 0.0, "k": NUM_ITERATIONS},
                "GDA": {"alpha_init": 0.0, "alpha_decay": 0.0},
            },
        )
        solver.compute_gradients({}, {}, nn.Identity(), lower_model_params=y, hparams=x)
        return [t.grad for t in x if t.grad is not None]

    return work


def higher(case: Case) -> Work:
    """Differentiate through ten steps from y: it has no implicit gradients."""
    get_diff_optim = import_module("higher").get_diff_optim

    def work() -> Sequence[Tensor]:
        x, y = fresh(case)
        descent = get_diff_optim(torch.optim.SGD(y, lr=case.step), y)
        for _ in range(NUM_ITERATIONS):
            y = descent.step(case.inner(x, y), params=y)
        return grad(case.outer(x, y), x)

    return work


def fresh(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Return x and y as leaves without history."""
    x, y = case.x.values(), case.y.values()
    return [t.detach().requires_grad_() for t in x], [t.detach().requires_grad_() for t in y]


PEERS = {
    "TorchOpt": Peer("torchopt", "CG, 10 iterations", torchopt),
    "Betty": Peer("betty-ml", "CG, 10 iterations", betty),
    "BOAT": Peer("boat-torch", "CG, 10 iterations", boat),
    "higher": Peer("higher", "unrolled, 10 steps", higher),
}
