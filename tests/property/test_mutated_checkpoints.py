"""B13: good checkpoints after a few edits are a catalog or an error of ours, in bounded space."""

import codecs
import contextlib
import io
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weighlock
from hostile.make_checkpoints import Member, archive, pickled
from hostile.watching import bounded, watched
from property.strategies import steady
from weighlock.errors import FormatError, LimitExceeded, WeighlockError
from weighlock.formats.scanning import scan_source
from weighlock.sources.local import BytesSource

MOST_LOADED = 1_000_000


def saved(**options):
    buffer = io.BytesIO()
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "a": tied,
        "b": tied.t(),
        "c": torch.ones(3, dtype=torch.bfloat16),
        "d": torch.nn.Parameter(torch.zeros(2, 2)),
        "e": torch.tensor(7, dtype=torch.int64),
        "f": torch.zeros(0, 4),
        "g": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }
    torch.save({"model": state, "epoch": 3, "names": ["x", ("y", 1.5)]}, buffer, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def goldens():
    files = {
        "zip": saved(),
        "zip4": saved(pickle_protocol=4),
        "legacy": saved(_use_new_zipfile_serialization=False),
        "legacy4": saved(_use_new_zipfile_serialization=False, pickle_protocol=4),
    }
    for content in files.values():
        assert _opened(content)  # imports what reading imports when it is first needed
        assert read_all(content)
    for codec in ("raw-unicode-escape", "cp437"):
        codecs.lookup(codec)
    return files


def read_all(content):
    """Open, load what is not huge, and scan; True if it was a catalog."""
    with bounded(content, most_loaded=3 * MOST_LOADED), watched() as seen:
        opened = _opened(content)
        with contextlib.suppress(FormatError, LimitExceeded):
            list(scan_source(BytesSource(content)))
    assert seen == []
    return opened


def _opened(content):
    try:
        catalog = weighlock.open(content)
    except (FormatError, LimitExceeded):
        return False
    for name, ref in catalog.items():
        assert ref.name == name
        if ref.nbytes > MOST_LOADED:
            continue
        with contextlib.suppress(WeighlockError):
            assert ref.load().shape == ref.shape
            assert sum(len(piece) for piece in ref.pieces(64)) == ref.nbytes
    return True


@st.composite
def edits(draw):
    """How to change bytes: flips, splices of the file into itself, holes, cuts."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        where, length = draw(st.floats(0, 1)), draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["flip", "set", "copy", "remove", "insert", "cut"]))
        found.append((kind, where, length, draw(st.floats(0, 1)), draw(st.integers(0, 255))))
    return found


def applied(content, changes):
    for kind, where, length, other, value in changes:
        at = int(where * len(content))
        rest = content[at + length :]
        if kind == "flip":
            flipped = bytes(b ^ (1 << value % 8) for b in content[at : at + 1])
            content = content[:at] + flipped + content[at + 1 :]
        elif kind == "set":
            content = content[:at] + bytes([value]) + content[at + 1 :]
        elif kind == "copy":
            start = int(other * len(content))
            content = (content[:at] + content[start : start + length] + rest)[: len(content)]
        elif kind == "remove":
            content = content[:at] + rest
        elif kind == "insert":
            content = content[:at] + bytes([value]) * length + content[at:]
        elif other > 0.8:
            content = content[:at]
    return content


@pytest.mark.parametrize("kind", ["zip", "zip4", "legacy", "legacy4"])
@steady(150)
@given(changes=edits())
def test_mutated_file(goldens, kind, changes):
    read_all(applied(goldens[kind], changes))


@pytest.mark.parametrize("kind", ["zip", "zip4"])
@steady(250)
@given(changes=edits())
def test_mutated_pickle_under_a_right_checksum(goldens, kind, changes):
    read_all(repacked(goldens[kind], lambda raw: applied(raw, changes)))


def repacked(content, change):
    """The same archive with another pickle and headers that agree with it."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        found = {info.filename: file.read(info) for info in file.infolist()}
    return archive(
        [Member(n, change(raw) if n.endswith("data.pkl") else raw) for n, raw in found.items()]
    )


@steady(200)
@given(body=st.lists(st.sampled_from([bytes([n]) for n in range(256)]), max_size=40))
def test_any_pickle_in_an_archive(goldens, body):
    read_all(
        archive([Member("a/data.pkl", pickled(b"".join(body))), Member("a/data/0", bytes(16))])
    )


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_every_truncation(goldens, kind):
    content = goldens[kind]
    for end in range(0, len(content), 17):
        assert not read_all(content[:end])


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_every_byte_flipped_once(goldens, kind):
    content = goldens[kind]
    for at in range(0, len(content), 5):
        read_all(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
