"""Pickles where somebody loads them and a scan might not look: each is run by who loads it."""

import bz2
import codecs
import gzip
import io
import lzma
import os
import pickle
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
import torch

import weighlock
from interop import tar_checkpoints
from weighlock.errors import FormatError, WeighlockError
from weighlock.formats.scanning import scan_source
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource


class Makes:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def made(tmp_path):
    return tmp_path / "made"


def told(raw, limits=None):
    """Foreign names with their places, and the error if there was one."""
    names = {}
    try:
        for found in scan_source(BytesSource(raw, "a file"), limits):
            if not found.known:
                names[found.name] = found.place
    except WeighlockError as error:
        return names, str(error)
    return names, None


def zipped(*members, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["data/DATA.PKL", "data/data.PKL", "constants/Data.pkl"])
def test_torch_finds_its_pickle_in_any_case_and_below_any_name(made, name):
    top = name.partition("/")[0]
    raw = zipped((name, pickle.dumps({"e": Makes(made)}, 2)), (f"{top}/version", b"3\n"))
    torch.load(io.BytesIO(raw), weights_only=False)
    assert made.exists()
    assert told(raw) == ({"mkdir": name}, None)


def test_storages_are_numbers_whatever_they_look_like(made):
    evil = np.frombuffer(pickle.dumps(Makes(made)), np.uint8)
    raw = saved({"a": torch.from_numpy(evil.copy())})
    torch.load(io.BytesIO(raw), weights_only=False)
    assert not made.exists()
    assert told(raw) == ({}, None)


def array_file(header, content, version=1):
    text = header.encode()
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + content


HEADERS = {
    "plain": "'|O'",
    "an escape": r"'\x7cO'",
    "with a shape": "('|O', (2,))",
    "two texts": "'|' 'O'",
    "an apostrophe": """[("it's", '|O')]""",
    "a structure in one": "[('a', '<f4'), ('b', [('c', '|O')])]",
    "a title": "[(('a title', 'a'), '|O')]",
    "a word": "'object'",
    "a list in a text": "'f4,O'",
}


@pytest.mark.parametrize("descr", HEADERS.values(), ids=HEADERS)
def test_objects_behind_every_header_that_numpy_reads(tmp_path, made, descr):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n"
    raw = array_file(header, pickle.dumps(Makes(made)))
    path = tmp_path / "a.npy"
    path.write_bytes(raw)
    try:
        np.load(path, allow_pickle=True)
    except Exception:
        assert made.exists()  # it fails afterwards, if it does
    names, error = told(raw)
    assert names == {"mkdir": ""} or error


def test_objects_behind_a_long_header_and_an_odd_shape(made):
    for shape, version, padding in (("(0x1,)", 1, 0), ("(1,)", 2, 70_000)):
        header = f"{{'descr': '|O', 'fortran_order': False, 'shape': {shape}, }}{' ' * padding}\n"
        raw = array_file(header, pickle.dumps(Makes(made)), version)
        assert told(raw) != ({}, None)


def test_objects_behind_an_array_of_numbers(made):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((3, 2), [("a", "<f4"), ("b", "<U5", (2,))]))
    np.save(buffer, np.zeros(3, "<M8[ns]"))
    np.save(buffer, np.array([Makes(made)], object))
    assert told(buffer.getvalue())[0] == {"mkdir": ""}


@pytest.mark.parametrize("name", ["a", "a.bin", "a.NPY", "data/a"])
def test_numpy_knows_arrays_in_archives_by_their_content(tmp_path, made, name):
    buffer = io.BytesIO()
    np.save(buffer, np.array([Makes(made)], object))
    raw = zipped((name, buffer.getvalue()))
    path = tmp_path / "a.npz"
    path.write_bytes(raw)
    np.load(path, allow_pickle=True)[name]
    assert made.exists()
    assert told(raw) == ({"mkdir": name}, None)


def checksums(header):
    number = int(header[148:156].strip(b" \0"), 8)
    digits = b"%o" % number
    return {
        "garbage after its end": b"%06o\0X" % number,
        "in binary": b"\x80" + number.to_bytes(7, "big"),
        "with a prefix": b"0o%o\0" % number,
        "with an underscore": digits[:1] + b"_" + digits[1:] + b"\0",
    }


def test_tars_whose_checksum_only_python_understands(tmp_path, made):
    raw = tar_checkpoints.old_saved({"a": torch.ones(2), "e": Makes(made)})
    for how, field in checksums(raw).items():
        odd = raw[:148] + field.ljust(8, b"\0") + raw[156:]
        path = tmp_path / "old.pt"
        path.write_bytes(odd)
        torch.load(path, weights_only=False)
        made.rmdir()
        assert told(odd) != ({}, None), how


def test_checkpoints_in_archives(made):
    inner = saved({"e": Makes(made)})
    legacy = io.BytesIO()
    torch.save({"e": Makes(made)}, legacy, _use_new_zipfile_serialization=False)
    for raw, place in (
        (zipped(("MAR-INF/MANIFEST.json", b"{}"), ("model.pt", inner)), "model.pt"),
        (zipped(("model.pt", inner), method=zipfile.ZIP_DEFLATED), "model.pt"),
        (tarred(("./model_weights.ckpt", inner)), "./model_weights.ckpt"),
    ):
        assert told(raw) == ({"mkdir": f"archive/data.pkl in {place}"}, None)
    for raw in (
        zipped(("data/model.bin", pickle.dumps(Makes(made)))),
        zipped(("m.pt", legacy.getvalue())),
        tarred(("weights.pkl", pickle.dumps(Makes(made)))),
        tarred(("config.yaml", b"class: a\nname: b\n"), ("w", pickle.dumps(Makes(made), 0))),
        zipped(("m.tar", tarred(("m.pt", inner)))),
    ):
        names, error = told(raw)
        assert list(names) == ["mkdir"]
        assert error is None


def test_texts_in_archives_are_no_pickles():
    texts = [b"config: a\nname: b\n", b"import os\n", b"class A:\n    pass\n", b'{"a": 1}', b""]
    members = [(f"text {number}", text) for number, text in enumerate(texts)]
    for raw in (zipped(*members), tarred(*members)):
        assert told(raw) == ({}, None)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, bz2.compress, lzma.compress])
def test_what_is_compressed_was_not_looked_into(made, pack):
    packed = pack(pickle.dumps(Makes(made)))
    for raw in (packed, zipped(("a.pkl.packed", packed)), tarred(("a", packed))):
        names, error = told(raw)
        assert names == {}
        assert "compressed" in error
        assert "not looked into" in error


def test_what_lies_too_deep_was_not_looked_into(made):
    raw = saved({"e": Makes(made)})
    for _ in range(3):
        raw = zipped(("m", raw))
    assert list(told(raw)[0]) == ["mkdir"]
    names, error = told(raw, Limits(nested_depth=2))
    assert names == {}
    assert "too deep" in error


def test_an_archive_deflated_in_another_is_unpacked_within_bounds():
    inner = zipped(("big", bytes(80 << 20)))
    with pytest.raises(FormatError, match="deflated in another"):
        list(scan_source(BytesSource(zipped(("m", inner), method=zipfile.ZIP_DEFLATED))))


def test_a_long_member_is_looked_at_as_far_as_it_is_a_pickle(made):
    raw = pickle.dumps(Makes(made)) + bytes(5000)
    for name in ("archive/DATA.PKL", "archive/other"):
        names, _ = told(zipped((name, raw)), Limits(pickle_bytes=4000))
        assert list(names) == ["mkdir"]


@pytest.mark.parametrize(
    "args",
    [
        (bytearray, "latin-1"),
        (bytearray, "ISO-8859-1"),
        (codecs.encode, "latin1", "strict"),
        (codecs.encode, "latin_1"),
    ],
)
def test_bytes_in_every_spelling_of_their_text_are_looked_into(made, args):
    inner = saved({"e": Makes(made), "w": torch.ones(2)})
    raw = saved({"blob": OfText(args[0], inner.decode("latin-1"), *args[1:])})
    names, error = told(raw)
    assert list(names) == ["mkdir"]
    assert error is None
    with weighlock.open(raw) as catalog:
        assert catalog["blob.w"].load().tolist() == [1, 1]


def test_bytes_in_a_spelling_nobody_knows_are_looked_into_all_the_same(made):
    inner = saved({"e": Makes(made)})
    raw = saved({"blob": OfText(codecs.encode, inner.decode("latin-1"), "cp1252")})
    names, error = told(raw)
    assert names or error


class OfText:
    """What a pickle makes of a text."""

    def __init__(self, *made):
        self.made = made

    def __reduce__(self):
        return self.made[0], self.made[1:]
