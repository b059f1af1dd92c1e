"""Reading beside the `safetensors` package: two readers of one file must see one model.

Whatever we accept it accepts, with the same names, dtypes, shapes and bytes. Whatever it accepts we
accept, except for what `DIFFERENCES` lists: there it is laxer than the format's own description, or
accepts what no array can hold. (And `Limits` bounds how many tensors there are, and how much else.)
"""

import json
import math

import pytest
import safetensors
from hypothesis import event, given
from hypothesis import strategies as st

import weighlock
from hostile.make import entry, file_bytes
from property.strategies import DTYPES, edited, files, names, steady
from weighlock import DType
from weighlock.errors import WeighlockError
from weighlock.limits import Limits


def ours(content):
    """What we read, or None."""
    try:
        catalog = weighlock.open(content)
    except WeighlockError:
        return None
    return {
        name: (ref.dtype.value, list(ref.shape), b"".join(bytes(piece) for piece in ref.pieces()))
        for name, ref in catalog.items()
        # Names that the metadata ties to a tensor: the package leaves those to its `load_model`.
        if name not in catalog.metadata or catalog.metadata[name] not in catalog
    }


def theirs(content):
    """What the package reads, or None."""
    try:
        found = safetensors.deserialize(content)
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return None
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in found}


class _Object(list):
    """An object as its pairs, so that none gets lost."""


def _walk(value):
    yield value
    if isinstance(value, _Object):
        for _, inner in value:
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)


def _tensors(header):
    """Names and what is said about each, of a header that the package accepts."""
    return [(name, value) for name, value in header if name != "__metadata__"]


def _fields(header):
    for _, value in _tensors(header):
        if isinstance(value, _Object):
            yield dict(value)
        elif isinstance(value, list) and len(value) == 3:
            yield dict(zip(("dtype", "shape", "data_offsets"), value, strict=True))


def _repeats(value):
    return isinstance(value, _Object) and len({key for key, _ in value}) < len(value)


def _too_large_for_an_array(field):
    shape = field["shape"]
    sides = math.prod(side for side in shape if side)
    dtype = field["dtype"]
    name = dtype[0][0] if isinstance(dtype, _Object) else dtype
    return 0 in shape and sides * DType(name).bits >= 2**63


DIFFERENCES = {
    "white space before the header": lambda raw, header: raw[:1] in b" \t\r\n",
    "a key twice in one object": lambda raw, header: any(map(_repeats, _walk(header))),
    "an empty name": lambda raw, header: any(not name for name, _ in _tensors(header)),
    "NUL in a name": lambda raw, header: any("\0" in name for name, _ in _tensors(header)),
    "a name above the limit": lambda raw, header: any(
        len(name.encode()) > Limits().name_bytes for name, _ in _tensors(header)
    ),
    "more dimensions than numpy has": lambda raw, header: any(
        len(field["shape"]) > Limits().rank for field in _fields(header)
    ),
    "a tensor described by a list": lambda raw, header: any(
        not isinstance(value, _Object) for _, value in _tensors(header)
    ),
    "a dtype as an object": lambda raw, header: any(
        isinstance(field["dtype"], list) for field in _fields(header)
    ),
    "no elements, and sides too large for an array": lambda raw, header: any(
        map(_too_large_for_an_array, _fields(header))
    ),
}
"""Why we refuse what the package accepts: a name, and whether it is so of a header."""


def reasons(content):
    raw = content[8 : 8 + int.from_bytes(content[:8], "little")]
    header = json.loads(raw, object_pairs_hook=_Object)
    return {name for name, holds in DIFFERENCES.items() if holds(raw, header)}


def compare(content):
    """Assert that both read the same; tells who accepted it."""
    found, expected = ours(content), theirs(content)
    if found is not None:
        assert expected is not None, "we accept what the reference refuses"
        assert found == expected
        return "both accept"
    if expected is not None:
        assert reasons(content), "we refuse what the reference accepts"
        return "only the reference accepts"
    return "both refuse"


@steady(100)
@given(files())
def test_valid_files_are_read_alike(file):
    header, data = file
    assert compare(file_bytes(header, data)) == "both accept"


@steady(500)
@given(st.data())
def test_damaged_files_are_read_alike(data):
    header, tensors = data.draw(files(max_tensors=2))
    event(compare(data.draw(edited(file_bytes(header, tensors)))))


_spaces = st.text(st.sampled_from(" \t\r\n"), max_size=2)
_numbers = st.sampled_from(
    ["0", "1", "2", "4", "8", "-0", "-1", "0.0", "1.0", "1e0", "4294967296", str(2**63), str(2**64)]
)


@st.composite
def spelled(draw, text):
    """A JSON string with some of its characters escaped."""
    out = []
    for char in text:
        how = draw(st.integers(0, 3))
        if how == 0 or char in '"\\' or char < " ":
            units = char.encode("utf-16-be")
            out += [f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2)]
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


_values = st.recursive(
    st.sampled_from(["null", "true", "0", "-0", "-1.5e3", '""', '"\\n"', "1e400", "9" * 30])
    | st.text(max_size=3).map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: "[" + ",".join(parts) + "]")
        | st.lists(inner, max_size=2).map(
            lambda parts: "{" + ",".join(f'"k{n}":{v}' for n, v in enumerate(parts)) + "}"
        )
    ),
    max_leaves=5,
)
"""Values of fields that readers must ignore."""


@st.composite
def texts(draw):
    """Headers that are valid or nearly so, in every spelling JSON has for them."""
    parts = []
    position = 0
    chosen = draw(st.lists(names | st.sampled_from(["", "a\0"]), max_size=3, unique=True))
    for name in chosen:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 2, 4, 8, 2**40]), max_size=3))
        count = math.prod(shape) * dtype.bits // 8
        if count > 100:
            shape, count = [*shape, 0], 0
        sizes = [str(size) for size in shape]
        if sizes and draw(st.integers(0, 9)) == 0:
            sizes[0] = draw(_numbers)
        fields = [
            '"dtype":' + draw(spelled(dtype.value)),
            draw(spelled("shape")) + ":[" + ",".join(sizes) + "]",
            f'"data_offsets":[{position},{position + count}]',
        ]
        if draw(st.integers(0, 3)) == 0:
            fields.append(draw(spelled(draw(names))) + ":" + draw(_values))
        if draw(st.integers(0, 19)) == 0:
            fields.pop(draw(st.integers(0, len(fields) - 1)))
        fields = draw(st.permutations(fields))
        parts.append(draw(spelled(name)) + draw(_spaces) + ":{" + ",".join(fields) + "}")
        position += count
    if draw(st.booleans()):
        beside = draw(
            st.sampled_from(["null", "{}", '{"a":"b"}', '{"a":"\\u0000"}', "[]", '{"a":1}'])
        )
        parts.append(draw(spelled("__metadata__")) + ":" + beside)
    parts = draw(st.permutations(parts))
    glue = draw(_spaces) + "," + draw(_spaces)
    text = "{" + draw(_spaces) + glue.join(parts) + "}" + draw(_spaces)
    return file_bytes(text, bytes(position))


@steady(300)
@given(texts())
def test_headers_in_any_spelling_are_read_alike(content):
    event(compare(content))


_T = json.dumps(entry())
STRICTER = [
    ("white space before the header", file_bytes(' {"t":' + _T + "}", bytes(4))),
    ("a key twice in one object", file_bytes('{"t":' + _T + ',"t":' + _T + "}", bytes(4))),
    ("a key twice in one object", file_bytes('{"__metadata__":{"a":"1","a":"2"}}')),
    ("a key twice in one object", file_bytes('{"t":' + _T[:-1] + ',"x":1,"x":2}}', bytes(4))),
    ("an empty name", file_bytes({"": entry()}, bytes(4))),
    ("NUL in a name", file_bytes({"a\0": entry()}, bytes(4))),
    ("a name above the limit", file_bytes({"n" * 4097: entry()}, bytes(4))),
    ("more dimensions than numpy has", file_bytes({"t": entry(shape=[1] * 65)}, bytes(4))),
    ("a tensor described by a list", file_bytes('{"t":["F32",[1],[0,4]]}', bytes(4))),
    ("a dtype as an object", file_bytes({"t": entry({"F32": None})}, bytes(4))),
    (
        "no elements, and sides too large for an array",
        file_bytes({"t": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}),
    ),
]


@pytest.mark.parametrize(("reason", "content"), STRICTER, ids=[reason for reason, _ in STRICTER])
def test_every_listed_difference_is_one(reason, content):
    assert compare(content) == "only the reference accepts"
    assert reasons(content) == {reason}


def test_every_difference_has_an_example():
    assert {reason for reason, _ in STRICTER} == set(DIFFERENCES)


def _ignored(value, key='"x"'):
    return file_bytes('{"t":' + _T[:-1] + f",{key}:{value}" + "}}", bytes(4))


BOTH_REFUSE = {
    "-0 as size": file_bytes('{"t":' + _T.replace("[1]", "[-0]").replace("4]", "0]") + "}"),
    "-0 as offset": file_bytes('{"t":' + _T.replace("[0,", "[-0,") + "}", bytes(4)),
    "a product beyond 64 bits, then 0": file_bytes(
        {"t": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}
    ),
    "a lone surrogate in metadata": file_bytes('{"__metadata__":{"a":"\\ud800"}}'),
    "a lone surrogate in an ignored field": _ignored('"\\udfff"'),
    "a lone surrogate as ignored key": _ignored("1", '"\\ud800"'),
    "a float beyond any double": _ignored("1e400"),
    "an integer beyond any double": _ignored("9" * 400),
    "126 lists in a tensor in a header": _ignored("[" * 126 + "]" * 126),
}


@pytest.mark.parametrize("reason", BOTH_REFUSE)
def test_what_the_reference_refuses_is_refused(reason):
    assert compare(BOTH_REFUSE[reason]) == "both refuse"


BOTH_ACCEPT = {
    "125 lists in a tensor in a header": _ignored("[" * 125 + "]" * 125),
    "a number in 125 lists": _ignored("[" * 125 + "1" + "]" * 125),
    "a large double": _ignored("1e308"),
    "a tiny double": _ignored("1e-400"),
    "an integer of 300 digits": _ignored("9" * 300),
    "minus zero where it is ignored": _ignored("-0"),
    "a name of DEL and C1 controls": file_bytes('{"\x7f\x9b":' + _T + "}", bytes(4)),
    "a noncharacter": file_bytes('{"\\uffff":' + _T + "}", bytes(4)),
    "64 dimensions": file_bytes({"t": entry(shape=[1] * 64)}, bytes(4)),
}


@pytest.mark.parametrize("reason", BOTH_ACCEPT)
def test_what_the_reference_accepts_is_accepted(reason):
    assert compare(BOTH_ACCEPT[reason]) == "both accept"
