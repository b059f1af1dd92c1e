"""The pickle machine against Python's own: same values, opcodes and places; and its bounds."""

import io
import pickle
import pickletools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from property.strategies import steady
from weighlock.errors import FormatError, LimitExceeded, TruncatedFile, UnsupportedPickle
from weighlock.formats.inert_pickle import Feed, read_pickle
from weighlock.formats.pickle_records import Call, Global, PersistentId, SetRecord
from weighlock.limits import Limits

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

keys = st.one_of(
    st.text(max_size=8),
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.none(),
    st.binary(max_size=4),
)
leaves = st.one_of(
    keys,
    st.integers(-(2**600), 2**600),
    st.floats(allow_nan=False),
    st.text(st.characters(), max_size=300),
    st.binary(max_size=300),
    st.binary(max_size=10).map(bytearray),
    st.frozensets(st.integers(0, 9), max_size=4),
    st.sets(st.text(max_size=3), max_size=4),
    st.complex_numbers(allow_nan=False),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys.filter(lambda key: type(key) is not bytes), inner, max_size=5),
    ),
    max_leaves=12,
)


def plain(record):
    """What Python would have made of records, for the few builtins that pickles of values name."""
    kind = type(record)
    if kind in (list, tuple):
        return kind(map(plain, record))
    if kind is dict:
        return {key: plain(value) for key, value in record.items()}
    if kind is SetRecord:
        return (frozenset if record.frozen else set)(map(plain, record.values))
    if kind is not Call:
        return record
    made = {
        "set": lambda of=(): set(of),
        "frozenset": lambda of=(): frozenset(of),
        "bytearray": lambda of=b"", encoding=None: bytearray(of, encoding) if encoding else of,
        "bytes": lambda: b"",
        "complex": complex,
        "encode": lambda text, encoding: text.encode(encoding),
    }
    assert record.func.module in ("builtins", "__builtin__", "_codecs")
    return made[record.func.name](*map(plain, record.args))


def no_bytearrays(value):
    """The value with bytes for bytearrays, as the machine has them."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(no_bytearrays, value))
    if kind is dict:
        return {key: no_bytearrays(inner) for key, inner in value.items()}
    return bytes(value) if kind is bytearray else value


def drop(feed):
    """A feed of the same bytes that come one at a time."""
    stream = io.BytesIO(feed)
    return Feed(b"", lambda wanted: stream.read(1))


@steady(120)
@given(values, st.sampled_from(PROTOCOLS))
def test_values_are_those_of_python(value, protocol):
    raw = pickle.dumps(value, protocol)
    read = read_pickle(Feed(raw))
    assert no_bytearrays(plain(read.value)) == no_bytearrays(pickle.loads(raw))
    assert read.end == len(raw)


@steady(60)
@given(values, st.sampled_from(PROTOCOLS))
def test_globals_are_those_of_pickletools(value, protocol):
    raw = pickle.dumps(value, protocol)
    places = {}
    for opcode, argument, at in pickletools.genops(raw):
        if opcode.name == "GLOBAL":
            places.setdefault(tuple(argument.split(" ")), at)
        elif opcode.name == "STACK_GLOBAL":
            places.setdefault(at, None)
    found = read_pickle(Feed(raw)).globals
    named = {key for key in places if type(key) is tuple}
    assert named <= set(found)
    assert all(found[key] == places[key] for key in named)
    assert {found[key] for key in set(found) - named} <= {at for at in places if type(at) is int}


@steady(50)
@given(values, st.sampled_from(PROTOCOLS))
def test_byte_by_byte_is_the_same_as_whole(value, protocol):
    raw = pickle.dumps(value, protocol)
    whole, dripped = read_pickle(Feed(raw)), read_pickle(drop(raw))
    assert repr(plain(dripped.value)) == repr(plain(whole.value))
    assert (dripped.end, dripped.globals) == (whole.end, whole.globals)


@steady(60)
@given(values, st.sampled_from(PROTOCOLS), st.binary(max_size=40))
def test_what_follows_is_not_looked_at(value, protocol, more):
    raw = pickle.dumps(value, protocol)
    assert read_pickle(Feed(raw + more)).end == len(raw)
    assert read_pickle(Feed(more + raw), len(more)).end == len(more) + len(raw)


@steady(40)
@given(values, st.sampled_from(PROTOCOLS), st.data())
def test_every_prefix_is_truncated(value, protocol, data):
    raw = pickle.dumps(value, protocol)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for feed in (Feed(cut), drop(cut)):
        with pytest.raises(FormatError) as caught:
            read_pickle(feed)
        assert 0 <= caught.value.offset <= len(cut)


@steady(300)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_pickle_or_an_error(raw):
    told = []
    for feed in (Feed(raw), drop(raw)):
        try:
            told.append(read_pickle(feed).end)
        except (FormatError, LimitExceeded) as error:
            told.append((type(error), str(error)))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("opcodes", "value"),
    [
        (b"I42\n", 42),
        (b"I01\n", True),
        (b"I00\n", False),
        (b"I-7\n", -7),
        (b"L42L\n", 42),
        (b"L42\n", 42),
        (b"K\xff", 255),
        (b"M\xff\xff", 65535),
        (b"J\xff\xff\xff\xff", -1),
        (b"\x8a\x00", 0),
        (b"\x8a\x01\x80", -128),
        (b"\x8a\x02\x80\x00", 128),
        (b"\x8b\x01\x00\x00\x00\xff", -1),
        (b"F1.5\n", 1.5),
        (b"F-inf\n", float("-inf")),
        (b"G" + struct.pack(">d", 0.1), 0.1),
        (b"S'a\\n\\x41\\101\\\\'\n", "a\nAA\\"),
        (b'S"it\'s"\n', "it's"),
        (b"T\x02\x00\x00\x00ab", "ab"),
        (b"U\x02ab", "ab"),
        (b"U\x01\xff", b"\xff"),
        (b"Va\\u00e9\n", "aé"),
        (b"X\x02\x00\x00\x00\xc3\xa9", "é"),
        (b"X\x03\x00\x00\x00\xed\xa0\x80", "\ud800"),
        (b"\x8c\x02\xc3\xa9", "é"),
        (b"\x8d\x02\0\0\0\0\0\0\0\xc3\xa9", "é"),
        (b"B\x01\x00\x00\x00a", b"a"),
        (b"C\x01a", b"a"),
        (b"\x8e\x01\0\0\0\0\0\0\0a", b"a"),
        (b"\x96\x01\0\0\0\0\0\0\0a", b"a"),
        (b"(K\x01K\x02l", [1, 2]),
        (b"(K\x01K\x02d", {1: 2}),
        (b"(K\x01K\x02t", (1, 2)),
        (b"K\x01K\x02K\x03\x87", (1, 2, 3)),
        (b"]K\x01a(K\x02K\x03ee"[:-1], [1, 2, 3]),
        (b"}K\x01K\x02s(K\x03K\x04u", {1: 2, 3: 4}),
        (b"K\x01p7\n0g7\n", 1),
        (b"K\x01q\x070h\x07", 1),
        (b"K\x01r\x07\0\0\x000j\x07\0\0\0", 1),
        (b"K\x01\x94K\x02\x94h\x00\x87", (1, 2, 1)),
        (b"K\x012\x86", (1, 1)),
        (b"K\x01(K\x02K\x031", 1),
        (b"K\x01(0", 1),
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN", None),
    ],
)
def test_opcode(opcodes, value):
    for feed in (Feed(opcodes + b"."), drop(opcodes + b".")):
        read = read_pickle(feed)
        assert read.value == value
        assert type(read.value) is type(value)
        assert read.globals == {}


def test_calls_are_records():
    raw = b"cm\nf\n(K\x01tR}X\x01\x00\x00\x00aK\x02sb(K\x03K\x04u(K\x05e."
    made = read_pickle(Feed(raw)).value
    assert (made.func.module, made.func.name) == ("m", "f")
    assert (made.args, made.states, made.items, made.appended) == ((1,), [{"a": 2}], [(3, 4)], [5])


@pytest.mark.parametrize(
    "opcodes",
    [b"(K\x01im\nC\n", b"(cm\nC\nK\x01o", b"cm\nC\n(K\x01t\x81", b"cm\nC\n(K\x01t}\x92"],
    ids=["INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"],
)
def test_every_way_to_make_an_object(opcodes):
    read = read_pickle(Feed(opcodes + b"."))
    assert (read.value.func.module, read.value.func.name, read.value.args) == ("m", "C", (1,))
    assert read.globals == {("m", "C"): opcodes.index(b"im\n" if b"im\n" in opcodes else b"cm\n")}


def test_persistent_ids_are_kept_in_order_even_if_popped():
    read = read_pickle(Feed(b"K\x01Q0Pabc\n."))
    assert [record.pid for record in read.persistent_ids] == [1, "abc"]
    assert type(read.value) is PersistentId


def test_one_record_for_one_global():
    one, two = read_pickle(Feed(b"cm\nf\n\x8c\x01m\x8c\x01f\x93\x86.")).value
    assert one is two
    assert type(one) is Global


def test_sharing_and_cycles_are_kept():
    one, two = read_pickle(Feed(b"]q\x00h\x00\x86.")).value
    assert one is two
    loop = read_pickle(Feed(b"]q\x00h\x00a.")).value
    assert loop[0] is loop


DEEP = b"]" * 50 + b"a" * 49 + b"."


@pytest.mark.parametrize(
    ("raw", "limits", "limit"),
    [
        (DEEP, Limits(pickle_opcodes=98), "pickle_opcodes"),
        (b"N2" * 60 + b".", Limits(pickle_opcodes=100), "pickle_opcodes"),
        (b"N" + b"\x94" * 11 + b".", Limits(pickle_memo=10), "pickle_memo"),
        (
            b"N" + b"".join(b"q%c" % n for n in range(11)) + b".",
            Limits(pickle_memo=10),
            "pickle_memo",
        ),
        (
            b"N" + b"".join(b"p%d\n" % n for n in range(11)) + b".",
            Limits(pickle_memo=10),
            "pickle_memo",
        ),
        (b"X\x64\0\0\0" + bytes(3), Limits(pickle_bytes=50), "pickle_bytes"),
        (b"B\x64\0\0\0" + bytes(100) + b".", Limits(pickle_bytes=50), "pickle_bytes"),
        (b"\x8d" + b"\xff" * 8, Limits(), "pickle_bytes"),
        (b"V" + b"a" * 100, Limits(pickle_bytes=50), "pickle_bytes"),
    ],
)
def test_budget(raw, limits, limit):
    for feed in (Feed(raw), drop(raw)):
        with pytest.raises(LimitExceeded) as caught:
            read_pickle(feed, 0, limits)
        assert caught.value.limit == limit
        assert caught.value.asked > caught.value.allowed


@pytest.mark.parametrize(
    "raw",
    [
        b"(" + b"\x8f" * 70_000 + b"l.",
        b"N" + b"\x85" * 70_000 + b".",
        b"](" + b"M\1\2" * 70_000 + b"e.",
        b"N" + b"\x94" * 70_000 + b".",
        b"(" * 70_000 + b"N.",
        b"](" + b"\x8c\2ab" * 70_000 + b"e.",
        b"cos\nx\n)R(" + b"NN" * 70_000 + b"u.",
    ],
    ids=["sets", "tuples", "numbers", "memo", "marks", "texts", "items"],
)
def test_budget_of_what_is_made(raw):
    """A few kilobytes of a deflated pickle may make gigabytes."""
    with pytest.raises(LimitExceeded) as caught:
        read_pickle(Feed(raw), 0, Limits(pickle_made_bytes=2_000_000))
    assert caught.value.limit == "pickle_made_bytes"
    read_pickle(Feed(raw), 0, Limits(pickle_made_bytes=20_000_000))


def test_budget_of_bytes_holds_for_short_opcodes_too():
    with pytest.raises(LimitExceeded) as caught:
        read_pickle(drop(b"N0" * 500 + b"N."), 0, Limits(pickle_bytes=100))
    assert caught.value.limit == "pickle_bytes"


def test_exactly_the_budget_passes():
    assert read_pickle(Feed(DEEP), 0, Limits(pickle_opcodes=100)).end == 100
    assert read_pickle(Feed(b"N\x94\x94."), 0, Limits(pickle_memo=2)).value is None


@pytest.mark.parametrize(
    ("raw", "offset", "says"),
    [
        (b"NN\xff.", 2, "no such opcode"),
        (b"N\x82\x01.", 1, "EXT1"),
        (b"N\x97.", 1, "NEXT_BUFFER"),
        (b"N0R" + b"N" * 20, 2, "empty stack"),
        (b"Nt" + b"N" * 20, 1, "empty stack"),
        (b"Nh\x05" + b"N" * 20, 1, "memo"),
        (b"NX\x01\0\0\0\xff.", 1, "UTF-8"),
        (b"N]K\x01K\x02s.", 6, "list"),
        (b"N\x80\x06.", 1, "protocol 6"),
        (b"NIabc\n.", 1, "int"),
    ],
)
def test_errors_tell_the_byte(raw, offset, says):
    for start, before in ((0, 0), (3, 1000)):
        feed = Feed(b"..."[:start] + raw, label="x.pt", offset=before)
        with pytest.raises(UnsupportedPickle, match=says) as caught:
            read_pickle(feed, start)
        assert caught.value.offset == before + start + offset
        assert caught.value.source == "x.pt"
        assert f"{before + start + offset:,}" in str(caught.value)


def test_truncation_tells_the_end():
    with pytest.raises(TruncatedFile, match="byte 1,002") as caught:
        read_pickle(Feed(b"NN", offset=1000))
    assert caught.value.offset == 1002


def test_globals_tell_the_byte_in_the_source():
    read = read_pickle(Feed(b"N0cm\nf\n0cm\nf\n.", offset=1000))
    assert read.globals == {("m", "f"): 1002}
