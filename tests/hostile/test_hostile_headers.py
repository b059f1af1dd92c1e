"""B1 B2 B3 B5 B16 and the g rows: every hostile header is refused with the right error, cheaply.

The error names the tensor and the numbers; nothing is imported, executed or opened for it.
"""

import os
import tracemalloc

import pytest
import safetensors

import weighlock
from hostile.make import ROWS, entry, file_bytes, four_floats
from hostile.watching import watched
from weighlock.errors import FormatError, HeaderError, LimitExceeded
from weighlock.limits import Limits

SMALL = 1_000_000
"""Bytes that may be allocated beyond a few copies of the file itself."""


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """What is imported or cached on first use must not look like the file's doing."""
    weighlock.open(four_floats()).load()
    weighlock.open(
        file_bytes('{"\\u0061":' + '{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}', b"12")
    )
    for content in (b"", b"\x08", file_bytes("{]"), file_bytes(b'{"\xff"}')):
        with pytest.raises(FormatError):
            weighlock.open(content)


def refusal(row, target, *allowed):
    """The error a row raises, after checking what raising it has cost."""
    tracemalloc.start()
    try:
        with watched(*allowed) as seen, pytest.raises(row.error) as caught:
            weighlock.open(target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == []
    assert peak < SMALL + 8 * len(row.content)
    return caught.value


def check_message(row, error):
    message = str(error)
    for fragment in row.says:
        assert fragment in message
    assert message.isprintable(), "names are quoted, so that no error can write to a terminal"
    assert len(message) < 20_000, "a hostile file must not write a novel"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_hostile_bytes_are_refused(row):
    check_message(row, refusal(row, row.content))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_hostile_file_is_refused_and_closed(row, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(row.content)
    before = os.listdir("/proc/self/fd")
    error = refusal(row, path, path)
    check_message(row, error)
    if isinstance(error, FormatError):
        assert str(path) in str(error)
        assert error.source == str(path)
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == [path.name]


def test_the_watch_sees_what_must_not_happen(tmp_path):
    with watched(tmp_path) as seen:
        open(os.devnull, "rb").close()
        open(tmp_path / "new", "wb").close()
        os.listdir("/")
        eval("1")
    told = "\n".join(seen)
    for fragment in (os.devnull, "new", "os.listdir '/'", "compile", "exec"):
        assert fragment in told
    with watched(tmp_path) as seen:
        open(tmp_path / "new", "rb").close()
        os.listdir(tmp_path)
    assert seen == []


def test_rows_have_distinct_names_and_contents():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len({row.content for row in ROWS}) == len(ROWS)


def test_header_longer_than_the_limit_is_not_read(tmp_path):
    path = tmp_path / "sparse.safetensors"
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(8 + 100_000_001)
    tracemalloc.start()
    try:
        with watched(path) as seen, pytest.raises(HeaderError, match="100,000,001"):
            weighlock.open(path)
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()
    assert seen == []


@pytest.mark.parametrize("size", range(8, 9 + len(b'{"t":')))
def test_every_cut_through_a_header_is_refused(size):
    with pytest.raises(FormatError):
        weighlock.open(four_floats()[:size])


def test_limits_of_the_caller_are_heeded():
    header = {
        "long name": entry("U8", (1, 1, 1), (0, 1)),
        "b": entry("U8", (1,), (1, 2)),
    }
    content = file_bytes(header, b"\0\0")
    assert set(weighlock.open(content)) == set(header)
    for limits, error in (
        (Limits(tensors=1), LimitExceeded),
        (Limits(header_bytes=20), (LimitExceeded, HeaderError)),
        (Limits(name_bytes=8), (LimitExceeded, FormatError)),
        (Limits(rank=2), (LimitExceeded, FormatError)),
    ):
        with pytest.raises(error):
            weighlock.open(content, limits)


def test_limits_hold_on_the_way_of_escaped_headers_too():
    content = file_bytes(
        '{"\\u0061":{"dtype":"U8","shape":[],"data_offsets":[0,1]},'
        '"b":{"dtype":"U8","shape":[],"data_offsets":[1,2]}}',
        b"\0\0",
    )
    assert set(weighlock.open(content)) == {"a", "b"}
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(content, Limits(tensors=1))
    assert (caught.value.limit, caught.value.asked, caught.value.allowed) == ("tensors", 2, 1)


@pytest.mark.parametrize(
    "shape", [(1,) * 64, (0,) * 64, (2,) + (1,) * 62 + (2,)], ids=["ones", "zeros", "twos"]
)
def test_as_many_dimensions_as_are_accepted_can_be_loaded(shape):
    size = 4 if shape[0] == 2 else shape[0]
    ref = weighlock.open(file_bytes({"t": entry("U8", shape, (0, size))}, bytes(size)))["t"]
    assert ref.load().shape == shape
    assert ref[...].shape == shape
    assert ref[0:1].shape == (min(1, shape[0]), *shape[1:])
    assert tuple(ref.torch().shape) == shape


@pytest.mark.parametrize("dtype", ["U8", "F4", "F64"])
@pytest.mark.parametrize(
    "shape",
    [(0,), (0, 2**30), (2**55, 0), (0, 2**59), (2**61, 0), (0, 2**61), (2**40, 2**40, 0)],
    ids=str,
)
def test_whatever_shape_is_accepted_can_be_loaded(dtype, shape):
    try:
        ref = weighlock.open(file_bytes({"t": entry(dtype, shape, (0, 0))}))["t"]
    except FormatError:
        return
    assert ref.load().shape == shape
    assert ref[0:0].shape == (0, *shape[1:])
    assert ref.torch().numel() == 0


def test_the_longest_name_that_is_allowed_is_read():
    name = "é" * 2048
    assert list(weighlock.open(file_bytes({name: entry()}, bytes(4)))) == [name]


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        "{} \n\t\r ",
        '{"__metadata__":null}',
        '{"__metadata__":{}}',
        '{"__metadata__":{"a":""}}',
        '{ "t" : { "data_offsets" :\n[0,0], "shape":[ 0 ] ,"dtype"\t:"F64","extra":[{"a":[1.5]}]}}',
        '{"\\ud83d\\ude00\\/\\n":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}',
        '{"\x7f\u202e":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}',
    ],
)
def test_unusual_but_valid_headers_are_read(header):
    content = file_bytes(header)
    assert set(weighlock.open(content)) == {name for name, _ in safetensors.deserialize(content)}


def test_safetensors_file_is_never_taken_for_an_archive(tmp_path):
    """B10: with a header of exactly this length, a file begins like a ZIP archive."""
    length = int.from_bytes(b"PK\x03\x04", "little")
    header = b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path = tmp_path / "polyglot.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + b"data")
    with weighlock.open(path) as catalog, safetensors.safe_open(path, "np") as reference:
        assert catalog["t"].load().tobytes() == reference.get_tensor("t").tobytes() == b"data"
    path.unlink()
