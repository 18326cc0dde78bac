"""Tasks and replies as Flower records: raw bytes with names, types and shapes, never pickle."""

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from rabo.channels import Channels
from rabo.metering import Cost
from rabo.runtimes.base import Reply, Task
from rabo.submodel import Cut, ElementMask, Part, cut, level_of
from rabo.tree import Params

RAW = "raw"  # little-endian bytes in row-major order
_KINDS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KINDS.split()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(name: str, vectors: Mapping[str, Params]) -> dict[str, ArrayRecord | ConfigRecord]:
    """Write vectors as one array of bytes each, and beside them what these hold.

    One array for all tensors of a vector, because every array is sent on its own.
    """
    data = {key: b"".join(map(_bytes, params.values())) for key, params in vectors.items()}
    arrays = {key: Array("uint8", (len(raw),), RAW, raw) for key, raw in data.items()}
    layout = {key: [_describe(n, t) for n, t in params.items()] for key, params in vectors.items()}
    return {name: ArrayRecord(arrays), f"{name}.layout": ConfigRecord(layout)}  # type: ignore[arg-type]


def unpack(
    name: str, records: RecordDict, device: torch.device | None = None
) -> dict[str, dict[str, Tensor]]:
    """Read what `pack` wrote; anything else is refused before it is used."""
    arrays, layout = records.array_records[name], records.config_records[f"{name}.layout"]
    if arrays.keys() != layout.keys():
        raise ValueError(f"{name} must describe each array, got {[*arrays]} and {[*layout]}")
    return {key: _read(key, arrays[key], layout[key], device) for key in layout}


def task_records(task: Task, *, with_cut: bool) -> RecordDict:
    """Write a task; the cut travels where the client does not hold it yet."""
    records = pack("arrays", {n: _squeeze(task.cut, n, p) for n, p in task.arrays.items()})
    if with_cut:
        records |= cut_records(task.cut)
    head = {"seed": task.seed, "round": task.round, "num_steps": task.num_steps}
    records["task"] = ConfigRecord(head)  # type: ignore[arg-type]
    records["scalars"] = _numbers(task.scalars)
    return RecordDict(records)  # type: ignore[arg-type]


def read_task(records: RecordDict, held: Cut, device: torch.device | None = None) -> Task:
    """Read a task on a submodel that the client holds."""
    head = records.config_records["task"]
    seed, round, num_steps = (_whole(head, name) for name in ("seed", "round", "num_steps"))
    arrays = {n: _spread(held, n, p) for n, p in unpack("arrays", records, device).items()}
    return Task(seed, round, held, arrays, _read_numbers(records), num_steps)


def reply_records(reply: Reply, held: Cut) -> RecordDict:
    """Write a reply; its cost without traffic, which the server counts itself."""
    records = pack("arrays", {n: _squeeze(held, n, p) for n, p in reply.arrays.items()})
    records["scalars"] = _numbers(reply.scalars)
    records["cost"] = ConfigRecord(dict(reply.cost._asdict()))
    return RecordDict(records)  # type: ignore[arg-type]


def read_reply(records: RecordDict, held: Cut, device: torch.device | None = None) -> Reply:
    arrays = {n: _spread(held, n, p) for n, p in unpack("arrays", records, device).items()}
    cost = records.config_records["cost"]
    work, memory = (_whole(cost, name) for name in ("multiply_adds", "peak_memory_bytes"))
    seconds = cost["seconds"]
    if not isinstance(seconds, float):
        raise ValueError(f"seconds must be a number, got {seconds!r}")
    return Reply(arrays, _read_numbers(records), Cost(work, memory, seconds))


def cut_records(held: Cut) -> dict[str, ArrayRecord | ConfigRecord]:
    """Say which units are kept, and of masks of single entries every bit."""
    parts = {"kept": {group: units.to("cpu", torch.int32) for group, units in held.kept.items()}}
    for level in ("x", "y"):
        part = getattr(held, level)
        if isinstance(part, ElementMask):
            parts[level] = {
                name: torch.from_numpy(np.packbits(mask.cpu().numpy()))
                for name, mask in part.mask.items()
            }
    return pack("cut", parts)


def read_cut(records: RecordDict, channels: Channels, device: torch.device | None = None) -> Cut:
    """Rebuild a cut along the client's own channels."""
    parts = unpack("cut", records)
    kept = {group: units.long() for group, units in parts["kept"].items()}
    if kept.keys() != channels.units.keys():
        raise ValueError(f"a cut must name the groups {[*channels.units]}, got {[*kept]}")
    for group, units in kept.items():
        number = channels.units[group]
        if units.dim() != 1 or ((units < 0) | (units >= number)).any():
            raise ValueError(f"kept units of {group} must lie in 0..{number - 1}")
    found = cut(channels, kept, device)
    masks = {
        level: _masks(parts[level], channels, level, device)
        for level in ("x", "y")
        if level in parts
    }
    return found._replace(**masks)


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
        flat = np.unpackbits(bits.numpy(), count=count).astype(bool)
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
    name: str, array: Array, layout: object, device: torch.device | None
) -> dict[str, Tensor]:
    if array.stype != RAW or not isinstance(layout, list):
        raise ValueError(f"{name} must come as raw bytes, got {array.stype!r}")
    found, start = {}, 0
    for key, dtype, shape in _entries(layout):
        end = start + prod(shape) * dtype.itemsize
        if end > len(array.data):
            break
        raw = bytearray(array.data[start:end])
        found[key] = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        found[key], start = found[key].reshape(shape).to(device), end
    if len(found) != len(layout) or start != len(array.data):
        raise ValueError(f"{name} must have the bytes it describes, got {len(array.data)} of them")
    return found


def _entries(layout: list[object]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    for entry in layout:
        dtype, shape, name = str(entry).split(" ", 2)
        sizes = tuple(int(size) for size in shape.split(",") if size)
        if dtype not in DTYPES or any(size < 0 for size in sizes):
            raise ValueError(f"a tensor must be of {', '.join(DTYPES)}, got {entry!r}")
        yield name, DTYPES[dtype], sizes


def _numbers(scalars: Mapping[str, float]) -> ConfigRecord:
    return ConfigRecord({name: float(value) for name, value in scalars.items()})


def _read_numbers(records: RecordDict) -> dict[str, float]:
    scalars = dict(records.config_records["scalars"].items())
    if not all(isinstance(value, float) for value in scalars.values()):
        raise ValueError(f"scalars must be numbers, got {scalars}")
    return scalars  # type: ignore[return-value]


def _whole(record: ConfigRecord, name: str) -> int:
    value = record[name]
    if not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value
