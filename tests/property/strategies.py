"""Strategies: names, metadata, tensors, files made by hand, and ways to damage them."""

import math
import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hostile.make import file_bytes
from weighlock import DType

__all__ = [
    *("DTYPES", "WHOLE", "edited", "f4_of", "files", "indices", "metadata", "names", "shapes"),
    "steady",
]


def steady(examples):
    """The same examples in every run; `WEIGHLOCK_EXPLORE=20` tries 20 times as many, at random."""
    explore = int(os.environ.get("WEIGHLOCK_EXPLORE", "0"))
    return settings(max_examples=examples * max(1, explore), derandomize=not explore)


DTYPES = [dtype for dtype in DType if dtype.in_safetensors]
WHOLE = [dtype for dtype in DTYPES if not dtype.is_packed]
"""Those of at least a byte."""

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

names = (
    st.one_of(
        st.text(st.sampled_from("abt.0/\\\"'\n\x1b\x7fé😀"), min_size=1, max_size=8),
        _text.filter(bool),
    )
    .map(lambda name: name.replace("\0", "0"))
    .filter(lambda name: name != "__metadata__")
)
"""Names a file can carry."""

metadata = st.dictionaries(_text, _text, max_size=4)


def shapes(dtype, max_rank=4, max_side=5):
    """Shapes of a few elements that fill whole bytes."""
    sides = st.lists(st.integers(0, max_side), max_size=max_rank).map(tuple)
    return sides.filter(lambda shape: math.prod(shape) * dtype.bits % 8 == 0)


def indices(shape):
    """What a lazy slice takes: ints, slices of any step, one ellipsis."""
    return hnp.basic_indices(shape, allow_newaxis=False, allow_ellipsis=True)


def f4_of(raw):
    """The elements of packed F4, one to a byte."""
    packed = np.frombuffer(raw, np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).tobytes()


@st.composite
def files(draw, dtypes=tuple(DTYPES), max_tensors=4):
    """A valid file: its header as a dict, and its data."""
    header = {}
    if draw(st.booleans()):
        header["__metadata__"] = draw(metadata)
    data = b""
    chosen = draw(st.lists(names, max_size=max_tensors, unique=True))
    for name in chosen:
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(shapes(dtype, max_rank=3))
        count = math.prod(shape) * dtype.bits // 8
        raw = draw(st.binary(min_size=count, max_size=count))
        header[name] = {
            "dtype": dtype.value,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + count],
        }
        data += raw
    order = draw(st.permutations(list(header)))
    return {name: header[name] for name in order}, data


_TOKENS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"\\u0074"),
    *(b"-0", b"-1", b"0", b"1", b"4", b"1.0", b"1e0", b"1e999", b"true", b"null", b"NaN", b"[]"),
    *(b"18446744073709551616", b"9223372036854775807", b"4294967296", b"00", b" ", b"\n", b"\0"),
    *(b'"t":', b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__":{},', b'"F32"', b'"F4"'),
    *(b'"x":[[1]],', b'"x":{"x":1},', b"\xff", b"\xef\xbb\xbf", "é".encode()),
]


@st.composite
def edited(draw, content, keep_length=True):
    """The content after a few edits; with `keep_length` the header's length is made right again."""
    if keep_length and len(content) >= 8:
        end = min(len(content), 8 + int.from_bytes(content[:8], "little"))
        header, data = content[8:end], content[end:]
        for _ in range(draw(st.integers(1, 3))):
            header = draw(_edit(header))
        if draw(st.integers(0, 9)) == 0:
            data = draw(_edit(data))
        return file_bytes(header, data)
    for _ in range(draw(st.integers(1, 3))):
        content = draw(_edit(content))
    return content


@st.composite
def _edit(draw, content):
    first = draw(st.integers(0, len(content)))
    last = min(len(content), first + draw(st.integers(0, 12)))
    kind = draw(st.sampled_from(["flip", "cut", "insert", "replace", "repeat", "end", "number"]))
    before, part, after = content[:first], content[first:last], content[last:]
    if kind == "flip" and part:
        return before + bytes([part[0] ^ draw(st.integers(1, 255))]) + part[1:] + after
    if kind == "cut":
        return before + after
    if kind == "insert":
        return before + draw(st.sampled_from(_TOKENS)) + part + after
    if kind == "replace":
        return before + draw(st.sampled_from(_TOKENS)) + after
    if kind == "repeat":
        return before + part + part + after
    if kind == "end":
        return before
    places = [place for place, byte in enumerate(content) if 0x30 <= byte <= 0x39]
    if not places:
        return content
    place = draw(st.sampled_from(places))
    number = draw(st.sampled_from([token for token in _TOKENS if token[:1] in b"-0149"]))
    return content[:place] + number + content[place + 1 :]
