"""Tasks and replies as Flower records: raw bytes with names, types and shapes, never pickle."""

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
from rabo.exchange.work import Reply, Task
from rabo.pruning.channels import Channels
from rabo.pruning.submodel import Cut, ElementMask, Part, cut, level_of
from rabo.tree import Params

RAW = "raw"  # little-endian bytes in row-major order
_KINDS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KINDS.split()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


Records = dict[str, ArrayRecord | ConfigRecord]
NO_NUMBERS: Mapping[str, float] = {}
HEAD = ("seed", "round", "exchange", "num_steps")  # whole numbers of a task
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
    numbers = {k: v for k, v in head.items() if k != INLINE and not k.startswith(VECTOR)}
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise ValueError(f"the head of {name} must have numbers, got {numbers}")
    return numbers  # type: ignore[return-value]


def task_records(task: Task) -> RecordDict:
    """Write a task; the cut travels with the first exchange of a round."""
    vectors = {n: _squeeze(task.cut, n, p) for n, p in task.arrays.items()}
    if task.exchange == 0:
        vectors |= cut_vectors(task.cut)
    head = {name: getattr(task, name) for name in HEAD}
    return RecordDict(pack("task", vectors, {**head, **_scalars(task.scalars)}))  # type: ignore[arg-type]


def place_of(records: RecordDict) -> tuple[int, int]:
    """Return the round of a task, and which of the client's exchanges in it this is."""
    numbers = numbers_of("task", records)
    return int(numbers["round"]), int(numbers["exchange"])


def read_task(records: RecordDict, held: Cut, device: torch.device | None = None) -> Task:
    """Read a task on a submodel that the client holds."""
    numbers = numbers_of("task", records)
    head = {name: int(numbers[name]) for name in HEAD}
    arrays = _arrays(unpack("task", records, device), held)
    return Task(cut=held, arrays=arrays, scalars=_read_scalars(numbers), **head)


def reply_records(reply: Reply, held: Cut) -> RecordDict:
    """Write a reply; its cost without traffic, which the server counts itself."""
    vectors = {n: _squeeze(held, n, p) for n, p in reply.arrays.items()}
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


def read_reply(records: RecordDict, held: Cut, device: torch.device | None = None) -> Reply:
    raise_fault(records)
    numbers = numbers_of("reply", records)
    work, memory = (int(numbers[name]) for name in ("multiply_adds", "peak_memory_bytes"))
    cost = Cost(work, memory, float(numbers["seconds"]))
    vectors = unpack("reply", records, device)
    rows = {
        name.removeprefix(ROWS): {k: v.reshape(-1).tolist() for k, v in tensors.items()}
        for name, tensors in vectors.items()
        if name.startswith(ROWS)
    }
    told = {k.removeprefix(FULL): v for k, v in numbers.items() if k.startswith(FULL)}
    full = Cost(**told) if told else None  # type: ignore[arg-type]
    return Reply(_arrays(vectors, held), _read_scalars(numbers), cost, rows=rows, full_cost=full)


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


def _squeeze(held: Cut, name: str, params: Params) -> Params:
    """Keep of a mask's tensors the entries that are held: only these travel."""
    part: Part = getattr(held, level_of(name))
    if not isinstance(part, ElementMask):
        return params
    return {key: value[part.mask[key]] for key, value in params.items()}


def _spread(held: Cut, name: str, params: Params) -> dict[str, Tensor]:
    """Put what was squeezed back to its place among zeros."""
    part: Part = getattr(held, level_of(name))
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


def _arrays(vectors: Mapping[str, Params], held: Cut) -> dict[str, dict[str, Tensor]]:
    return {n: _spread(held, n, p) for n, p in vectors.items() if not n.startswith((CUT, ROWS))}


def _scalars(scalars: Mapping[str, float]) -> dict[str, float]:
    return {SCALAR + name: float(value) for name, value in scalars.items()}


def _read_scalars(numbers: Mapping[str, float]) -> dict[str, float]:
    return {k.removeprefix(SCALAR): float(v) for k, v in numbers.items() if k.startswith(SCALAR)}
