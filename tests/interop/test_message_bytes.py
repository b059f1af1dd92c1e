"""Messages that were sent once must be read for ever: the bytes of version 1, as first written."""

from datetime import datetime

import ml_dtypes
import numpy as np

import weighlock
from unit.message_samples import same
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.stored import StoredRef

URL = "http://10.0.0.7:8400/s/0123456789abcdef0123456789abcdef/model.safetensors#r=site-1.c0ffee"


def registry():
    class Point:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __repr__(self):
            return f"Point({self.x}, {self.y})"

    found = weighlock.Registry()
    found.register(
        Point, name="point", encode=lambda p: [p.x, p.y], decode=lambda plain: Point(*plain)
    )
    return found, Point


def example(point):
    shared = np.arange(20_000, dtype=np.float32)
    return {
        "round": 3,
        "weights": {"layer.0": shared, "tied": shared, "bias": np.arange(3, dtype=np.float16)},
        "bf16": np.array([1, -2.5], ml_dtypes.bfloat16),
        "plain": [None, True, -1, 2**63, 1.5, "snow ☃", b"\x00\xff", [], {}],
        "marked": [
            *((1, (2,)), {1, 2}, frozenset({"a"}), {3: "three", None: 4}, 2**70, -(2**70), 1 - 2j),
            *(datetime(2026, 1, 2, 3, 4, 5, 6), np.float32(0.5), np.str_("s"), np.dtype("<i8")),
            np.dtype(ml_dtypes.bfloat16),
        ],
        "catalog": weighlock.Catalog({"w": ArrayRef.of("w", np.array([[7]], np.int8))}, {"k": "v"}),
        "point": point(1, 2),
        "bytes": bytes(5000),
    }


VERSION_1 = bytes.fromhex(
    """
    89574c4d01000000d9010000000000009991d959687474703a2f2f31302e302e302e373a383430302f732f303132
    33343536373839616263646566303132333435363738396162636465662f6d6f64656c2e7361666574656e736f72
    7323723d736974652d312e63306666656591ce0001390095c0c0c0c0a5627974657395a3463332a3463136a44246
    3136a24938a2553895010101020196cd4e2003020101cd13889500c0c0c0c091cc8088a5726f756e6403a7776569
    6768747383a76c617965722e30d40300a474696564d40300a462696173d40201a462663136d40202a5706c61696e
    99c0c3ffcf8000000000000000cb3ff8000000000000a8736e6f7720e29883c40200ff9080a66d61726b65649c93
    d401010192d401010293d40102010292d40103a16195d4010403a57468726565c00492d40105c409000000000000
    00004092d40105c4090000000000000000c093d40106cb3ff0000000000000cbc00000000000000092d40107ba32
    3032362d30312d30325430333a30343a30352e30303030303693d4010ba33c6634c4040000003f93d4010ba37374
    72a17392d4010ca33c693892d4010ca862666c6f61743136a7636174616c6f6793d4010f81a16ba17681a177d403
    03a5706f696e7493d40110a5706f696e74920102a56279746573d40404000000000000000000003c004000000000
    000000000000803f20c000000000000000000000000007000000000000000000000000000000
    """
) + bytes(5000)


def test_version_1_is_read():
    types, point = registry()
    found = weighlock.unpack(VERSION_1, registry=types)
    expected = example(point)
    ref = found["weights"].pop("layer.0")
    assert found["weights"].pop("tied") is ref
    assert isinstance(ref, StoredRef)
    assert (ref.source.ticket, ref.source.size) == (URL, 80_128)
    assert (ref.name, ref.dtype, ref.shape, ref.span.offset) == ("layer.0", "F32", (20_000,), 128)
    del expected["weights"]["layer.0"], expected["weights"]["tied"]
    assert repr(found.pop("point")) == repr(expected.pop("point"))
    assert found["catalog"].metadata == {"k": "v"}
    assert same(expected, found)


def test_version_1_is_still_written():
    types, point = registry()
    draft = weighlock.pack(example(point), registry=types)
    assert draft.seal(URL) == VERSION_1
