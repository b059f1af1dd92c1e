"""B1 to B10 for npy and npz: headers that would be code, lies about sizes, and archives of both."""

import io
import struct
import tracemalloc
import zipfile

import pytest

import weighlock
from hostile.make_checkpoints import GOOD, checkpoint
from hostile.watching import refusal, watched
from weighlock.errors import (
    FormatError,
    HeaderError,
    LayoutError,
    LimitExceeded,
    TruncatedFile,
    UnsupportedDType,
)

open_catalog = weighlock.open  # imported before anything is watched


def npy(header, data=bytes(16), *, version=1, length=None):
    raw = header if isinstance(header, bytes) else header.encode()
    told = len(raw) if length is None else length
    size = struct.pack("<H" if version == 1 else "<I", told)
    return b"\x93NUMPY" + bytes([version, 0]) + size + raw + data


def said(descr="'<f4'", order="False", shape="(4,)", more=""):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}\n"


CASES = {
    "code in the header": (npy(said(shape="__import__('os').system('id')")), FormatError, ""),
    "a call": (npy(said(shape="tuple([4])")), FormatError, ""),
    "a sum": (npy(said(shape="(2+2,)")), FormatError, "no meaning"),
    "a negative size": (npy(said(shape="(-4,)")), FormatError, "no meaning"),
    "a float as size": (npy(said(shape="(4.0,)")), FormatError, "no meaning"),
    "True as size": (npy(said(shape="(True,)")), LayoutError, "'True' where a size"),
    "a number as shape": (npy(said(shape="(4)")), LayoutError, "in parentheses"),
    "a list as shape": (npy(said(shape="[4]")), HeaderError, "'['"),
    "an escaped text": (npy(said(descr="'\\x3cf4'")), HeaderError, "no meaning"),
    "an unknown key": (npy(said(more="'x': 1")), HeaderError, "not known"),
    "a key twice": (npy(said(more="'shape': (4,)")), HeaderError, "twice"),
    "no shape": (npy("{'descr': '<f4', 'fortran_order': False}"), HeaderError, "no 'shape'"),
    "an open dict": (npy("{'descr': '<f4', "), HeaderError, ""),
    "an open structure": (npy("{'descr': [('a', "), HeaderError, "too early"),
    "10,000 brackets": (npy(said(descr="[" * 10_000)), HeaderError, ""),
    "nothing": (npy(""), HeaderError, ""),
    "two dicts": (npy(said() + said()), HeaderError, "goes on"),
    "not UTF-8": (npy(b"{'\xff': 1}", version=3), HeaderError, "UTF-8"),
    "version 4": (npy(said(), version=4), HeaderError, "version 4.0"),
    "a header of 4 GB": (npy(said(), version=2, length=2**32 - 1), HeaderError, "4,294,967,295"),
    "a header beyond the end": (npy(said(), b"", length=60_000), TruncatedFile, "60,010"),
    "too few numbers": (npy(said(shape="(5,)")), TruncatedFile, "takes 20 bytes, 16 are there"),
    "sizes that overflow": (
        npy(said(shape="(4294967296, 4294967296)")),
        LayoutError,
        "larger than any file",
    ),
    "a size of 30 digits": (npy(said(shape=f"({'9' * 30},)")), HeaderError, "no meaning"),
    "65 dimensions": (npy(said(shape=f"({'1, ' * 65})")), LimitExceeded, "dimensions"),
    "objects": (npy(said(descr="'|O'")), UnsupportedDType, "pickle"),
    "objects in a structure": (npy(said(descr="[('a', '|O')]")), UnsupportedDType, "pickle"),
    "a type of 2**30 bytes": (npy(said(descr="'<f1073741824'")), UnsupportedDType, "f1073741824"),
    "long double": (npy(said(descr="'<f16'")), UnsupportedDType, "f16"),
}


@pytest.mark.parametrize(("content", "kind", "says"), CASES.values(), ids=CASES)
def test_hostile_arrays_are_refused_with_a_reason(tmp_path, content, kind, says):
    path = tmp_path / "array.npy"
    path.write_bytes(content)
    error, peak = refusal(open_catalog, path, kind)
    assert says in str(error)
    assert peak < 2_000_000


def packed(members, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


GOOD_ARRAY = npy(said())
ARCHIVES = {
    "a checkpoint too": (
        packed({"a.npy": GOOD_ARRAY, "data.pkl": b"\x80\x02}."}),
        LayoutError,
        "checkpoint",
    ),
    "a broken array": (packed({"a.npy": b"\x93NUMP" + bytes(40)}), HeaderError, "'a.npy'"),
    "an array shorter than it says": (
        packed({"a.npy": npy(said(shape="(400,)"))}),
        TruncatedFile,
        "1,600 bytes",
    ),
    "an empty member": (packed({"a.npy": b""}), HeaderError, "'a.npy'"),
    "a name of nothing": (packed({".npy": GOOD_ARRAY}), LayoutError, "empty"),
    "the name of the metadata": (
        packed({"__metadata__.npy": GOOD_ARRAY}),
        LayoutError,
        "reserved",
    ),
    "a name of 5,000 bytes": (packed({"a" * 5000 + ".npy": GOOD_ARRAY}), LimitExceeded, "5,000"),
    "a checkpoint with an array": (
        packed({"a/data.pkl": b"\x80\x02}.", "b.npy": GOOD_ARRAY}),
        LayoutError,
        "'b.npy' lies outside",
    ),
    "a checkpoint after an array and something else": (
        packed({"x": b"", "a.npy": GOOD_ARRAY, "a/data.pkl": b"\x80\x02}."}),
        LayoutError,
        "'x' lies outside",
    ),
}


@pytest.mark.parametrize(("content", "kind", "says"), ARCHIVES.values(), ids=ARCHIVES)
def test_hostile_archives_are_refused_with_a_reason(content, kind, says):
    with watched() as seen, pytest.raises(kind) as caught:
        open_catalog(content)
    assert says in str(caught.value)
    assert seen == []


def test_a_deflated_array_is_never_unpacked_further_than_it_says():
    claimed = packed(
        {"a.npy": npy(said(shape="(25_000_000,)".replace("_", "")), bytes(10**8))},
        zipfile.ZIP_DEFLATED,
    )
    assert len(claimed) < 200_000
    tracemalloc.start()
    try:
        with open_catalog(claimed) as catalog:
            assert catalog["a"][5] == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


def test_members_may_be_named_like_paths_and_nothing_is_written(tmp_path):
    content = packed({"../../evil.npy": GOOD_ARRAY, "/etc/x.npy": GOOD_ARRAY})
    with watched() as seen, open_catalog(content) as catalog:
        assert list(catalog) == ["../../evil", "/etc/x"]
        assert catalog["/etc/x"].load().tobytes() == bytes(16)
    assert seen == []


def test_a_checkpoint_stays_a_checkpoint():
    with open_catalog(checkpoint(GOOD)) as catalog:
        assert catalog.metadata["format"] == "pt"
