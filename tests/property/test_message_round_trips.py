"""Any object of the types that travel comes back the same, and packs to the same bytes again."""

import contextlib
import datetime

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from unit.message_samples import same
from weighlock.errors import WeighlockError
from weighlock.messages.message import pack, unpack

URL = "http://127.0.0.1:9/s/" + 32 * "0" + "/model.safetensors"

DTYPES = [*"bBhHiIqQefdF?", ">f4", ">i8"]
TENSORS = arrays.arrays(
    st.sampled_from(DTYPES).map(np.dtype), arrays.array_shapes(min_dims=0, max_side=4, min_side=0)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HASHABLE = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT),
        *(st.binary(max_size=5), st.dates(), st.timedeltas(), st.complex_numbers(allow_nan=False)),
        st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    ),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
LEAVES = st.one_of(
    *(
        HASHABLE,
        st.floats(),
        st.complex_numbers(),
        st.binary(min_size=4090, max_size=4100),
        TENSORS,
    ),
    arrays.from_dtype(np.dtype("f4")),
    arrays.from_dtype(np.dtype("M8[us]")),
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
    ),
    max_leaves=12,
)


@given(OBJECTS)
def test_what_is_packed_is_unpacked(obj):
    body = pack(obj, threshold_bytes=None).seal()
    found = unpack(body)
    assert same(obj, found)
    assert pack(found, threshold_bytes=None).seal() == body


@given(OBJECTS)
def test_what_is_offered_stays_a_ref_on_its_way(obj):
    draft = pack(obj, threshold_bytes=0)
    body = draft.seal(URL)
    assert pack(unpack(body), threshold_bytes=0).seal() == body
    assert (len(draft.tensors) > 0) == (URL.encode() in body)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_an_object_or_an_error_of_ours(data, with_head):
    if with_head:
        data = b"\x89WLM\x01\0\0\0" + len(data).to_bytes(4, "little") + bytes(4) + data
    with contextlib.suppress(WeighlockError):
        unpack(data)
