"""E4 and E7: messages made to lie, to cost more than they weigh, or to dial somebody else.

Each is refused by an error of our tree before anything is built from it, imported, opened or
dialled: an audit hook watches. So is every change of one byte of a real message, unless it is an
object still.
"""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

import weighlock
from hostile.watching import watched
from unit.message_samples import ARRAYS, VALUES
from weighlock import Access, pack, unpack
from weighlock.errors import LimitExceeded, MessageInvalid, Refused, WeighlockError
from weighlock.tensors.ref import ArrayRef

URL = "http://127.0.0.1:9/s/" + 32 * "0" + "/model.safetensors"
NAMES = ("urls", "sizes", "names", "dtypes", "ranks", "dims", "owners", "offsets", "root")


def message(tree, segments=b"", *, length=None, version=1):
    """A message of that tree, right or wrong."""
    text = tree if isinstance(tree, bytes) else msgspec.msgpack.encode(tree)
    length = len(text) if length is None else length
    head = b"\x89WLM" + bytes([version, 0, 0, 0]) + length.to_bytes(4, "little") + bytes(4)
    body = head + text
    return body + bytes(-len(body) % 16) + segments if segments else body


def tree(root=None, **columns):
    """A tree with nothing in it but what is said."""
    filled = {"urls": [], "sizes": [], "names": [], "dtypes": [], "ranks": [], "dims": []}
    filled |= {"owners": [], "offsets": [], "root": root} | columns
    return [filled[name] for name in NAMES]


def tensors(*rows, root=None, urls=(URL,), sizes=(1000,)):
    """A tree with rows of (name, dtype, shape, owner, offset)."""
    if root is None:
        root = [Ext(3, bytes([number])) for number in range(len(rows))]
    return tree(
        root,
        urls=list(urls),
        sizes=list(sizes),
        names=[row[0] for row in rows],
        dtypes=[row[1] for row in rows],
        ranks=[len(row[2]) for row in rows],
        dims=[size for row in rows for size in row[2]],
        owners=[row[3] for row in rows],
        offsets=[row[4] for row in rows if row[3] is not None],
    )


def mark(kind, *parts):
    return [Ext(1, bytes([kind])), *parts]


ROW = ("a", "F32", [2], 0, 100)
INLINE = ("a", "F32", [2], None, None)


def deep(head, count=100_000):
    return msgspec.msgpack.encode(tree(msgspec.Raw(head * count + b"\xc0")))


def one_hash(count, *after):
    """Tuples that Python hashes alike, each followed by `after`: hashes of ints wrap around."""
    alike = [n * (2**61 - 1) for n in range(8)]
    digits = [[number >> 3 * place & 7 for place in range(6)] for number in range(count)]
    return [x for row in digits for x in (mark(1, *(alike[digit] for digit in row)), *after)]


HOSTILE = {
    "empty": (b"", "too few"),
    "a head only": (message(b""), "not one value"),
    "another magic": (b"PK\x03\x04" + bytes(40), "starts with"),
    "a later version": (message(tree(), version=9), "version 9"),
    "a head with more": (b"\x89WLM\x01\0\0\1" + message(tree())[8:], "more than a head"),
    "a tree longer than the message": (message(tree(), length=500), "announces"),
    "a tree longer than allowed": (message(tree(), length=2**32 - 1), LimitExceeded),
    "bytes after the end": (message(tree()) + b"\0", "ends at byte"),
    "bytes after the tree": (message(msgspec.msgpack.encode(tree()) + b"\xc0"), "not one value"),
    "not a tree": (message({"a": 1}), "not that of a message"),
    "too few columns": (message(tree()[:-1]), "not that of a message"),
    "a list of 2**32 announced": (message(b"\xdd\xff\xff\xff\xff"), LimitExceeded),
    "a list of 10**8 inside": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\xdd\x05\xf5\xe1\x00")))),
        LimitExceeded,
    ),
    "a map of 10**6 inside": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\xdf\x00\x05\xa1\x20")))),
        "announces",
    ),
    "lists nested 10**5 deep": (message(deep(b"\x91")), LimitExceeded),
    "maps nested 10**5 deep": (message(deep(b"\x81\xa1a")), LimitExceeded),
    "tuples nested 10**5 deep": (message(deep(b"\x92\xd4\x01\x01")), LimitExceeded),
    "a million empty lists": (message(tree([[] for _ in range(1_000_000)])), LimitExceeded),
    "text that is not text": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\xa2\xff\xfe")))),
        "cannot be read",
    ),
    "a key twice": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\x82\xa1a\x01\xa1a\x02")))),
        "one encoding",
    ),
    "a number longer than need be": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\xcd\x00\x01")))),
        "one encoding",
    ),
    "a float in four bytes": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\xca\x00\x00\x00\x00")))),
        "one encoding",
    ),
    "a key that is a list": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\x81\x90\x01")))),
        "not text",
    ),
    "a timestamp": (
        message(msgspec.msgpack.encode(tree(msgspec.Raw(b"\xd6\xff\0\0\0\0")))),
        "by itself",
    ),
    "an unknown mark": (message(tree(mark(99, 1))), "means nothing"),
    "a mark of two bytes": (message(tree([Ext(1, b"\1\1"), 1])), "means nothing"),
    "a mark alone": (message(tree(Ext(1, b"\1"))), "code 1"),
    "an unknown extension": (message(tree(Ext(77, b"\1"))), "code 77"),
    "the name of a real class": (message(tree(mark(16, "os.system", "true"))), "not a registered"),
    "a name that is not text": (message(tree(mark(16, 3, 4))), "name and a value"),
    "a set of lists": (message(tree(mark(2, [1]))), "cannot be in one"),
    "a set with a value twice": (message(tree(mark(2, 1, 1))), "twice"),
    "a dict with a key twice": (message(tree(mark(4, 1, 2, 1, 3))), "twice"),
    "a dict with half a pair": (message(tree(mark(4, 1))), "without a value"),
    "a dict with a list as key": (message(tree(mark(4, [1], 2))), "cannot be one"),
    "a set in another order": (message(tree(mark(2, 2, 1))), "order of its encodings"),
    "a dict that could be a map": (message(tree(mark(4, "a", 1))), "not written as a map"),
    "a dict of nothing": (message(tree(mark(4))), "not written as a map"),
    "long bytes in the tree": (message(tree([bytes(4096)])), "not in a segment"),
    "short bytes in a segment": (
        message(
            tensors(("bytes", "U8", [1], None, None), root=Ext(4, b"\0"), urls=[], sizes=[]), b"x"
        ),
        "4,096 and more",
    ),
    "bytes of another name": (
        message(
            tensors(("b", "U8", [4096], None, None), root=Ext(4, b"\0"), urls=[], sizes=[]),
            bytes(4096),
        ),
        "named 'bytes'",
    ),
    "a name that goes unsaid": (message(tensors(ROW, root={"a": Ext(3, b"\0")})), "unsaid"),
    "a place whose path is too long to write": (
        message(tree(mark(4, mark(5, b"\x7f" * 4000), mark(99)))),
        "at $[<int>]",
    ),
    "keys of one hash": (message(tree(mark(4, *one_hash(101, 1)))), "share one hash"),
    "a set of one hash": (
        message(tree(mark(2, *sorted(one_hash(60_000), key=msgspec.msgpack.encode)))),
        "share one hash",
    ),
    "a short int as a long one": (message(tree(mark(5, b"\1"))), "INT"),
    "an int of nothing": (message(tree(mark(5))), "INT"),
    "a complex of texts": (message(tree(mark(6, "1", "2"))), "COMPLEX"),
    "a date that is none": (message(tree(mark(7, "2026-02-30T00:00:00"))), "DATETIME"),
    "a date in other words": (message(tree(mark(7, "20260203T000000"))), "one encoding"),
    "a duration without end": (message(tree(mark(10, 2**60, 0, 0))), "TIMEDELTA"),
    "a scalar of objects": (message(tree(mark(11, "|O", b"12345678"))), "NUMPY_SCALAR"),
    "a scalar that is short": (message(tree(mark(11, "<f8", b"1"))), "NUMPY_SCALAR"),
    "a bool that is neither": (message(tree(mark(11, "|b1", b"\2"))), "NUMPY_SCALAR"),
    "a dtype of fields": (message(tree(mark(12, "f4,f4"))), "NUMPY_DTYPE"),
    "a dtype of objects": (message(tree(mark(12, "O"))), "NUMPY_DTYPE"),
    "a torch dtype that is a module": (message(tree(mark(14, "onnx"))), "TORCH_DTYPE"),
    "a torch size of texts": (message(tree(mark(13, "a"))), "TORCH_SIZE"),
    "a torch size of lists": (message(tree(mark(13, [1]))), "not made of plain values"),
    "a catalog of numbers": (message(tree(mark(15, {}, {"a": 1}))), "not a tensor"),
    "a catalog without metadata": (message(tree(mark(15, {}))), "metadata and tensors"),
    "a catalog with other metadata": (message(tree(mark(15, {"a": 1}, {}))), "not text"),
    "a tensor that is not there": (message(tree(Ext(3, b"\0"))), "named after 0 of 0"),
    "a tensor out of turn": (
        message(tensors(ROW, ("b", "F32", [2], 0, 200), root=[Ext(3, b"\1"), Ext(3, b"\0")])),
        "in order",
    ),
    "a tensor that is not used": (message(tensors(ROW, root=[])), "the object 0"),
    "a number longer than a number": (message(tensors(ROW, root=Ext(3, b"\0\0"))), "2 bytes"),
    "columns of two lengths": (message(tree([], names=["a"])), "one length"),
    "a dimension too few": (
        message(
            tree([Ext(3, b"\0")], names=["a"], dtypes=["F32"], ranks=[2], dims=[1], owners=[None])
        ),
        "2 dimensions, 1 are there",
    ),
    "a dimension too many": (
        message([*tensors(ROW)[:5], [2, 1], *tensors(ROW)[6:]]),
        "the table has",
    ),
    "a negative number of dimensions": (
        message(
            tree([Ext(3, b"\0")], names=["a"], dtypes=["F32"], ranks=[-1], dims=[], owners=[None])
        ),
        "-1 dimensions",
    ),
    "many dimensions": (message(tensors(("a", "F32", [1] * 65, 0, 0))), LimitExceeded),
    "a negative size": (message(tensors(("a", "F32", [-1], 0, 100))), "negative"),
    "a size beyond all files": (message(tensors(("a", "F32", [2**62, 8], 0, 0))), "larger than"),
    "an unknown dtype": (message(tensors(("a", "float", [1], 0, 0))), "dtype 'float'"),
    "a tensor without a name": (message(tensors((None, "F32", [1], 0, 0))), "not a string"),
    "a name that no file holds": (message(tensors(("__metadata__", "F32", [1], 0, 0))), "reserved"),
    "an owner that is not there": (message(tensors(("a", "F32", [1], 3, 0))), "share 3"),
    "a negative owner": (message(tensors(("a", "F32", [1], -1, 0))), "share -1"),
    "a negative offset": (message(tensors(("a", "F32", [1], 0, -8))), "cannot start at -8"),
    "a tensor past the end of its share": (message(tensors(("a", "F32", [1], 0, 997))), "1,001"),
    "two tensors claiming one hole": (
        message(tensors(ROW, ("b", "F32", [2], 0, 100))),
        "two tensors claim byte 100",
    ),
    "two tensors that overlap": (
        message(tensors(ROW, ("b", "F32", [2], 0, 104))),
        "two tensors claim byte 104",
    ),
    "a share that holds nothing": (
        message(tensors(ROW, urls=[URL, URL + "2"], sizes=[1000, 1000])),
        "holds none",
    ),
    "one share of two sizes": (
        message(tensors(ROW, ("b", "F32", [2], 1, 0), urls=[URL, URL], sizes=[1000, 2000])),
        "one owner twice",
    ),
    "one share twice": (
        message(tensors(ROW, ("b", "F32", [2], 1, 200), urls=[URL, URL], sizes=[1000, 1000])),
        "one owner twice",
    ),
    "a share without a URL": (message(tensors(ROW, urls=[""])), "not sealed"),
    "a share of text": (message(tensors(ROW, sizes=["x"])), "not that of a message"),
    "a segment that is not there": (message(tensors(INLINE, urls=[], sizes=[])), "ends at byte"),
    "a segment that is short": (
        message(tensors(INLINE, urls=[], sizes=[]), b"1234567"),
        "ends at byte",
    ),
    "a segment that is long": (
        message(tensors(INLINE, urls=[], sizes=[]), b"123456789"),
        "are there",
    ),
    "an array that lies in a share": (message(tensors(ROW, root=[Ext(2, b"\0")])), "an array"),
    "bytes that lie in a share": (message(tensors(ROW, root=[Ext(4, b"\0")])), "to be bytes"),
    "bytes that are floats": (
        message(tensors(INLINE, urls=[], sizes=[], root=[Ext(4, b"\0")]), b"12345678"),
        "to be bytes",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_refused(name):
    body, expected = HOSTILE[name]
    kind = MessageInvalid if isinstance(expected, str) else expected
    with watched() as seen, pytest.raises(kind) as caught:
        unpack(body)
    assert seen == []
    assert (expected if isinstance(expected, str) else "") in str(caught.value)


def test_the_table_of_hostile_messages_is_right_but_for_one_thing():
    """Each is made by the same hands as these, which are messages."""
    assert unpack(message(tree([1, mark(1, 2)]))) == [1, (2,)]
    found = unpack(message(tensors(ROW, ("b", "F32", [2], 0, 108))))
    assert [ref.name for ref in found] == ["a", "b"]
    inline = unpack(message(tensors(INLINE, urls=[], sizes=[]), np.ones(2, "f4").tobytes()))
    assert inline[0].load().tolist() == [1, 1]


def test_a_gap_holds_nothing():
    body = bytearray(pack([np.ones(3, np.int8), np.ones(3, np.int8)]).seal())
    assert body[-16] == 0
    body[-14] = 1
    with pytest.raises(MessageInvalid, match="in the gap"):
        unpack(body)


def small_message():
    obj = {
        "round": 3,
        "w": np.zeros(20_000),
        "bias": np.ones(2, np.float16),
        3: (None, {1.5}, 2**70, np.float32(1)),
        "c": weighlock.Catalog({"w": ArrayRef.of("w", np.ones(1, np.int8))}, {"k": "v"}),
    }
    return pack(obj).seal("http://a:1/s/0/m")


def large_message():
    shared = np.arange(20_000, dtype=np.float32)
    obj = {
        "weights": {"layer.0": shared, "bias": np.ones(3, np.float16), "tied": shared},
        "values": [value for value in VALUES if not isinstance(value, bytes) or len(value) < 100],
        "arrays": ARRAYS[:3],
    }
    return pack(obj).seal(URL)


def objects_among(body, changes, check=unpack):
    """How many changed bodies are still messages; all others raise an error of ours."""
    count = 0
    changed = bytearray(body)
    with watched() as seen:
        for position in range(len(body)):
            for change in changes:
                changed[position] = body[position] ^ change
                try:
                    check(changed)
                    count += 1
                except WeighlockError:
                    pass
            changed[position] = body[position]
    assert seen == []
    return count


def test_every_change_of_one_byte_is_an_object_or_an_error_of_ours():
    body = small_message()
    assert len(body) < 350

    def has_one_encoding(changed):
        assert pack(unpack(changed)).seal() == changed

    assert 0 < objects_among(body, range(1, 256), has_one_encoding) < 255 * len(body)


def test_some_changes_of_every_byte_of_all_that_travels():
    body = large_message()
    assert 0 < objects_among(body, (1, 0x80, 0xFF, 0xC1)) < 4 * len(body)


def test_every_piece_of_a_message_is_refused():
    body = large_message()
    for length in range(len(body)):
        with pytest.raises(WeighlockError):
            unpack(body[:length])


ELSEWHERE = [
    "http://169.254.169.254/latest/meta-data",
    "http://localhost:22/s/0/model.safetensors",
    "http://127.0.0.1:9@10.0.0.1/s/0/model.safetensors",
    "http://127.0.0.1:90/s/0/model.safetensors",
    "https://allowed.example.evil.test/s/0/model.safetensors",
    "http://[::1]:9/s/0/model.safetensors",
    "file:///etc/passwd",
    "unix:///run/docker.sock",
    "/etc/passwd",
    "ftp://127.0.0.1:9/x",
    "http://127.0.0.1:9\r\n.evil.test/x",
    "http://127.0.0.1:99999/x",
    "\0",
    "gopher://x",
]


@pytest.mark.parametrize("url", ELSEWHERE)
def test_a_url_that_is_not_allowed_is_never_dialled(url):
    body = message(tensors(ROW, urls=[url]))
    access = Access(allow=["127.0.0.1:9", "allowed.example"])
    with watched() as seen:
        (ref,) = unpack(body, access=access)
        assert pack([ref]).seal() == body
        for use in (ref.load, lambda: ref[0:1], ref.torch, lambda: weighlock.resolve([ref])):
            with pytest.raises(Refused):
                use()
    assert [event for event in seen if event.startswith("socket.")] == []


def test_nothing_is_allowed_unless_it_is_said():
    (ref,) = unpack(message(tensors(ROW)))
    with watched() as seen, pytest.raises(Refused) as caught:
        ref.load()
    assert seen == []
    assert "access=Access(allow=['127.0.0.1:9'])" in str(caught.value)
    assert 32 * "0" not in str(caught.value)


def test_one_host_that_is_not_allowed_keeps_all_from_being_dialled():
    both = [ROW, ("b", "F32", [2], 1, 100)]
    body = message(tensors(*both, urls=[URL, "http://10.0.0.1:9/s/1/x"], sizes=[1000, 1000]))
    obj = unpack(body)
    with watched() as seen, pytest.raises(Refused, match=r"10\.0\.0\.1:9 is not allowed"):
        weighlock.resolve(obj, access=Access(allow=["127.0.0.1"]))
    assert seen == []


CONNECTS = """
import sys
import weighlock
ref, = weighlock.unpack(bytes.fromhex(sys.argv[1]), access=weighlock.Access(allow=["10.9.8.7"]))
for use in (ref.load, lambda: weighlock.resolve([ref])):
    try:
        use()
    except weighlock.errors.Refused:
        pass
"""


def test_strace_shows_no_connect(tmp_path):
    import shutil

    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    body = message(tensors(ROW, urls=["http://169.254.169.254/x"]))
    trace = tmp_path / "trace"
    subprocess.run(
        [
            "strace",
            "-f",
            "-o",
            trace,
            "-e",
            "trace=%network",
            sys.executable,
            "-c",
            CONNECTS,
            body.hex(),
        ],
        check=True,
        timeout=120,
    )
    assert "connect(" not in trace.read_text()
    assert "exited with 0" in trace.read_text()
