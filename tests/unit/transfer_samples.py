"""Tensors from everywhere a share may take them from, small enough for unit tests."""

import io
import zipfile

import numpy as np
import pytest
from unit_samples import sample, tensor_of

import weighlock
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Span
from weighlock.transfer.pieces import FilePart, views_of

__all__ = ["content", "every_tensor", "expected_bytes", "read", "whole"]


@pytest.fixture
def content(tmp_path):
    """A file of three blocks, as it travels."""
    path = tmp_path / "laid-out"
    weighlock.save(path, {"x": np.arange(600_000, dtype=np.float32)}, durable=False)
    return path.read_bytes()


def read(contents, offset, length):
    buffer = bytearray(length)
    contents.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def whole(contents):
    """The virtual file as it would be written, piece by piece as it would be sent."""
    found = b""
    for piece in contents.pieces(Span(0, contents.size)):
        if isinstance(piece, FilePart):
            buffer = bytearray(piece.length)
            piece.file.read_into(piece.offset, memoryview(buffer))
            found += bytes(buffer)
        else:
            found += b"".join(views_of(piece))
    return found


def expected_bytes(tensor):
    """What a safetensors file holds of an array, torch tensor or ref."""
    from weighlock.tensors.convert import as_ref

    return b"".join(bytes(piece) for piece in as_ref("x", tensor).pieces())


def _deflated(content):
    """The same archive with every member compressed, as some tools rewrite checkpoints."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return packed.getvalue()


@pytest.fixture(scope="module")
def every_tensor(tmp_path_factory):
    """Tensors by name: every dtype, every place, every layout."""
    import torch

    place = tmp_path_factory.mktemp("tensors")
    tensors = {}
    for number, dtype in enumerate(dtype for dtype in DType if dtype.in_safetensors):
        tensors[f"memory.{dtype.value}"] = sample(dtype, (3, 8), number)
    base = sample("F32", (20, 30), 99)
    tensors |= {
        "empty": np.zeros((0, 5), np.float16),
        "scalar": np.array(2.5),
        "turned": base.T,
        "stepped": base[::3, ::-2],
        "repeated": np.broadcast_to(np.int16(7), (9, 11)),
        "tied": base,
        "tied again": base,
        "other byte order": np.arange(10, dtype=">i4"),
        "large enough for a piece of its own": sample("U8", (100_000,), 98),
        "torch": tensor_of(sample("BF16", (5, 7), 97)),
        "torch turned": tensor_of(sample("F16", (5, 7), 96)).T,
    }
    weighlock.save(place / "a.safetensors", {"a": base, "b": sample("U8", (70_000,), 5)})
    stored = {"flat": torch.arange(500.0), "turned": torch.arange(60.0).reshape(6, 10).T}
    torch.save(stored, place / "a.pt")
    torch.save(stored, place / "legacy.pt", _use_new_zipfile_serialization=False)
    (place / "deflated.pt").write_bytes(_deflated((place / "a.pt").read_bytes()))
    catalogs = []
    for name in ("a.safetensors", "a.pt", "legacy.pt", "deflated.pt"):
        catalogs.append(weighlock.open(place / name))
        tensors |= {f"{name}.{key}": ref for key, ref in catalogs[-1].items()}
    catalogs.append(weighlock.open((place / "a.pt").read_bytes()))
    tensors |= {f"bytes.{key}": ref for key, ref in catalogs[-1].items()}
    yield tensors
    for catalog in catalogs:
        catalog.close()
