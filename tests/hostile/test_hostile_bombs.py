"""B4 and its kin: files that are small to send and large to read, in time or in memory.

Each bomb is written to disk piece by piece and opened in a fresh process, whose peak is measured.
That process may use two gigabytes and twenty seconds: a bomb that goes off fails its test, not the
machine.
"""

import itertools
import json
import sys

import numpy as np
import pytest

import weighlock
from hostile.make import entry, file_bytes
from weighlock.errors import LimitExceeded
from weighlock.limits import Limits

MOST_MEGABYTES = 400
"""What a header of 100 MB may cost, and a smaller one in proportion: a few copies of itself."""

OPEN = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
import weighlock
try:
    with weighlock.open(sys.argv[1]) as catalog:
        told = {"error": None, "tensors": len(catalog)}
except Exception as error:
    told = {"error": type(error).__name__, "limit": getattr(error, "limit", None)}
    told |= {"retryable": getattr(error, "retryable", None), "length": len(str(error))}
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        told["megabytes"] = int(line.split()[1]) / 1024
print(json.dumps(told))
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


@pytest.fixture
def explode(tmp_path, run_python):
    """Writes a header from its parts, opens it in a process of its own, tells what happened."""

    def run(parts, name="bomb.safetensors", prefix=True):
        path = tmp_path / name
        with open(path, "wb") as file:
            file.write(bytes(8 if prefix else 0))
            for part in parts:
                file.write(part)
            if prefix:
                length = file.tell() - 8
                file.seek(0)
                file.write(length.to_bytes(8, "little"))
        most = 80 + (MOST_MEGABYTES - 80) * path.stat().st_size / 1e8
        told = json.loads(run_python(OPEN, path).stdout)
        path.unlink()
        assert told["megabytes"] < most, told
        assert told.get("length", 0) < 20_000, told
        return told

    return run


ALPHABET = np.frombuffer(
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_", np.uint8
)


def numbered(template, count, digits=4):
    """`count` copies of a template whose `@@@@` is another name each time."""
    row = np.frombuffer(template, np.uint8)
    first = template.index(b"@" * digits)
    for start in range(0, count, 1_000_000):
        numbers = np.arange(start, min(count, start + 1_000_000))
        rows = np.tile(row, (len(numbers), 1))
        for digit in range(digits):
            rows[:, first + digit] = ALPHABET[numbers // 64 ** (digits - 1 - digit) % 64]
        yield rows.tobytes()


def repeated(text, count):
    step = max(1, 1_000_000 // len(text))
    for start in range(0, count, step):
        yield text * min(step, count - start)


ZERO_SIZE = b'"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
LAST = b'"t":{' + ZERO_SIZE + b"}"


def around(first, parts, last):
    return itertools.chain([first], parts, [last])


REFUSED = ("LimitExceeded", "HeaderError", "LayoutError")


@linux
@pytest.mark.slow
def test_ten_million_tiny_tensors_are_refused_before_they_are_built(explode):
    told = explode(around(b"{", numbered(b'"@@@@":{},', 9_500_000), LAST))
    assert told["error"] in REFUSED


@linux
@pytest.mark.slow
def test_tiny_tensors_behind_an_escape_are_refused(explode):
    told = explode(around(b'{"\\u0061":{},', numbered(b'"@@@@":{},', 3_000_000), LAST))
    assert told["error"] in REFUSED


@linux
@pytest.mark.slow
def test_one_zero_size_tensor_above_the_limit_is_refused(explode):
    told = explode(around(b"{", numbered(b'"@@@@":{' + ZERO_SIZE + b",", 1_000_000), LAST))
    assert (told["error"], told["limit"]) == ("LimitExceeded", "tensors")


@linux
@pytest.mark.slow
def test_tensors_that_hide_their_offsets_behind_escapes_are_refused(explode):
    hidden = ZERO_SIZE.replace(b"data_offsets", b"data_offset\\u0073")
    told = explode(around(b"{", numbered(b'"@@@@":{' + hidden + b",", 1_000_000), LAST))
    assert told["error"] in REFUSED


@linux
@pytest.mark.slow
def test_names_tied_by_metadata_count_as_tensors(explode):
    aliases = numbered(b'"@@@@":"t",', 1_000_000)
    told = explode(around(b'{"__metadata__":{', aliases, b'"":""},' + LAST))
    assert told["error"] in REFUSED


@linux
@pytest.mark.slow
def test_four_million_entries_of_metadata_stay_within_memory(explode):
    entries = numbered(b'"@@@@":"",', 4_000_000)
    told = explode(around(b'{"__metadata__":{', entries, b'"":""},' + LAST))
    assert told["error"] in REFUSED


@linux
@pytest.mark.slow
@pytest.mark.parametrize("end", [b"0", b"-1"], ids=["zeros", "a negative one at the end"])
def test_shape_of_twenty_million_sizes_is_refused(explode, end):
    shape = around(b'{"t":{"dtype":"U8","shape":[', repeated(b"0,", 20_000_000), end)
    told = explode(itertools.chain(shape, [b'],"data_offsets":[0,0]}}']))
    assert told["error"] in REFUSED


@linux
@pytest.mark.slow
def test_shape_of_large_sizes_is_not_multiplied_out(explode):
    # The product has 12 million bits, and is made factor by factor: quadratic in the file's length.
    sizes = repeated(str(2**63 - 1).encode() + b",", 200_000)
    shape = around(b'{"t":{"dtype":"U8","shape":[', sizes, b"1")
    told = explode(itertools.chain(shape, [b'],"data_offsets":[0,0]}}']))
    assert told["error"] in REFUSED


def ignored(parts):
    return itertools.chain(
        [b'{"t":{"ignored":['], parts, [b'0],"dtype":"U8","shape":[0],"data_offsets":[0,0]}}']
    )


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"[],", 17_000_000),
        (b",", 30_000_000),
        (b"[", 30_000_000),
        (b'{"":', 8_000_000),
        (b"0,", 20_000_000),
        (b"9" * 4000 + b",", 7_000),
        (b"9" * 5000 + b",", 6_000),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, bytes) else "",
)
def test_ignored_field_cannot_be_a_bomb(explode, text, count):
    assert explode(ignored(repeated(text, count)))["error"] in REFUSED


@linux
@pytest.mark.slow
def test_decoys_of_offsets_do_not_buy_room_for_a_bomb(explode):
    # Each decoy makes the reader believe in one more tensor, and allow for what that would need.
    decoys, lists = repeated(b'"data_offsets",', 300_000), repeated(b"[],", 10_000_000)
    assert explode(ignored(itertools.chain(decoys, lists)))["error"] in REFUSED


@linux
@pytest.mark.slow
def test_name_of_thirty_megabytes_is_refused_briefly(explode):
    name = around(b'{"', repeated(b"n", 30_000_000), b'":{' + ZERO_SIZE + b"}")
    assert explode(name)["error"] in REFUSED


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        lambda: around(b'{"weight_map":{', numbered(b'"@@@@":"s",', 3_000_000), b'"":""}}'),
        lambda: around(
            b'{"weight_map":{},"metadata":{"x":[', repeated(b"[],", 17_000_000), b"0]}}"
        ),
        lambda: around(b'{"weight_map":', repeated(b"[", 30_000_000), b""),
        lambda: around(b'{"weight_map":{"t":', repeated(b"9", 30_000_000), b"}}"),
    ],
    ids=["tensors", "lists", "depth", "digits"],
)
def test_index_cannot_be_a_bomb(explode, parts):
    told = explode(parts(), name="model.safetensors.index.json", prefix=False)
    assert told["error"] in REFUSED


def test_index_with_too_many_files_is_refused_without_looking_for_them(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    weight_map = {f"t{n}": f"s{n}.safetensors" for n in range(10_001)}
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(path)
    assert (caught.value.limit, caught.value.asked, caught.value.allowed) == (
        "shards",
        10_001,
        10_000,
    )
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(path, Limits(tensors=10_000))
    assert caught.value.limit == "tensors"


def zero_size_file(count, first="0"):
    entries = b"".join(numbered(b'"@@@@":{' + ZERO_SIZE + b",", count - 1))
    return file_bytes(b"{" + entries + f'"{first}":'.encode() + b"{" + ZERO_SIZE + b"}")


def steps_to_open(content):
    """Lines of Python run while opening: a measure that is the same on every machine."""
    steps = 0

    def count(frame, event, argument):
        nonlocal steps
        steps += 1
        return count

    sys.settrace(count)
    try:
        weighlock.open(content)
    finally:
        sys.settrace(None)
    return steps


@pytest.mark.parametrize("first", ["last", "\\u006cast"], ids=["plain", "escaped"])
def test_work_grows_with_the_number_of_tensors_and_no_faster(first):
    few, twice, four_times = (
        steps_to_open(zero_size_file(n, first=first)) for n in (500, 1000, 2000)
    )
    assert twice < 2.1 * few
    assert four_times < 2.1 * twice


@pytest.mark.slow
def test_two_hundred_thousand_tensors_are_found_in_any_order():
    count = 200_000
    order = np.random.default_rng(0).permutation(count).tolist()
    header = {f"t{n}": entry("U8", (1,), (n, n + 1)) for n in order}
    catalog = weighlock.open(file_bytes(header, bytes(n % 251 for n in range(count))))
    assert len(catalog) == catalog.nbytes == count
    for n in (0, 1, 77_777, count - 1):
        assert catalog[f"t{n}"].load().tolist() == [n % 251]
