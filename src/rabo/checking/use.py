"""Whether losses use x and y, by value and by autograd."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rabo.checking.losses import LEVELS, evaluate, gap
from rabo.checking.measured import Measured
from rabo.checking.point import Point
from rabo.checking.report import Finding
from rabo.seeding import stream
from rabo.tree import Params

CUT = "let gradients flow: remove detach(), .data, .item() and no_grad() on the way to the loss"
IGNORED = {
    "inner y": "fit y in inner(x, y, data)",
    "inner x": "y*(x) then is the same for every x: use x in inner, as features or penalties",
    "outer y": "judge y in outer(x, y, data)",
}


def check_use(m: Measured) -> Measured:
    """Move x and y at random; compare changes of the losses with their gradients."""
    found = [_uses(point, stream(m.seed, "use")) for point in m.own.each()]
    uses = {name: _worst([each.status[name] for each in found]) for name in found[0].status}
    rows = [_row(level, uses) for level in LEVELS]
    unused = set.intersection(*(set(each.unused) for each in found))
    if unused and not any(row.verdict == "fails" for row in rows):
        named = ", ".join(sorted(unused))
        advice = "use them in a loss, or leave them out"
        rows.append(Finding("unused parameters", named, "warning", advice))
    return m.plus(*rows, uses=uses)


class _Uses(NamedTuple):
    status: Mapping[str, str]
    unused: list[str]


def _uses(point: Point, generator: Generator) -> _Uses:
    base = replace(point, x=_moved(point.x, generator), y=_moved(point.y, generator))
    at_y = replace(base, y=_moved(base.y, generator))
    at_x = replace(base, x=_moved(base.x, generator))
    (g, f), (g_y, f_y), (g_x, f_x) = (
        [evaluate(p, level) for level in LEVELS] for p in (base, at_y, at_x)
    )
    noise = 100 * torch.finfo(point.dtype).eps

    def differ(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
        return not gap(a, b) <= noise  # NaN differs

    def any_of(slopes: Mapping[str, Tensor]) -> bool:
        return any(bool((t != 0).any()) for t in slopes.values())

    status = {
        "inner y": _status(differ([g.loss], [g_y.loss]), any_of(g.y)),
        "inner x": _status(
            differ(g.y.values(), g_x.y.values()), differ(g.x.values(), g_y.x.values())
        ),
        "outer y": _status(differ([f.loss], [f_y.loss]), any_of(f.y)),
        "outer x": _status(differ([f.loss], [f_x.loss]), any_of(f.x)),
    }
    coupled = {k for k in g.x if differ([g.x[k]], [g_y.x[k]])}
    unused = [f"x.{k}" for k in f.x if k not in coupled and not any_of({k: f.x[k]})]
    return _Uses(status, unused + [f"y.{k}" for k in g.y if not any_of({k: g.y[k]})])


def _moved(params: Params, generator: Generator) -> Params:
    """Change entries by about a tenth, and zeros by a hundredth of the typical size."""

    def move(t: Tensor) -> Tensor:
        drawn = torch.randn(t.shape, generator=generator).to(t)
        typical = float(t.square().mean().sqrt()) or 1.0
        return t * (1 + 0.1 * drawn) + 0.01 * typical * drawn

    return {name: move(t.detach()) for name, t in params.items()}


def _status(by_value: bool, by_autograd: bool) -> str:
    return "used" if by_autograd else "cut" if by_value else "ignored"


def _worst(statuses: list[str]) -> str:
    """Join the clients: a client may lack data for x, but no client may cut the graph."""
    return next(s for s in ("cut", "used", "ignored") if s in statuses)


def _row(level: str, uses: Mapping[str, str]) -> Finding:
    check = f"{level} loss"
    for part in ("y", "x"):
        name = f"{level} {part}"
        if uses[name] == "cut":
            return Finding(check, f"depends on {part}, but has no gradient in it", "fails", CUT)
        if uses[name] == "ignored" and name in IGNORED:
            alone = " together with y" if name == "inner x" else ""
            result = f"does not depend on {part}{alone}"
            return Finding(check, result, "fails", IGNORED[name])
    direct = uses[f"{level} x"] == "used"
    return Finding(check, "uses x and y" if direct else "uses y; x acts through y*(x) alone")
