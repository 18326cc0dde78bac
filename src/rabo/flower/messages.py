"""Requests and replies as Flower records: raw bytes with names, types and shapes, no pickle."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from rabo.errors import ReplyError
from rabo.exchange.cost import Cost
from rabo.exchange.request import Reply, Request
from rabo.exchange.work import Levels, Work
from rabo.pruning.channels import Channels
from rabo.pruning.submodel import Cut, ElementMask, Part, cut
from rabo.tree import Params

RAW = "raw"  # little-endian bytes in row-major order
_KINDS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KINDS.split()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


Records = dict[str, ArrayRecord | ConfigRecord]
NO_NUMBERS: Mapping[str, float] = {}
HEAD = ("client", "seed", "round", "exchange", "steps")  # whole numbers of a request
WORK, WIDTH = "train.work", "query.width"  # types of messages: an exchange, and the roll call
KEY = "work"  # of a request: the name under which the client looks its work up
VECTOR, SCALAR, CUT, ROWS = "vector ", "scalar ", "cut ", "rows "  # how names in a head begin
FULL = "full "  # of a cost with the full model
INLINE, MOST_INLINE = "raw bytes", 2**20  # small vectors travel in the head itself
MOST_WORDS = 500  # letters of what a client says about itself


def pack(
    name: str, vectors: Mapping[str, Params], numbers: Mapping[str, float] = NO_NUMBERS
) -> Records:
    """Write vectors as one row of bytes, with a head that says what it holds, and numbers.

    Flower sends every array, every part of one and every record on its own: few are fast.
    """
    raw = b"".join(_bytes(t) for params in vectors.values() for t in params.values())
    head: dict[str, Any] = dict(numbers)
    for key, params in vectors.items():
        head[VECTOR + key] = [_describe(n, t) for n, t in params.items()]
    if len(raw) <= MOST_INLINE:
        return {f"{name}.head": ConfigRecord({**head, INLINE: raw})}
    array = Array("uint8", (len(raw),), RAW, raw)
    return {name: ArrayRecord({"bytes": array}), f"{name}.head": ConfigRecord(head)}


def raw_of(name: str, records: RecordDict) -> bytes:
    """Return the bytes of the vectors that `pack` wrote."""
    head = records.config_records[f"{name}.head"]
    if INLINE in head:
        raw, kind = head[INLINE], RAW
    else:
        array = records.array_records[name]["bytes"]
        raw, kind = array.data, array.stype
    if kind != RAW or not isinstance(raw, bytes):
        raise ValueError(f"{name} must come as raw bytes, got {kind!r} of {type(raw).__name__}")
    return raw


def unpack(
    name: str, records: RecordDict, device: torch.device | None = None
) -> dict[str, dict[str, Tensor]]:
    """Read the vectors that `pack` wrote; anything else is refused before it is used."""
    raw, head = raw_of(name, records), records.config_records[f"{name}.head"]
    found, start = {}, 0
    for key, layout in head.items():
        if key.startswith(VECTOR):
            found[key.removeprefix(VECTOR)], start = _read(raw, start, layout, device)
    if start != len(raw):
        raise ValueError(f"{name} must have the bytes it describes, got {len(raw)}")
    return found


def numbers_of(name: str, records: RecordDict) -> dict[str, int | float]:
    """Read the numbers that `pack` wrote."""
    head = records.config_records[f"{name}.head"]
    numbers = {k: v for k, v in head.items() if k not in (INLINE, KEY) and not k.startswith(VECTOR)}
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise ValueError(f"the head of {name} must have numbers, got {numbers}")
    return numbers  # type: ignore[return-value]


def request_records(request: Request, work: Work) -> RecordDict:
    """Write a request and the name of its work; exchange 0 of a round brings the submodel."""
    held = request.submodel
    vectors = {n: _squeeze(held.of(work.takes[n]), p) for n, p in request.arrays.items()}
    if request.exchange == 0:
        vectors |= cut_vectors(held)
    head = {name: getattr(request, name) for name in HEAD}
    records = pack("request", vectors, {**head, **_scalars(request.scalars)})
    records["request.head"][KEY] = work.name  # type: ignore[index]
    return RecordDict(records)  # type: ignore[arg-type]


def work_name(records: RecordDict) -> str:
    """Return the name of the work that a request asks for."""
    return str(records.config_records["request.head"][KEY])


def place_of(records: RecordDict) -> tuple[int, int]:
    """Return the round of a request, and its number among the client's exchanges in the round."""
    numbers = numbers_of("request", records)
    return int(numbers["round"]), int(numbers["exchange"])


def read_request(
    records: RecordDict, held: Cut, work: Work, device: torch.device | None = None
) -> Request:
    """Read a request on a submodel that the client holds; undeclared arrays are refused."""
    numbers = numbers_of("request", records)
    head = {name: int(numbers[name]) for name in HEAD}
    arrays = _arrays(unpack("request", records, device), held, work.takes)
    return Request(submodel=held, arrays=arrays, scalars=_read_scalars(numbers), **head)


def reply_records(reply: Reply, held: Cut, work: Work) -> RecordDict:
    """Write a reply; its cost without traffic, which the server counts itself."""
    vectors = {n: _squeeze(held.of(work.answers[n]), p) for n, p in reply.arrays.items()}
    for name, tensors in reply.rows.items():
        vectors[ROWS + name] = {k: torch.tensor(rows).int() for k, rows in tensors.items()}
    full = reply.full_cost._asdict() if reply.full_cost else {}
    numbers = {**reply.cost._asdict(), **_scalars(reply.scalars)}
    numbers |= {FULL + name: value for name, value in full.items()}
    return RecordDict(pack("reply", vectors, numbers))  # type: ignore[arg-type]


def fault_records(error: BaseException) -> RecordDict:
    """Write in words, and in nothing else, what has gone wrong on a client."""
    return RecordDict({"fault": ConfigRecord({"why": f"{type(error).__name__}: {error}"})})


def raise_fault(records: RecordDict) -> None:
    """Raise what a client says that has gone wrong, if it says so."""
    if "fault" in records.config_records:
        raise ReplyError(words(records.config_records["fault"]["why"]))


def words(text: object) -> str:
    """Return what a client says as it may be shown: of bounded length, and letters alone."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:MOST_WORDS])


def read_reply(
    records: RecordDict, request: Request, work: Work, device: torch.device | None = None
) -> Reply:
    """Read the reply to a request, or raise the fault that the client reports."""
    raise_fault(records)
    numbers = numbers_of("reply", records)
    spent, memory = (int(numbers[name]) for name in ("multiply_adds", "peak_memory_bytes"))
    cost = Cost(spent, memory, float(numbers["seconds"]))
    vectors = unpack("reply", records, device)
    rows = {
        name.removeprefix(ROWS): {k: v.reshape(-1).tolist() for k, v in tensors.items()}
        for name, tensors in vectors.items()
        if name.startswith(ROWS)
    }
    arrays = _arrays(vectors, request.submodel, work.answers)
    told = {k.removeprefix(FULL): v for k, v in numbers.items() if k.startswith(FULL)}
    full = Cost(**told) if told else None  # type: ignore[arg-type]
    scalars = _read_scalars(numbers)
    return Reply(request.client, arrays, scalars, cost, rows=rows, full_cost=full)


def cut_vectors(held: Cut) -> dict[str, dict[str, Tensor]]:
    """Say which units are kept, and of masks of single entries every bit."""
    kept = {group: units.to("cpu", torch.int32) for group, units in held.kept.items()}
    vectors = {CUT + "kept": kept}
    for level in ("x", "y"):
        part = getattr(held, level)
        if isinstance(part, ElementMask):
            vectors[CUT + level] = {
                name: torch.from_numpy(np.packbits(mask.cpu().numpy()))
                for name, mask in part.mask.items()
            }
    return vectors


def read_cut(
    vectors: Mapping[str, Params], channels: Channels, device: torch.device | None = None
) -> Cut:
    """Rebuild a cut along the client's own channels."""
    kept = {group: units.long() for group, units in vectors[CUT + "kept"].items()}
    if kept.keys() != channels.units.keys():
        raise ValueError(f"a cut must name the groups {[*channels.units]}, got {[*kept]}")
    for group, units in kept.items():
        number = channels.units[group]
        if units.dim() != 1 or ((units < 0) | (units >= number)).any():
            raise ValueError(f"kept units of {group} must lie in 0..{number - 1}")
    found = cut(channels, kept, device)
    masks = {
        level: _masks(vectors[CUT + level], channels, level, device)
        for level in ("x", "y")
        if CUT + level in vectors
    }
    return replace(found, **masks)


def _masks(
    packed: Params, channels: Channels, level: str, device: torch.device | None
) -> ElementMask:
    shapes = {n[2:]: s for n, s in channels.shapes.items() if n.startswith(f"{level}.")}
    if packed.keys() != shapes.keys():
        raise ValueError(f"masks of {level} must name {[*shapes]}, got {[*packed]}")
    masks = {}
    for name, bits in packed.items():
        count = prod(shapes[name])
        if bits.numel() != (count + 7) // 8:
            raise ValueError(f"the mask of {level}.{name} must have {count} bits")
        flat = np.unpackbits(bits.cpu().numpy(), count=count).astype(bool)
        masks[name] = torch.from_numpy(flat).reshape(shapes[name]).to(device)
    return ElementMask(masks)


def _squeeze(part: Part, params: Params) -> Params:
    """Keep of a mask's tensors the entries that are held: only these travel."""
    if not isinstance(part, ElementMask):
        return params
    return {key: value[part.mask[key]] for key, value in params.items()}


def _spread(part: Part, params: Params) -> dict[str, Tensor]:
    """Put what was squeezed back to its place among zeros."""
    if not isinstance(part, ElementMask):
        return dict(params)
    spread = {}
    for key, value in params.items():
        full = value.new_zeros(part.mask[key].shape)
        full[part.mask[key]] = value
        spread[key] = full
    return spread


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _describe(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in NAMES:
        raise ValueError(
            f"a tensor of {tensor.dtype} cannot travel ({name}); use {', '.join(DTYPES)}"
        )
    return f"{NAMES[tensor.dtype]} {','.join(map(str, tensor.shape))} {name}"


def _read(
    data: bytes, start: int, layout: object, device: torch.device | None
) -> tuple[dict[str, Tensor], int]:
    """Read the tensors of a vector from a place on; return them and where they end."""
    if not isinstance(layout, list):
        raise ValueError(f"a vector must list its tensors, got {layout!r}")
    found = {}
    for name, dtype, shape in _entries(layout):
        end = start + prod(shape) * dtype.itemsize
        if end > len(data) or name in found:
            raise ValueError(f"{name} must have the bytes it describes, once")
        raw = bytearray(data[start:end])
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        found[name], start = flat.reshape(shape).to(device), end
    return found, start


def _entries(layout: list[object]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    for entry in layout:
        dtype, shape, name = str(entry).split(" ", 2)
        sizes = tuple(int(size) for size in shape.split(",") if size)
        if dtype not in DTYPES or any(size < 0 for size in sizes):
            raise ValueError(f"a tensor must be of {', '.join(DTYPES)}, got {entry!r}")
        yield name, DTYPES[dtype], sizes


def _arrays(
    vectors: Mapping[str, Params], held: Cut, levels: Levels
) -> dict[str, dict[str, Tensor]]:
    own = {name: params for name, params in vectors.items() if not name.startswith((CUT, ROWS))}
    if unknown := own.keys() - levels.keys():
        raise ReplyError(f"arrays must be {', '.join(levels) or 'none'}, got {sorted(unknown)}")
    return {name: _spread(held.of(levels[name]), params) for name, params in own.items()}


def _scalars(scalars: Mapping[str, float]) -> dict[str, float]:
    return {SCALAR + name: float(value) for name, value in scalars.items()}


def _read_scalars(numbers: Mapping[str, float]) -> dict[str, float]:
    return {k.removeprefix(SCALAR): float(v) for k, v in numbers.items() if k.startswith(SCALAR)}
