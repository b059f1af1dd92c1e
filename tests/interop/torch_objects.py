"""Checkpoints made on the spot, and what torch itself sees in them."""

import contextlib
import io
import pickle
import struct
import sys
import types
import warnings
import zipfile

import numpy as np
import torch

import weighlock

__all__ = [
    "Counted",
    "assert_same",
    "assert_same_tensors",
    "byteswapped",
    "flat",
    "foreign_module",
    "legacy_by_hand",
    "loaded",
    "raw_bits",
    "rezipped",
    "saved",
    "views",
]


class Counted:
    """Bytes as a source that remembers its reads."""

    label = "counted"

    def __init__(self, data):
        self.data = data
        self.size = len(data)
        self.reads = []

    def read_into(self, offset, buffer):
        if len(buffer):
            self.reads.append((offset, len(buffer)))
        assert offset + len(buffer) <= self.size
        buffer[:] = self.data[offset : offset + len(buffer)]

    def close(self):
        pass

    def taken(self):
        """Bytes read since the last call."""
        reads, self.reads = self.reads, []
        return sum(length for _, length in reads)


def saved(thing, *, legacy=False, protocol=2):
    """What torch.save writes."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of storages, and of classes without source
        torch.save(
            thing,
            file,
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=not legacy,
        )
    return file.getvalue()


def loaded(raw):
    """What torch.load reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(raw), weights_only=False)


def raw_bits(tensor):
    """The bytes of a tensor in row-major order, lazily set bits applied."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return b""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype is torch.float4_e2m1fn_x2:
        tensor = tensor.view(torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(ref, tensor):
    """A ref has the type, the shape and every byte of a tensor or numpy array."""
    if isinstance(tensor, torch.Tensor):
        shape = tuple(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:
            shape = (*shape[:-1], 2 * shape[-1])
        assert f"torch.{ref.dtype.torch_name}" == str(tensor.dtype), ref.name
        assert ref.shape == shape, ref.name
        expected = raw_bits(tensor)
    else:
        tensor = np.asarray(tensor)
        assert ref.shape == tensor.shape, ref.name
        assert ref.dtype.numpy == tensor.dtype.newbyteorder("<"), ref.name
        expected = tensor.astype(tensor.dtype.newbyteorder("<")).tobytes()
    assert raw_bits(ref.torch()) == expected, ref.name
    assert b"".join(bytes(piece) for piece in ref.pieces()) == expected, ref.name
    if not ref.dtype.is_packed:
        assert ref.load().tobytes() == expected, ref.name


def flat(thing, path=""):
    """Every tensor and array below dicts, lists and tuples, by its dotted path."""
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return {path or "tensor": thing}
    if isinstance(thing, dict):
        pairs = thing.items()
    elif isinstance(thing, (list, tuple)):
        pairs = enumerate(thing)
    else:
        return {}
    found = {}
    for key, value in pairs:
        below = flat(value, f"{path}.{key}" if path else str(key))
        assert not found.keys() & below.keys()
        found |= below
    return found


def assert_same_tensors(raw, expected=None):
    """A checkpoint has exactly the tensors torch reads from it; returns its catalog."""
    catalog = weighlock.open(raw)
    expected = flat(loaded(raw)) if expected is None else expected
    assert list(catalog) == list(expected)
    assert dict(catalog.unreadable) == {}
    for name, tensor in expected.items():
        assert_same(catalog[name], tensor)
    return catalog


def views(dtype=torch.float32):
    """Tensors that lie in their storage in every way torch knows."""
    base = torch.arange(240).to(dtype)
    grid = base.reshape(4, 5, 12)
    return {
        "whole": base,
        "grid": grid,
        "offset": base[17:90],
        "last": base[239:],
        "steps": base[3:200:7],
        "rows": grid[1:3],
        "columns": grid[:, :, 2:9:3],
        "one_column": grid[:, 4, 11],
        "transposed": base.reshape(12, 20).t(),
        "permuted": grid.permute(2, 0, 1),
        "swapped": grid.transpose(0, 1),
        "diagonal": base[:144].reshape(12, 12).diagonal(),
        "expanded": base[5:8].reshape(3, 1).expand(3, 4),
        "expanded_number": base[9].expand(2, 3),
        "overlapping": base.as_strided((6, 5), (2, 1), 30),
        "hankel": base.as_strided((5, 5), (1, 1), 100),
        "odd_ones": base.as_strided((1, 6, 1), (999, 2, 77), 8),
        "number": base[42],
        "empty": base[10:10],
        "empty_grid": grid[:, 2:2, ::5],
        "own_empty": torch.empty((0, 3), dtype=dtype),
        "own_number": torch.ones((), dtype=dtype),
        "channels_last": torch.arange(48)
        .to(dtype)
        .reshape(2, 3, 2, 4)
        .contiguous(memory_format=torch.channels_last),
        "no_sizes_one": torch.ones((1, 1, 1), dtype=dtype),
    }


class _ByHand(pickle._Pickler):
    """Writes persistent ids as objects in any protocol; Python's own needs protocol 1 for that."""

    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.storages = {}

    def persistent_id(self, thing):
        if not isinstance(thing, torch.storage.TypedStorage):
            return None
        untyped = thing._untyped_storage
        key = str(untyped._cdata)
        self.storages[key] = thing
        kind = getattr(torch, thing._pickle_storage_type())
        return ("storage", kind, key, "cpu", thing._size(), None)

    def save_pers(self, pid):
        self.save(pid, save_persistent_id=False)
        self.write(pickle.BINPERSID)


def legacy_by_hand(thing, protocol):
    """A legacy checkpoint in any protocol, also in those torch.save does not write."""
    file = io.BytesIO()
    info = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    for part in (0x1950A86A20F9469CFC6C, 1001, info):
        file.write(pickle.dumps(part, protocol))
    pickler = _ByHand(file, protocol)
    pickler.dump(thing)
    keys = sorted(pickler.storages)
    file.write(pickle.dumps(keys, protocol))
    for key in keys:
        storage = pickler.storages[key]
        file.write(struct.pack("<q", storage._size()))
        file.write(bytes(storage._untyped_storage.tolist()))
    return file.getvalue()


def rezipped(raw, *, packed=False, prefix="archive/", change=lambda name, content: content):
    """The members of a ZIP checkpoint in a new archive; `change` may return None to drop one."""
    target = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(target, "w", method) as new:
        for info in old.infolist():
            name = info.filename.removeprefix("archive/")
            content = change(name, old.read(info))
            if content is not None:
                new.writestr(prefix + name, content)
    return target.getvalue()


def byteswapped(raw, widths):
    """The checkpoint as a big-endian machine writes it; `widths` of the storages' numbers."""

    def change(name, content):
        if name == "byteorder":
            return b"big"
        if name.startswith("data/"):
            width = widths[int(name.removeprefix("data/"))]
            return np.frombuffer(content, f"u{width}").byteswap().tobytes()
        return content

    return rezipped(raw, change=change)


@contextlib.contextmanager
def foreign_module(source, name="only_where_it_was_saved"):
    """A module that can be imported inside the block and not afterwards."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(source, module.__dict__)
    try:
        yield module
    finally:
        del sys.modules[name]
