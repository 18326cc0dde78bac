"""What travels comes back bit for bit, and what is malformed is refused."""

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from grids import travel
from hypothesis import given
from hypothesis import strategies as st

import rabo
from rabo.exchange.cost import Cost
from rabo.exchange.request import Reply, Request
from rabo.exchange.work import Work, levels
from rabo.flower.messages import (
    DTYPES,
    MOST_INLINE,
    RAW,
    pack,
    raw_of,
    read_cut,
    read_reply,
    read_request,
    reply_records,
    request_records,
    unpack,
    work_name,
)
from rabo.pruning.channels import declare
from rabo.pruning.policies import Whole
from rabo.pruning.submodel import ElementMask
from rabo.seeding import stream

WORK = rabo.RABO().update_inner


class Echo(Work):
    """Answers with the arrays of the request."""

    name = "echo"
    takes = answers = levels(x="x", y="y")

    def __call__(self, request, client):
        return request.arrays


NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable())
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from([*DTYPES.values()])), draw(SHAPES)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(b & 1 for b in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def bits(tensor):
    return (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist())


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, tensors(), max_size=3), max_size=3))
def test_tensors_of_any_type_and_shape_come_back_bit_for_bit(vectors):
    found = unpack("arrays", travel(RecordDict(pack("arrays", vectors))))
    assert list(found) == list(vectors)
    for name, params in vectors.items():
        assert list(found[name]) == list(params)
        assert [bits(t) for t in found[name].values()] == [bits(t) for t in params.values()]


@pytest.mark.parametrize("extra", [0, 1])
def test_vectors_of_any_size_come_back(extra):
    """Large ones travel as an array, which Flower sends in parts."""
    sent = {"x": {"w": torch.arange(MOST_INLINE + extra).to(torch.uint8)}}
    records = RecordDict(pack("arrays", sent))
    assert len(records.array_records) == extra
    assert torch.equal(unpack("arrays", travel(records))["x"]["w"], sent["x"]["w"])


def model(seed):
    g = torch.Generator().manual_seed(seed)
    x = {"w": torch.randn(4, 3, generator=g), "b": torch.randn(4, generator=g)}
    y = {"v": torch.randn(2, 4, generator=g, dtype=torch.float64)}
    axes = {"x.w": ("hidden", None), "x.b": ("hidden",), "y.v": (None, "hidden")}
    return Whole(declare(axes, x, y), x, y)


@given(
    st.integers(0, 2**62),
    st.sampled_from([rabo.Random(), rabo.Magnitude(), rabo.Full()]),
    st.floats(0.1, 1),
    st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3),
)
def test_a_task_and_its_reply_come_back_as_they_were(seed, policy, width, scalars):
    whole = model(seed % 1000)
    cut = policy(whole, width, 0, 3, stream(seed))
    arrays = {"x": cut.x.extract(whole.x), "y": cut.y.extract(whole.y)}
    request = Request(7, seed, 3, cut, arrays, scalars, steps=2)
    records = travel(request_records(request, WORK))
    held = read_cut(unpack("request", records), whole.channels)
    assert held.widths == cut.widths
    for level in ("x", "y"):
        mine, theirs = getattr(cut, level).held(), getattr(held, level).held()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert work_name(records) == "update_inner"
    found = read_request(records, held, WORK)
    assert (found.client, found.seed, found.round, found.steps) == (7, seed, 3, 2)
    assert dict(found.scalars) == scalars
    rows = {"y": {"v": [1], "w": []}, "x": {}}
    reply = Reply(7, arrays, scalars, Cost(2**40, 7, 0.25, 0, 0), rows=rows)
    answer = read_reply(travel(reply_records(reply, held, Echo())), request, Echo())
    assert answer.client == 7
    assert answer.cost == reply.cost
    assert answer.scalars == scalars
    assert answer.rows == rows
    for name, params in arrays.items():
        for key, value in params.items():
            for other in (found.arrays[name][key], answer.arrays[name][key]):
                assert value.dtype == other.dtype
                assert torch.equal(value, other)


def test_only_held_entries_of_an_element_mask_travel():
    whole = model(0)
    cut = rabo.Magnitude()(whole, 0.5, 0, 0, stream(0))
    assert isinstance(cut.x, ElementMask)
    request = Request(0, 0, 0, cut, {"x": cut.x.extract(whole.x)})
    records = request_records(request, WORK)
    bits = (12 + 7) // 8 + 1 + 1  # of x.w, x.b and y.v
    units = 4 * 4
    sent = len(raw_of("request", records))
    assert sent == cut.x.num_bytes(whole.x) + bits + units


def test_what_cannot_travel_is_refused_where_it_is_sent():
    with pytest.raises(ValueError, match="complex64 cannot travel"):
        pack("arrays", {"x": {"w": torch.zeros(2, dtype=torch.complex64)}})


def written(data, layout, stype=RAW):
    arrays = ArrayRecord({"bytes": Array("uint8", (len(data),), stype, data)})
    return RecordDict({"arrays": arrays, "arrays.head": ConfigRecord({"vector x": layout})})


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (written(b"12345678", ["float32 2 w"], "numpy.ndarray"), "raw bytes"),
        (written(b"1234567", ["float32 2 w"]), "bytes it describes"),
        (written(b"123456789", ["float32 2 w"]), "bytes it describes"),
        (written(b"12345678", ["float32 1 w", "float32 1 w"]), "bytes it describes"),
        (written(b"", ["float32 99999999999999 w"]), "bytes it describes"),
        (written(b"12345678", ["object 1 w"]), "a tensor must be of"),
        (written(b"1234", ["float32 -1,-1 w"]), "a tensor must be of"),
        (written(b"1234", "float32 1 w"), "must list its tensors"),
        (written(b"1234", ["float32"]), "unpack"),
    ],
)
def test_malformed_arrays_are_refused(records, why):
    with pytest.raises(ValueError, match=why):
        unpack("arrays", records)


@pytest.mark.parametrize(
    "kept",
    [
        {"hidden": torch.tensor([4])},
        {"hidden": torch.tensor([-1])},
        {"other": torch.tensor([0])},
        {"hidden": torch.tensor([[0]])},
    ],
)
def test_a_cut_of_units_that_do_not_exist_is_refused(kept):
    with pytest.raises(ValueError, match=r"kept units|must name the groups"):
        read_cut({"cut kept": kept}, model(0).channels)
