"""Bilevel problems from two losses and two parameter trees, or modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import vmap

from rabo.problems.bilevel import Batch, Level
from rabo.problems.bound import Bound
from rabo.problems.labels import MaskedLogits, OwnLabels, check_class_rows, find_labels
from rabo.pruning.channels import Channels, declare, join, shapes_of
from rabo.pruning.compact import Chain, Structure, check_structure, narrow, uses_batch_statistics
from rabo.pruning.discovery import find_structure
from rabo.pruning.submodel import Cut, Submodel
from rabo.tree import Params, leaves, map_leaves, shapes

NOT_GIVEN: Any = object()


class _Definition:
    """What all clients of a problem share: parameters, channels, and narrowed modules."""

    def __init__(self, problem: "Problem"):
        self.problem = problem
        parts = (problem.x, problem.y)
        self.modules = [
            uses_batch_statistics(p) if isinstance(p, nn.Module) else None for p in parts
        ]
        self.params = (_parameters(problem.x), _parameters(problem.y))
        self.class_rows: tuple[str, ...] = ()
        if problem.labels is not None:
            self.class_rows = check_class_rows(problem.class_rows, problem.y, self.params[1])
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

    `inner(x, y, data)` is g and `outer(x, y, data)` is f. For single-level methods `loss(x, y,
    data)` can replace both; x may then be left out. A tree arrives as a mapping of tensors, a
    module as something to call. With `features(x, data)`, the losses get its result in place of x.
    Every client binds its own data with `on`; batches are all of it, `batch_size` random items, or
    what `sample(data, generator)` draws (`sample.many(data, generators)`, where there is one, draws
    the same for several steps with fewer kernels). `features.many(x, parts)`, where there is one,
    takes several parts of a batch at once, in one pass if `features.joins(parts)`. `example` is a
    batch of inputs of y(x(.)), by which channels are found; where x and y are no chain, give
    {"x": ..., "y": ...} or one of them.
    `ways` is the number of classes where data are few-shot tasks: batches are then inputs and
    labels with a leading dimension over tasks.
    `labels(data)` returns the class labels in a part of a client's data. The options `mask_logits`
    and `average_by_label` of single-level methods need it. `class_rows` names the tensors of y with
    one row per class; by default these are the tensors of the last linear layer of y.
    """

    inner: Callable[[Any, Any, Any], Tensor] | None = None
    outer: Callable[[Any, Any, Any], Tensor] | None = None
    loss: Callable[[Any, Any, Any], Tensor] | None = None
    x: nn.Module | Params = field(default_factory=dict)
    y: nn.Module | Params = field(default_factory=dict)
    features: Callable[[Any, Any], Any] | None = None
    example: Any = None
    axes: Mapping[str, Sequence[str | None]] | None = None
    prune: Literal["both", "x", "y", "none"] = "both"
    batch_size: int | None = None
    sample: Callable[[Batch, Generator], Batch] | None = None
    redraw: Literal["step", "round"] = "step"
    copies: int = 1
    ways: int = 0
    labels: Callable[[Any], Tensor] | None = None
    class_rows: Sequence[str] | None = None
    definition: _Definition = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_losses()
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
            if not named and (level == "y" or self.loss is None):
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

    def _check_losses(self) -> None:
        given = [n for n in ("inner", "outer", "loss") if getattr(self, n) is not None]
        if given not in (["inner", "outer"], ["loss"]):
            raise ValueError(
                "a problem must have inner= and outer= (bilevel), or loss= (one loss, for "
                f"single-level methods), got {', '.join(given) or 'none of them'}"
            )

    def on(
        self, data: Any = NOT_GIVEN, *, inner: Any = NOT_GIVEN, outer: Any = NOT_GIVEN
    ) -> "ClientProblem":
        """Bind one client's data: training data for g and validation data for f, or one set."""
        part = self._parts(data, inner, outer)
        for level, own in part._asdict().items():
            if level == "outer" and self.loss is not None:
                continue
            sizes = {len(t) for t in leaves(own) if t.dim()}
            name = f"{level} data" if self.loss is None else "data"
            if self.batch_size is not None and not sizes:
                raise ValueError(
                    f"batch_size={self.batch_size} draws items from the tensors of the {name}, "
                    f"got {_describe(own)}; give tensors, or leave batch_size out"
                )
            if self.batch_size is not None and len(sizes) != 1:
                raise ValueError(f"tensors of {name} must have one length, got {sizes}")
        return ClientProblem(self, part, labels=self._labels_in(part))

    def _parts(self, data: Any, inner: Any, outer: Any) -> Batch:
        if self.loss is None:
            if data is not NOT_GIVEN or inner is NOT_GIVEN or outer is NOT_GIVEN:
                raise ValueError(
                    "a bilevel problem needs data for both losses: "
                    "problem.on(inner=training, outer=validation)"
                )
            return Batch(inner, outer)
        given = [part for part in (data, inner) if part is not NOT_GIVEN]
        if len(given) != 1 or not (outer is NOT_GIVEN or outer is None):
            raise ValueError("a problem of one loss needs one set of data: problem.on(data)")
        return Batch(given[0], None)

    def _labels_in(self, parts: Batch) -> OwnLabels | None:
        if self.labels is None:
            return None
        found = [self.labels(part) for part in parts if part is not None]
        definition = self.definition
        return find_labels(found, definition.params[1], definition.class_rows) if found else None


@dataclass(frozen=True, eq=False)
class ClientProblem:
    """A problem with one client's data; satisfies `BilevelProblem`."""

    problem: Problem
    data: Batch
    cut: Cut | None = None
    num_copies: int | None = None  # instead of the problem's
    labels: OwnLabels | None = None
    mask_logits: MaskedLogits = "none"

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
            return self._sampled(self.problem.sample, generator)
        if all(self._is_whole.values()):
            return self.data
        if self.has_one_loss:
            return Batch(self._draw("inner", generator), None)
        return Batch(self._draw("inner", generator), self._draw("outer", generator))

    @property
    def whole(self) -> Batch | None:
        """All data as one batch; None if `sample` draws the batches."""
        return self.data if self.problem.sample is None else None

    def batch_of(self, level: Level, generator: Callable[[], Generator]) -> Batch:
        """Draw the same items of one level as `batch`; the other level may be missing."""
        if self.problem.sample is not None:
            return self.batch(generator())
        if self._is_whole[level]:
            return self.data
        stream = generator()
        if level == "inner":
            return Batch(self._draw("inner", stream), None)
        torch.randperm(self._lengths["inner"], generator=stream)
        return Batch(None, self._draw("outer", stream))

    @cached_property
    def _lengths(self) -> dict[str, int]:
        """The number of items per level; a single loss has one level."""
        parts = self.data._asdict().items()
        return {name: leaves(part)[0].shape[0] for name, part in parts if part is not None}

    @cached_property
    def _is_whole(self) -> dict[str, bool]:
        """Whether a batch of a level holds all of its data."""
        size = self.problem.batch_size
        if size is None:
            return {"inner": True, "outer": True}
        return {name: size >= length for name, length in self._lengths.items()}

    def batches(self, generators: Sequence[Generator]) -> list[Batch]:
        """Draw for several steps; a `sample` that has `many` makes all of them at once."""
        many = getattr(self.problem.sample, "many", None)
        if many is None:
            return [self.batch(g) for g in generators]
        if self.has_one_loss:
            return [Batch(data, None) for data in many(self.data.inner, generators)]
        return many(self.data, generators)

    def _sampled(self, sample: Callable[[Any, Generator], Any], generator: Generator) -> Batch:
        """Let the user's function draw; with one loss it gets and returns that loss's data."""
        if self.has_one_loss:
            return Batch(sample(self.data.inner, generator), None)
        return sample(self.data, generator)

    def features(self, x: Params, part: Any) -> Any:
        if self.problem.features is None:
            return x
        return self.problem.features(self._see[0](x), part)

    def features_of(self, x: Params, parts: Sequence[Any]) -> list[Any]:
        """Return the features of several parts; `features` that has `many` takes one pass."""
        many = getattr(self.problem.features, "many", None)
        return many(self._see[0](x), parts) if many else [self.features(x, p) for p in parts]

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
        return self._see[1](y)(*inputs)

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

    def with_masked_logits(self, how: MaskedLogits) -> "ClientProblem":
        """Return the same problem, with the logits of absent classes masked in what y returns."""
        if self.problem.definition.modules[1] is None:
            raise ValueError("mask_logits masks what y returns: y must be a module, got tensors")
        self._own_labels()
        return replace(self, mask_logits=how)

    def label_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the classifier's rows of the client's labels, by tensor of y."""
        own = self._own_labels()
        shapes = {} if self.cut is None else self.cut.y.tensor_shapes
        if any(shapes[name][0] != len(own.absent) for name in own.tensors if name in shapes):
            raise ValueError(
                "average_by_label needs all rows of the classifier: do not cut classes"
            )
        return own.rows()

    def _own_labels(self) -> OwnLabels:
        if self.labels is None:
            raise ValueError("the labels of this client are unknown: labels= found no data")
        return self.labels

    @property
    def has_one_loss(self) -> bool:
        """Whether the problem has a single loss, and no outer one."""
        return self.problem.loss is not None

    @property
    def knows_labels(self) -> bool:
        """Whether the problem says which labels a client's data hold."""
        return self.problem.labels is not None

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

    @cached_property
    def shape_key(self) -> Any:
        known, data = self.problem.definition.batch_shapes, shapes(self.data)
        if data not in known:  # batches have shapes that depend on those of the data
            known[data] = shapes(self.batch(Generator().manual_seed(0)))
        return id(self.problem.definition), known[data]

    def _loss(self, level: Level, z: Any, y: Params, part: Any) -> Tensor:
        seen = self._see[0](z) if self.problem.features is None else z
        own, name = self._see[1](y), "loss" if self.has_one_loss else f"{level} loss"
        function = self.problem.loss or getattr(self.problem, level)
        if level == "outer" and self.has_one_loss:
            raise ValueError("the problem has one loss and no outer one; give inner= and outer=")
        loss = function(seen, own, part)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"the {name} must be one number, got {_describe(loss)}")
        if self.mask_logits != "none" and not own.was_called:
            raise ValueError(
                f"mask_logits masks what y returns, but the {name} does not call y; write it with "
                "y(...) in place of single parameters or submodules"
            )
        return loss if loss.dim() == 0 else loss.reshape(())

    @cached_property
    def _see(self) -> tuple[Callable[[Params], Any], Callable[[Params], Any]]:
        """Show x and y to a loss: a narrowed module, or a tree with zeros where it was cut."""
        return self._show(0, 1), self._show(1, self.copies)

    def _show(self, level: int, copies: int) -> Callable[[Params], Any]:
        definition = self.problem.definition
        module, expand = definition.modules[level], None
        if self.cut is not None:
            part = (self.cut.x, self.cut.y)[level]
            if module is not None and isinstance(part, Submodel):
                module = definition.narrowed(self.cut)[level]
            else:
                expand = part.expand
        mask = None
        if level == 1 and self.labels is not None and self.mask_logits != "none":
            mask = partial(self.labels.mask, how=self.mask_logits)

        if expand is None:
            return (
                (lambda params: params)
                if module is None
                else partial(Bound, module, copies=copies, mask=mask)
            )

        def show(params: Params) -> Any:
            params = expand(params) if copies == 1 else vmap(expand)(dict(params))
            return params if module is None else Bound(module, params, copies, mask)

        return show

    def _draw(self, level: Level, generator: Generator) -> Any:
        """Draw random items; a batch that holds all of them is the data itself."""
        order = torch.randperm(self._lengths[level], generator=generator)
        part, chosen = getattr(self.data, level), order[: self.problem.batch_size]
        return part if self._is_whole[level] else _take(part, chosen)


def _take(part: Any, chosen: Tensor) -> Any:
    """Return the chosen items of all tensors."""
    return map_leaves(lambda t: t.index_select(0, chosen.to(t.device, non_blocking=True)), part)


def _named(part: nn.Module | Params) -> dict[str, Tensor]:
    return dict(part.named_parameters() if isinstance(part, nn.Module) else part)


def _parameters(part: nn.Module | Params) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _named(part).items()}


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
