"""Scanning against `pickle` itself: what it would import is told of, or said to be unknown."""

import io
import json
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from property.strategies import steady
from weighlock.errors import FormatError, LimitExceeded, WeighlockError
from weighlock.formats.scanning import scan_source
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource

CALL = b"0cos\nsystem\n(S'true'\ntR."


def scanned(raw, limits=None):
    """Names, and the error if there was one."""
    names = []
    try:
        for found in scan_source(BytesSource(raw, "a file"), limits):
            names.append(f"{found.module}.{found.name}")
    except WeighlockError as error:
        return names, error
    return names, None


class Reached(BaseException):
    pass


class Watching(pickle.Unpickler):
    """Stops at the first thing it would import."""

    def find_class(self, module, name):
        raise Reached

    def persistent_load(self, pid):
        return [pid]


def reaches_an_import(raw, encoding="ASCII"):
    try:
        Watching(io.BytesIO(raw), encoding=encoding).load()
    except Reached:
        return True
    except Exception:
        pass
    return False


def test_a_brace_in_the_ninth_byte_hides_nothing():
    raw = b"S'aaaaaa{'\n" + CALL
    assert reaches_an_import(raw)
    assert scanned(raw) == (["os.system"], None)


@pytest.mark.parametrize(
    "before",
    [
        b"}\x8a\x09" + (1 << 70).to_bytes(9, "little") + b"Ns",
        b"}Nb",
        b"](u",
        b"]NaK\0Ns",
        b"I0x1\n",
        b"I5\0abc\n",
        b"L1_0L\n",
        b"F" + b"0" * 4095 + b"e1\n",
        b"Np+1\n",
        b"C\1a\x98",
        b"\x8b" + (5000).to_bytes(4, "little") + b"\1" * 5000,
    ],
    ids=lambda raw: repr(raw[:8]),
)
def test_what_only_the_machine_refuses_is_no_clean_bill(before):
    assert reaches_an_import(before + CALL)
    names, error = scanned(before + CALL)
    assert names == ["os.system"] or isinstance(error, FormatError)


def test_neither_are_more_opcodes_than_are_allowed():
    raw = b"N0" * 100 + b"N" + CALL
    names, error = scanned(raw, Limits(pickle_opcodes=50))
    assert names == []
    assert isinstance(error, LimitExceeded)


def test_a_pickle_that_python_reads_differently_from_a_file():
    """What is left of a frame is dropped when an opcode reaches out of it; in memory it is not."""
    hidden = b"N" + CALL
    frame = b"\x95" + (5).to_bytes(8, "little") + b"G" + bytes(8)
    raw = b"\x80\x04" + frame + b"0C" + bytes([len(hidden)]) + hidden + b"."
    assert reaches_an_import(raw)
    assert type(pickle.loads(raw)) is bytes
    names, error = scanned(raw)
    assert names or isinstance(error, FormatError)


def test_a_pickle_that_is_safetensors_as_well():
    """The header's length begins a line of text, which ends with the header."""
    data = b"\n" + CALL
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode().ljust(ord("V"))
    raw = len(header).to_bytes(8, "little") + header + data
    assert load(raw)["w"].tobytes() == data
    assert reaches_an_import(raw)
    assert scanned(raw)[0] == ["os.system"]


def test_a_pickle_that_is_a_tar_archive_as_well():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo((b"N" + CALL).decode()))
    raw = buffer.getvalue()
    assert reaches_an_import(raw)
    assert scanned(raw)[0] == ["os.system"]


ORDINARY = [
    b"This is a text\nof two lines\n",
    b"Introduction\n",
    b"I18n\nand so on\n",
    b"Build it with make\n" * 50,
    b"Usage: see below\n" * 50,
    b"License: MIT\n",
    b"Version 1\nof it\n",
    b"(Kid friendly)\n",
    b"get 1 of them\n",
    b'{"a": [1, 2]}',
    b"[1, 2]",
    b"a,b\n1,2\n",
    b"1.5,2\n",
    b"\x89PNG\r\n\x1a\n" + bytes(50),
    b"\xff\xd8\xff\xe0\0\x10JFIF",
    b"GIF89a" + bytes(range(256)),
    b"%PDF-1.4\n%\xe2\xe3\n",
    b"\x7fELF\2\1\1" + bytes(60),
    b"GGUF\3\0\0\0" + b"\2\0\0\0\0\0\0\0" * 9,
    b"BZhang wrote this\n",
    b"\x5d\0\0" + bytes(range(200)),
    b"SQLite format 3\0" + bytes(100),
    "こんにちは".encode("shift-jis"),
    "Überschrift\n".encode("latin1"),
    "\ufeffName\n".encode(),
    bytes(1000),
    np.linspace(-1, 1, 300, dtype=np.float32).tobytes(),
    np.arange(300).tobytes(),
]


@pytest.mark.parametrize("raw", ORDINARY, ids=lambda raw: repr(raw[:8]))
def test_ordinary_files_are_no_pickles(raw):
    assert scanned(raw) == ([], None)


def test_headers_of_any_length_are_no_pickles():
    """The length comes first, and may begin as a pickle does."""
    values = np.random.default_rng(0).normal(size=600).astype(np.float32)
    for longer in range(0, 2048, 8):
        name = "layers.c_proj.Block." + "n" * longer
        assert scanned(save({name: values, "BF16.T.X.cat": values})) == ([], None), longer


def test_more_pickles_than_are_looked_at():
    names, error = scanned(b"N." * 10_000 + b"N" + CALL)
    assert names == []
    assert "20,000" in str(error)
    assert scanned(b"N." * 10_000) == ([], None)


def test_a_long_pickle_takes_few_reads():
    class Counting(BytesSource):
        reads = 0

        def read_into(self, offset, buffer):
            self.reads += 1
            super().read_into(offset, buffer)

    part = b"B" + (2**20).to_bytes(4, "little") + bytes(2**20) + b"0"
    source = Counting(part * 30 + b"N" + CALL, "a file")
    assert [found.name for found in scan_source(source)] == ["system"]
    assert source.reads < 10


FRAGMENTS = [
    *(bytes([op]) for op in b"N(t)}]aeusdlb012QRo"),
    *(bytes([op]) for op in (0x81, 0x85, 0x86, 0x87, 0x88, 0x8F, 0x91, 0x92, 0x94, 0x97, 0x98)),
    *(b"K\1", b"M\1\2", b"J\1\2\3\4", b"G" + bytes(8), b"\x8a\1\1", b"\x8a\x09" + b"\1" * 9),
    *(b"I5\n", b"I01\n", b"I 5\n", b"I5 \n", b"I0x5\n", b"I5\0x\n", b"I-0x_5\n", b"I\n"),
    *(b"L5L\n", b"L5_0\n", b"L0b1L\n", b"L5L\0\n", b"F1.5\n", b"Finf\n", b"F5\0x\n", b"F0x1p3\n"),
    *(b"S'a'\n", b"S'a' \n", b"S'\\x4'\n", b"Vab\n", b"V\\ud800\n", b"Pxx\n"),
    *(b"p0\n", b"p+1\n", b"p 1\n", b"p0_1\n", b"g0\n", b"g1\n", b"g0_0\n", b"q\0", b"h\0"),
    *(b"r\0\0\0\0", b"j\0\0\0\0", b"\x82\1", b"\x80\4", b"\x8b\1\0\0\0a"),
    *(b"C\1a", b"U\1a", b"U\1\xff", b"\x8c\1a", b"X\1\0\0\0a", b"T\1\0\0\0a"),
    *(b"\x96\2\0\0\0\0\0\0\0ab", b"(\x90", b"(K\1\x90", b"(u", b"(e", b"Nb"),
    *(b"\x95" + bytes([length]) + bytes(7) for length in (0, 1, 5, 9)),
]


@steady(1000)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=6), st.sampled_from(["ASCII", "bytes"]))
def test_whatever_comes_before_an_import(fragments, encoding):
    raw = b"".join(fragments) + b"cos\nsystem\n."
    if reaches_an_import(raw, encoding):
        assert scanned(raw) != ([], None)
