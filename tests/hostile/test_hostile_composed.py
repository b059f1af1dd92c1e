"""Sparse, quantised and nested tensors that contradict themselves, and bytes that multiply.

Each is refused by an error of ours, or opens and says what is not read. An audit hook watches.
"""

import io
import struct
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

import weighlock
from hostile.make_checkpoints import (
    EMPTY_LIST,
    FALSE,
    MAGIC,
    NONE,
    REDUCE,
    TRUE,
    TUPLE2,
    array,
    call,
    checkpoint,
    get,
    glob,
    ints,
    num,
    pickled,
    put,
    row,
    storage,
    table,
    tensor,
    text,
    tup,
)
from hostile.watching import watched
from weighlock.errors import FormatError, LayoutError, LimitExceeded
from weighlock.limits import Limits

LONGS = struct.pack("<8q", *range(8))
BYTES = bytes(range(8))
STORAGES = {"0": struct.pack("<4f", 1, 2, 3, 4), "1": LONGS, "2": BYTES}
EVIL = call(glob("os", "system"), text("touch hacked"))


def longs(*size, offset=0):
    """int64 numbers of that size."""
    strides = []
    step = 1
    for n in reversed(size):
        strides.insert(0, step)
        step *= n
    return tensor(size, tuple(strides), offset, storage("LongStorage", "1", 8))


def sparse(layout, *data):
    kind = call(glob("torch.serialization", "_get_layout"), text(f"torch.{layout}"))
    return call(glob("torch._utils", "_rebuild_sparse_tensor"), kind, tup(*data))


def coo(indices=None, values=None, size=None):
    return sparse(
        "sparse_coo", indices or longs(2, 4), values or tensor(), size or ints(9, 9), TRUE
    )


def csr(outer=None, inner=None, values=None, size=None, layout="sparse_csr"):
    parts = (outer or longs(4), inner or longs(4), values or tensor(), size or ints(3, 5))
    return sparse(layout, *parts)


def real(value):
    return b"G" + struct.pack(">d", value)


PER_TENSOR = tup(glob("torch", "per_tensor_affine"), real(0.5), num(3))


def per_channel(scales=None, zeros=None, axis=None):
    scales, zeros = scales or longs(2), zeros or longs(2)
    return tup(glob("torch", "per_channel_affine"), scales, zeros, axis or num(0))


def quantised(scheme=PER_TENSOR, size=(2, 4), stride=(4, 1), offset=0, on=None):
    on = on or storage("QInt8Storage", "2", 8)
    args = (on, num(offset), ints(*size), ints(*stride), scheme, FALSE, NONE)
    return call(glob("torch._utils", "_rebuild_qtensor"), *args)


def nested(*parts):
    return call(glob("torch._utils", "_rebuild_nested_tensor"), *parts)


def jagged(*pairs):
    func = glob("torch.nested._internal.nested_tensor", "_rebuild_njt")
    return call(func, table(*pairs))


def meta(dtype, size):
    return call(glob("torch._utils", "_rebuild_meta_tensor_no_storage"), dtype, size, NONE, FALSE)


GOOD = {
    "as torch 1.3 wrote scales": quantised(
        tup(
            glob("torch", "per_channel_affine"),
            row(real(0.5), real(0.25)),
            call(glob("torch.jit._pickle", "build_intlist"), row(num(1), num(2))),
            row(num(0)),
        )
    ),
    "coo": coo(),
    "csr": csr(),
    "quantised": quantised(),
    "by channel": quantised(per_channel()),
    "nested": nested(tensor(), longs(2, 2), longs(2, 2), longs(2)),
    "jagged": jagged(("values", tensor()), ("offsets", longs(3)), ("_ragged_idx", num(1))),
    "meta": meta(glob("torch", "float32"), ints(2, 3)),
}

REFUSED = {
    "coo: more indices than values": coo(longs(2, 3)),
    "coo: indices of one dimension": coo(longs(4)),
    "coo: more indices than dimensions": coo(longs(2, 4), size=ints(9)),
    "coo: dense dimensions differ": coo(longs(1, 4), size=ints(9, 7)),
    "coo: a size that is none": coo(size=text("9")),
    "coo: a negative size": coo(size=ints(-1, 9)),
    "coo: indices beyond their storage": coo(longs(2, 4, offset=1)),
    "coo: code as values": coo(values=EVIL),
    "coo: text as indices": coo(indices=text("x")),
    "coo: sparse values": coo(values=coo()),
    "coo: of nothing": sparse("sparse_coo"),
    "csr: of three": sparse("sparse_csr", longs(4), longs(4), tensor()),
    "csr: too few rows": csr(longs(3)),
    "csr: columns and values differ": csr(inner=longs(3)),
    "csr: one dimension": csr(size=ints(3)),
    "csr: more dimensions than values": csr(size=ints(3, 5, 7)),
    "csr: a batch on one side": csr(outer=longs(1, 4)),
    "csr: indices without dimensions": csr(outer=longs()),
    "csc: rows for columns": csr(layout="sparse_csc"),
    "bsr: without blocks": csr(layout="sparse_bsr"),
    "no layout": call(glob("torch._utils", "_rebuild_sparse_tensor"), EVIL, NONE),
    "quantised: beyond its storage": quantised(offset=1),
    "quantised: in floats": quantised(on=storage()),
    "quantised: by nothing": quantised(NONE),
    "quantised: by code": quantised(tup(EVIL, real(1), num(0))),
    "quantised: scale of text": quantised(tup(glob("torch", "x"), text("1"), num(0))),
    "quantised: zero of 100 bits": quantised(tup(glob("torch", "x"), real(1), num(2**100))),
    "quantised: too few scales": quantised(per_channel(longs(1))),
    "quantised: too many zeros": quantised(per_channel(zeros=longs(3))),
    "quantised: along a dimension that is not there": quantised(per_channel(axis=num(2))),
    "quantised: along -1": quantised(per_channel(axis=num(-1))),
    "quantised: along True": quantised(per_channel(axis=TRUE)),
    "quantised: of four arguments": call(
        glob("torch._utils", "_rebuild_qtensor"), storage(), num(0), ints(), ints()
    ),
    "quantised: as large as nothing": quantised(size=(2**40, 2**40), stride=(0, 0)),
    "nested: of three": nested(tensor(), longs(2, 2), longs(2, 2)),
    "nested: sizes and strides differ": nested(tensor(), longs(2, 2), longs(2, 1), longs(2)),
    "nested: offsets for others": nested(tensor(), longs(2, 2), longs(2, 2), longs(3)),
    "nested: code as its values": nested(EVIL, longs(2, 2), longs(2, 2), longs(2)),
    "jagged: without offsets": jagged(("values", tensor()), ("_ragged_idx", num(1))),
    "jagged: along 0": jagged(("values", tensor()), ("offsets", longs(3)), ("_ragged_idx", num(0))),
    "jagged: along nothing": jagged(("values", tensor()), ("offsets", longs(3))),
    "jagged: no offsets in them": jagged(
        ("values", tensor()), ("offsets", longs(0)), ("_ragged_idx", num(1))
    ),
    "jagged: of a list": call(
        glob("torch.nested._internal.nested_tensor", "_rebuild_njt"), EMPTY_LIST
    ),
    "meta: of no type": meta(NONE, ints(2)),
    "meta: of code": meta(glob("os", "system"), ints(2)),
    "meta: larger than anything": meta(glob("torch", "float32"), ints(2**40, 2**40)),
}


def look(body):
    content = checkpoint(table(("w", tensor()), ("x", body)), STORAGES)
    modules = set(sys.modules)
    with watched() as seen:
        try:
            catalog = weighlock.open(content)
            {name: ref.load() for name, ref in catalog.items()}
        except (FormatError, LimitExceeded) as error:
            catalog = error
    assert seen == []
    assert set(sys.modules) == modules
    return catalog


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Whatever reading imports when it is first needed is there before anything is watched."""
    weighlock.open(checkpoint())["w"].load()


@pytest.mark.parametrize("body", GOOD.values(), ids=GOOD.keys())
def test_the_good_ones_open(body):
    catalog = look(body)
    assert list(catalog.groups) == ["x"]
    assert all(part in catalog for part in catalog.groups["x"].parts.values())


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_refused(body):
    error = look(body)
    assert isinstance(error, LayoutError), error
    assert str(error).isprintable()


def test_a_layout_nobody_knows_is_named_and_not_read():
    catalog = look(sparse("_mkldnn", longs(2, 4), tensor(), ints(9, 9)))
    assert list(catalog) == ["w"]
    assert "_mkldnn" in catalog.unreadable["x"]


def peak(content, limits=None):
    tracemalloc.start()
    try:
        return weighlock.open(content, limits=limits), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_arrays_over_one_text_share_its_bytes():
    shared = call(glob("_codecs", "encode"), text("x" * 65_536), text("latin1")) + put(1)
    arrays = [array(ints(16_384), get(1)) for _ in range(1000)]
    catalog, most = peak(checkpoint(table(("x", row(shared, *arrays)))))
    assert len(catalog) == 1000
    assert most < 16_000_000


def test_many_arrays_that_each_make_bytes_of_one_text():
    start = text("x" * 60_000) + put(1), glob("_codecs", "encode") + put(2)
    one = array(ints(15_000), get(2) + get(1) + text("latin1") + TUPLE2 + REDUCE)
    with pytest.raises(LimitExceeded, match="copies"):
        weighlock.open(checkpoint(table(("x", row(*start, *[one] * 3000)))))


@pytest.mark.parametrize("kind", ["encoded", "python 2", "python 2, not ascii"])
def test_many_wrapped_arrays_over_one_text_share_its_bytes(kind):
    letters = "é" * 30_000 if "not" in kind else "x" * 60_000
    start = text(letters) + put(1), glob("_codecs", "encode") + put(2)
    data = get(2) + get(1) + text("latin1") + TUPLE2 + REDUCE if kind == "encoded" else get(1)
    inner = array(ints(15_000), data)
    wrapped = call(glob("torch._utils", "_rebuild_parameter"), inner, TRUE, NONE)
    of_device = call(
        glob("torch._utils", "_rebuild_xla_tensor"),
        *(inner, glob("torch", "bfloat16"), text("xla:0"), FALSE),
    )
    many = [wrapped, of_device] * 1000
    catalog, most = peak(checkpoint(table(("x", row(*start, *many)))))
    assert len(catalog) == 2000
    assert most < 16_000_000


@pytest.mark.parametrize("wrapped", [False, True], ids=["bytes", "bytearray"])
def test_one_text_made_into_many_bytes(wrapped):
    encode = glob("_codecs", "encode") + put(2)
    one = get(2) + get(1) + text("latin1") + TUPLE2 + REDUCE
    one = call(glob("builtins", "bytearray"), one) if wrapped else one
    body = row(text("x" * 60_000) + put(1), encode, *[one] * 3000)
    with pytest.raises(LimitExceeded, match="copies"):
        weighlock.open(checkpoint(table(("x", body))))


def test_one_text_made_into_many_keys():
    encode = glob("_codecs", "encode") + put(2)
    key = get(2) + get(1) + text("latin1") + TUPLE2 + REDUCE
    body = row(text("x" * 200_000) + put(1), encode, table(*((key, num(n)) for n in range(500))))
    _, most = peak(checkpoint(table(("x", body))))
    assert most < 8_000_000


def test_many_arrays_of_the_other_byte_order_over_one_text():
    shared = call(glob("_codecs", "encode"), text("x" * 65_536), text("latin1")) + put(1)
    arrays = [array(ints(16_384), get(1), order=">") for _ in range(1000)]
    catalog, most = peak(checkpoint(table(("x", row(shared, *arrays)))))
    assert len(catalog) == 1000
    assert most < 16_000_000
    assert catalog["x.1"].load()[0] == np.frombuffer(b"xxxx", ">f4")[0]


def test_one_text_made_into_the_storages_of_many_tensors():
    one = get(2) + get(1) + text("latin1") + TUPLE2 + REDUCE
    held = call(glob("torch.storage", "_load_from_bytes"), one)
    made = call(glob("torch._utils", "_rebuild_tensor"), held, num(0), ints(1), ints(1))
    head = pickled(num(MAGIC)) + pickled(num(1001)) + pickled(table())
    head += pickled(storage("ByteStorage", "0", 60_000, NONE)) + pickled(row(text("0")))
    raw = (head + (60_000).to_bytes(8, "little") + b"x" * 60_000).decode("latin1")
    start = text(raw) + put(1), glob("_codecs", "encode") + put(2)
    catalog, most = peak(checkpoint(table(("x", row(*start, *[made] * 20)))))
    assert len(catalog) == 20
    assert catalog["x.21"].load().tolist() == [120]
    assert most < 10_000_000
    with pytest.raises(LimitExceeded, match="copies"):
        weighlock.open(checkpoint(table(("x", row(*start, *[made] * 3000)))))


def inner(data, name="archive/data.pkl"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(name, data)
    return file.getvalue()


def in_bytes(raw):
    return b"B" + struct.pack("<I", len(raw)) + raw


def test_nested_archives_do_not_unpack_beyond_their_size():
    packed = inner(b"\x80\x02" + b"N0" * 5_000_000 + b"N.")
    assert len(packed) < 20_000
    bodies = [in_bytes(packed[:-1] + b"\0") for _ in range(20)] + [in_bytes(packed)]
    catalog, most = peak(checkpoint(table(("w", tensor()), ("x", row(*bodies)))))
    assert list(catalog) == ["w"]
    assert len(catalog.notes) == 21
    assert most < 8_000_000


def test_one_nested_checkpoint_named_a_million_times():
    good = in_bytes(checkpoint()) + put(7)
    body = row(good, *[get(7)] * 200_000)
    catalog = weighlock.open(checkpoint(table(("x", body))), limits=Limits(tensors=50_000))
    assert list(catalog) == ["x.0.w"]
