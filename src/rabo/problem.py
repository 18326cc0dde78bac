"""Bilevel problems from two losses and two parameter trees, or modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap

from rabo.bilevel import Batch
from rabo.channels import Channels, declare, join, shapes_of
from rabo.compact import Chain, Structure, check_structure, narrow, uses_batch_statistics
from rabo.discovery import find_structure
from rabo.submodel import Cut, Submodel
from rabo.tree import Params, leaves, map_leaves, shapes


class Bound(Mapping[str, Tensor]):
    """A module with given parameters: call it, or look a parameter up by name.

    With several copies, parameters and inputs have a leading dimension that runs over them.
    """

    def __init__(self, module: nn.Module, params: Params, copies: int = 1):
        self._module, self._params, self.copies = module, params, copies

    def __call__(self, *inputs: Any) -> Any:
        if self.copies == 1:
            return functional_call(self._module, dict(self._params), inputs)
        if isinstance(self._module, nn.Linear) and "bias" in self._params and inputs[0].dim() == 3:
            weight, bias = self._params["weight"], self._params["bias"]
            return torch.baddbmm(bias.unsqueeze(1), inputs[0], weight.mT)  # vmap without its cost
        return vmap(lambda params, *each: functional_call(self._module, params, each))(
            dict(self._params), *inputs
        )

    def __getitem__(self, name: str) -> Tensor:
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class _Definition:
    """What all clients of a problem share: parameters, channels, and narrowed modules."""

    def __init__(self, problem: "Problem"):
        self.problem = problem
        parts = (problem.x, problem.y)
        self.modules = [
            uses_batch_statistics(p) if isinstance(p, nn.Module) else None for p in parts
        ]
        self.params = (_parameters(problem.x), _parameters(problem.y))
        self._narrowed: dict[Any, Chain] = {}
        self.batch_shapes: dict[Any, Any] = {}  # by those of the data
        layers = [layer for module in self.modules if module for layer in module.modules()]
        self.has_random_layers = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in layers)

    @cached_property
    def structure(self) -> Structure:
        problem, (x, y) = self.problem, self.params
        if problem.prune == "none":
            return Structure(Channels({}, {}, shapes_of(x, y)), ())
        if problem.axes is not None:
            found = Structure(declare(problem.axes, x, y), ())
            if problem.example is not None and any(self.modules):
                check_structure(Chain(*self.modules), found, problem.example)
        elif all(module is None for module in self.modules):
            return Structure(Channels({}, {}, shapes_of(x, y)), ())
        else:
            found = self._discover()
        if problem.prune in ("x", "y"):
            found = Structure(found.channels.restricted_to(problem.prune), found.resizes)
        return found

    def _discover(self) -> Structure:
        """Trace x then y on one example, or each level that has an example of its own."""
        example, (x, y) = self.problem.example, self.modules
        if example is None:
            raise ValueError(
                "a problem made of modules needs example= (a batch of inputs) to find the channels "
                "that belong together; give one, declare axes=, or set prune='none'"
            )
        if isinstance(example, Mapping) and set(example) <= {"x", "y"}:
            chains = {"x": Chain(x, None), "y": Chain(None, y)}
            parts = [find_structure(chains[level], example[level]) for level in sorted(example)]
        else:
            parts = [find_structure(Chain(x, y), example)]
        channels = join([part.channels for part in parts], shapes_of(*self.params))
        return Structure(channels, tuple(r for part in parts for r in part.resizes))

    def narrowed(self, cut: Cut) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the modules in the shapes of a cut, made once per shape."""
        if cut.widths not in self._narrowed:
            chain = narrow(Chain(*self.modules), self.structure, dict(cut.widths))
            self._narrowed[cut.widths] = chain
        chain = self._narrowed[cut.widths]
        return (
            chain.x if self.modules[0] is not None else None,
            chain.y if self.modules[1] is not None else None,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A bilevel problem from two losses and two parameter trees, or modules.

    `inner(x, y, data)` is g and `outer(x, y, data)` is f. A tree arrives as a mapping of tensors, a
    module as something to call. With `features(x, data)`, the losses get its result in place of x.
    Every client binds its own data with `on`; batches are all of it, `batch_size` random items, or
    what `sample(data, generator)` draws (`sample.many(data, generators)`, where there is one, draws
    the same for several steps with fewer kernels). `features.many(x, parts)`, where there is one,
    takes several parts of a batch at once, in one pass if `features.joins(parts)`. `example` is a
    batch of inputs of y(x(.)), by which channels are found; where x and y are no chain, give
    {"x": ..., "y": ...} or one of them.
    `ways` is the number of classes where data are few-shot tasks: batches are then inputs and
    labels with a leading dimension over tasks.
    """

    inner: Callable[[Any, Any, Any], Tensor]
    outer: Callable[[Any, Any, Any], Tensor]
    x: nn.Module | Params
    y: nn.Module | Params
    features: Callable[[Any, Any], Any] | None = None
    example: Any = None
    axes: Mapping[str, Sequence[str | None]] | None = None
    prune: Literal["both", "x", "y", "none"] = "both"
    batch_size: int | None = None
    sample: Callable[[Batch, Generator], Batch] | None = None
    redraw: Literal["step", "round"] = "step"
    copies: int = 1
    ways: int = 0
    definition: _Definition = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.prune not in ("both", "x", "y", "none"):
            raise ValueError(f"prune must be both, x, y or none, got {self.prune!r}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.copies < 1:
            raise ValueError(f"copies must be at least 1, got {self.copies}")
        if self.redraw not in ("step", "round"):
            raise ValueError(f"redraw must be step or round, got {self.redraw!r}")
        for level, part in (("x", self.x), ("y", self.y)):
            if not isinstance(part, (nn.Module, Mapping)):
                raise ValueError(
                    f"{level} must be a module or a mapping of names to tensors, got "
                    f"{type(part).__name__}; write {{'{level}': ...}}"
                )
            named = _named(part)
            if not named:
                raise ValueError(f"{level} must have at least one parameter, got none")
            for name, value in named.items():
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                    raise ValueError(
                        f"{level}.{name} must be a tensor of floating point numbers, got {kind}; "
                        "convert it: torch.as_tensor(value, dtype=torch.float32)"
                    )
                if isinstance(part, nn.Module) and not value.requires_grad:
                    raise ValueError(
                        f"{level}.{name} must be trained, got a frozen parameter "
                        "(requires_grad=False); make it a buffer (register_buffer), or let the "
                        "losses apply what is frozen"
                    )
        object.__setattr__(self, "definition", _Definition(self))

    def on(self, *, inner: Any, outer: Any) -> "ClientProblem":
        """Bind one client's data: training data for g, validation data for f."""
        for level, part in (("inner", inner), ("outer", outer)):
            sizes = {len(t) for t in leaves(part) if t.dim()}
            if self.batch_size is not None and len(sizes) != 1:
                raise ValueError(f"tensors of {level} data must have one length, got {sizes}")
        return ClientProblem(self, Batch(inner, outer))


@dataclass(frozen=True, eq=False)
class ClientProblem:
    """A problem with one client's data; satisfies `BilevelProblem`."""

    problem: Problem
    data: Batch
    cut: Cut | None = None
    num_copies: int | None = None  # instead of the problem's

    @property
    def channels(self) -> Channels:
        return self.problem.definition.structure.channels

    @property
    def copies(self) -> int:
        return self.problem.copies if self.num_copies is None else self.num_copies

    @property
    def ways(self) -> int:
        return self.problem.ways

    @property
    def redraw(self) -> Literal["step", "round"]:
        return self.problem.redraw

    def start(self) -> tuple[Params, Params]:
        return self.problem.definition.params

    def batch(self, generator: Generator) -> Batch:
        if self.problem.sample is not None:
            return self.problem.sample(self.data, generator)
        if self.problem.batch_size is None:
            return self.data
        return Batch(self._draw(self.data.inner, generator), self._draw(self.data.outer, generator))

    def batches(self, generators: Sequence[Generator]) -> list[Batch]:
        """Draw for several steps; a `sample` that has `many` makes all of them at once."""
        many = getattr(self.problem.sample, "many", None)
        return many(self.data, generators) if many else [self.batch(g) for g in generators]

    def features(self, x: Params, part: Any) -> Any:
        if self.problem.features is None:
            return x
        return self.problem.features(self._see(0, x), part)

    def features_of(self, x: Params, parts: Sequence[Any]) -> list[Any]:
        """Return the features of several parts; `features` that has `many` takes one pass."""
        many = getattr(self.problem.features, "many", None)
        return many(self._see(0, x), parts) if many else [self.features(x, p) for p in parts]

    def takes_one_pass(self, parts: Sequence[Any]) -> bool:
        """Say whether `features_of` takes one pass for all parts, as `joins` of `features` says."""
        joins = getattr(self.problem.features, "joins", None)
        return joins is not None and joins(parts)

    def inner(self, z: Any, y: Params, part: Any) -> Tensor:
        return self._loss("inner", z, y, part)

    def outer(self, z: Any, y: Params, part: Any) -> Tensor:
        return self._loss("outer", z, y, part)

    def call(self, y: Params, *inputs: Any) -> Any:
        """Apply the module y with given parameters."""
        return self._see(1, y)(*inputs)

    def restrict(self, cut: Cut) -> "ClientProblem":
        if isinstance(cut.x, Submodel) or isinstance(cut.y, Submodel):
            self.problem.definition.narrowed(cut)  # now, so that no work is charged for it
        return replace(self, cut=cut)

    def with_copies(self, copies: int) -> "ClientProblem":
        """Return the same problem for another number of copies of y."""
        return replace(self, num_copies=copies)

    def with_one_copy_each(self) -> "ClientProblem":
        """Return the same problem with one y of the client, whatever the number of its tasks."""
        return self.with_copies(1)

    @property
    def has_random_layers(self) -> bool:
        return self.problem.definition.has_random_layers

    @property
    def needs_only_widths(self) -> bool:
        """Whether the losses depend on how many units are kept, not on which."""
        parts = () if self.cut is None else (self.cut.x, self.cut.y)
        return all(
            isinstance(part, Submodel) and (module is not None or part.is_whole)
            for part, module in zip(parts, self.problem.definition.modules, strict=False)
        )

    @property
    def shape_key(self) -> Any:
        known, data = self.problem.definition.batch_shapes, shapes(self.data)
        if data not in known:  # batches have shapes that depend on those of the data
            known[data] = shapes(self.batch(Generator().manual_seed(0)))
        return id(self.problem.definition), known[data]

    def _loss(self, level: Literal["inner", "outer"], z: Any, y: Params, part: Any) -> Tensor:
        seen = self._see(0, z) if self.problem.features is None else z
        loss = getattr(self.problem, level)(seen, self._see(1, y), part)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"the {level} loss must be one number, got {_describe(loss)}")
        return loss.reshape(())

    def _see(self, level: int, params: Params) -> Any:
        """Show parameters to a loss: a narrowed module, or a tree with zeros where it was cut."""
        definition, copies = self.problem.definition, (1, self.copies)[level]
        module = definition.modules[level]
        if self.cut is not None:
            part = (self.cut.x, self.cut.y)[level]
            if module is not None and isinstance(part, Submodel):
                module = definition.narrowed(self.cut)[level]
            else:
                params = part.expand(params) if copies == 1 else vmap(part.expand)(dict(params))
        return params if module is None else Bound(module, params, copies)

    def _draw(self, part: Any, generator: Generator) -> Any:
        length = len(leaves(part)[0])
        chosen = torch.randperm(length, generator=generator)[: self.problem.batch_size]
        return map_leaves(lambda t: t[chosen.to(t.device, non_blocking=True)], part)


def _named(part: nn.Module | Params) -> dict[str, Tensor]:
    return dict(part.named_parameters() if isinstance(part, nn.Module) else part)


def _parameters(part: nn.Module | Params) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _named(part).items()}


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
