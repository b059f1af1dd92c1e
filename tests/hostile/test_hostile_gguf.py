"""B1 to B5 for GGUF: headers that lie, and headers that cost more than they weigh."""

import struct

import numpy as np
import pytest

import weighlock
from hostile.make_gguf import F32, Q4_0, Tensor, gguf, pair, sample, string
from hostile.watching import refusal
from weighlock.errors import FormatError, HeaderError, LayoutError, LimitExceeded, TruncatedFile

open_catalog = weighlock.open  # imported before anything is watched
ONE = Tensor("a", (4,), F32, bytes(16))


def raw_pair(key, kind, body):
    return string(key) + struct.pack("<I", kind) + body


def nested(depth):
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)


CASES = {
    "version 1": (gguf([ONE], version=1), HeaderError, "version 1"),
    "version 4": (gguf([ONE], version=4), HeaderError, "version 4"),
    "more tensors than bytes": (gguf([ONE], counts=(5000, 0)), HeaderError, "5,000 tensors"),
    "2**63 tensors": (gguf([ONE], counts=(2**63, 0)), LimitExceeded, "tensors"),
    "2**64-1 keys": (gguf([ONE], counts=(1, 2**64 - 1)), LimitExceeded, "keys"),
    "one tensor too many": (gguf([ONE], counts=(2, 0)), FormatError, ""),
    "cut in the header": (gguf([ONE])[:40], TruncatedFile, "header ends"),
    "cut in the data": (gguf([ONE], cut=1), TruncatedFile, "'a' ends at byte"),
    "a key of 2**63 bytes": (
        gguf([ONE], [string("k", length=2**63) + bytes(9)]),
        HeaderError,
        "65,535 are allowed",
    ),
    "a text longer than any header": (
        gguf([ONE], [raw_pair("k", 8, string("v", length=2**40))]),
        HeaderError,
        "100,000,000 are allowed",
    ),
    "a text longer than the file": (
        gguf([ONE], [raw_pair("k", 8, string("v", length=50_000_000))]),
        TruncatedFile,
        "50,000,",
    ),
    "an array of 2**62 numbers": (
        gguf([ONE], [raw_pair("k", 9, struct.pack("<IQ", 12, 2**62))]),
        HeaderError,
        "4,000,000 values",
    ),
    "an array longer than the file": (
        gguf([ONE], [raw_pair("k", 9, struct.pack("<IQ", 12, 3_000_000))]),
        TruncatedFile,
        "24,000,",
    ),
    "arrays of arrays of nothing": (
        gguf([ONE], [raw_pair("k", 9, struct.pack("<IQ", 9, 4_000_001))]),
        HeaderError,
        "4,000,000 values",
    ),
    "arrays nested 10,000 deep": (
        gguf([ONE], [raw_pair("k", 9, nested(10_000))]),
        HeaderError,
        "deeper than 8",
    ),
    "an array of an unknown type": (
        gguf([ONE], [raw_pair("k", 9, struct.pack("<IQ", 77, 1) + b"a")]),
        HeaderError,
        "type 77",
    ),
    "a value of an unknown type": (gguf([ONE], [raw_pair("k", 13, b"abcd")]), HeaderError, "13"),
    "a bool of 2": (gguf([ONE], [pair("k", "bool", 2)]), HeaderError, "neither true nor false"),
    "a key twice": (gguf([ONE], [pair("k", "u8", 1)] * 2), HeaderError, "twice"),
    "a tensor twice": (gguf([ONE, ONE]), LayoutError, "two tensors named 'a'"),
    "no name": (gguf([Tensor("", (4,), F32, bytes(16))]), LayoutError, "empty"),
    "NUL in a name": (gguf([Tensor("a\0b", (4,), F32, bytes(16))]), LayoutError, "NUL"),
    "a name of 5,000 bytes": (
        gguf([Tensor("a" * 5000, (4,), F32, bytes(16))]),
        HeaderError,
        "4,096 are allowed",
    ),
    "5 dimensions": (gguf([Tensor("a", (1,) * 5, F32, bytes(4))]), LayoutError, "5 dimensions"),
    "2**32-1 dimensions": (
        gguf([ONE]).replace(struct.pack("<IQ", 1, 4), struct.pack("<IQ", 2**32 - 1, 4)),
        LayoutError,
        "4,294,967,295 dimensions",
    ),
    "sizes whose product overflows": (
        gguf([Tensor("a", (2**32, 2**32), F32, bytes(16))]),
        LayoutError,
        "larger than any file",
    ),
    "sizes whose product wraps to 4": (
        gguf([Tensor("a", (2**62 + 1, 4), F32, bytes(16))]),
        LayoutError,
        "larger than any file",
    ),
    "an offset of 2**64-32": (
        gguf([Tensor("a", (4,), F32, bytes(16), offset=2**64 - 32)]),
        TruncatedFile,
        "ends at byte",
    ),
    "an offset between": (
        gguf([Tensor("a", (4,), F32, bytes(64), offset=16)]),
        LayoutError,
        "no multiple of 32",
    ),
    "two tensors in one place": (
        gguf([ONE, Tensor("b", (4,), F32, bytes(16), offset=0)]),
        LayoutError,
        "within tensor 'a'",
    ),
    "half a block": (
        gguf([Tensor("q", (48,), Q4_0, bytes(27))]),
        LayoutError,
        "whole blocks of 32",
    ),
    "an alignment of 0": (
        gguf([ONE], [pair("general.alignment", "u32", 0)]),
        HeaderError,
        "alignment is 0",
    ),
    "an alignment of 24": (
        gguf([ONE], [pair("general.alignment", "u32", 24)]),
        HeaderError,
        "power of two",
    ),
    "an alignment of 2**31": (
        gguf([ONE], [pair("general.alignment", "u32", 2**31)]),
        HeaderError,
        "power of two",
    ),
    "an alignment that is a text": (
        gguf([ONE], [pair("general.alignment", "str", "32")]),
        HeaderError,
        "alignment is str",
    ),
}


@pytest.mark.parametrize(("content", "kind", "says"), CASES.values(), ids=CASES)
def test_hostile_headers_are_refused_with_a_reason(tmp_path, content, kind, says):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error, peak = refusal(open_catalog, path, kind)
    assert says in str(error)
    assert peak < 1_000_000 + 4 * len(content)


def test_every_changed_byte_of_a_header_is_a_catalog_or_an_error_of_ours():
    content, _ = sample()
    end = content.index(b"output_norm") + 60
    for place in range(4, end):
        for value in (0, 0x7F, 0xFF, content[place] ^ 1):
            changed = bytearray(content)
            changed[place] = value
            try:
                with weighlock.open(changed) as catalog:
                    for ref in catalog.values():
                        ref.load()
            except (FormatError, LimitExceeded):
                continue


def test_names_are_labels_and_bytes_that_are_no_text_stay_apart():
    arrays = [Tensor(name, (1,), F32, np.float32(n).tobytes()) for n, name in enumerate(NAMES)]
    with weighlock.open(gguf(arrays)) as catalog:
        assert [float(ref.load()[0]) for ref in catalog.values()] == [0, 1, 2, 3]


NAMES = ["../../etc/passwd", "\x1b[31mred", b"\xff\xfe", b"\xff\xfd"]
