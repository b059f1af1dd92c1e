"""Writes checkpoints as PyTorch up to 0.1.9 did: a tar archive of four members.

Torch itself still reads what is made here. Everything is put together from parts that a test may
change: members, their order, headers and counts.
"""

import io
import pickle
import struct
import tarfile
from typing import ClassVar

import torch

__all__ = ["archive", "old_parts", "old_saved", "plain_pickle"]

ORDER = ("sys_info", "pickle", "tensors", "storages")


class _Pickler(pickle.Pickler):
    """Tensors and storages go as their number, classes of modules with a place for their source."""

    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.tensors, self.storages, self.kept = {}, {}, []
        self._classes, self._next = set(), 1000

    def persistent_id(self, thing):
        if isinstance(thing, type) and issubclass(thing, torch.nn.Module):
            first = thing not in self._classes
            self._classes.add(thing)
            return (thing, None, None) if first else None
        if type(thing) is torch.Tensor:
            self.kept.append(thing)  # or its id would go to the next one
            key = self._key(self.tensors, id(thing), thing)
            self._key(self.storages, thing.untyped_storage().data_ptr(), thing)
            return str(key)
        return None

    def reducer_override(self, thing):
        if isinstance(thing, torch.nn.Parameter):
            return torch.nn.Parameter, (thing.data,)
        return NotImplemented

    def _key(self, known, mark, thing):
        if mark not in known:
            self._next += 1
            known[mark] = self._next, thing
        return known[mark][0]


def _class_of(tensor, kind):
    named = {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half"}
    named |= {torch.int64: "Long", torch.int32: "Int", torch.int16: "Short"}
    named |= {torch.int8: "Char", torch.uint8: "Byte"}
    return type(f"{named[tensor.dtype]}{kind}", (), {"__module__": "torch"})


class _Named(pickle._Pickler):
    """Writes classes of torch by their name, whether they can be imported or not."""

    def save_global(self, thing, name=None):
        self.write(f"c{thing.__module__}\n{thing.__name__}\n".encode())
        self.memoize(thing)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, type: save_global}


def plain_pickle(thing, protocol=2):
    """A pickle in which a class is only its name."""
    file = io.BytesIO()
    _Named(file, protocol).dump(thing)
    return file.getvalue()


def old_parts(thing, protocol=2, views=()):
    """The members of a checkpoint as bytes.

    Args:
        thing: any object with tensors in it.
        protocol: of every pickle.
        views: storages that are parts of others, as (key, index of the storage, first, count).
    """
    file = io.BytesIO()
    pickler = _Pickler(file, protocol)
    pickler.dump(thing)
    keys = {}
    out = io.BytesIO()
    out.write(plain_pickle(len(pickler.storages), protocol))
    for mark, (key, tensor) in pickler.storages.items():
        keys[mark] = key
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
        out.write(plain_pickle((key, "cpu", _class_of(tensor, "Storage")), protocol))
        out.write(struct.pack("<q", len(raw) // tensor.element_size()) + raw)
    listed = list(keys.values())
    made = [(key, listed[index], first, count) for key, index, first, count in views]
    out.write(plain_pickle(made, protocol))
    tensors = plain_pickle(len(pickler.tensors), protocol)
    for key, tensor in pickler.tensors.values():
        root = keys[tensor.untyped_storage().data_ptr()]
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        tensors += plain_pickle((key, root, _class_of(tensor, "Tensor")), protocol)
        tensors += struct.pack(f"<iI{len(numbers)}q", tensor.dim(), 0, *numbers)
    system = {"protocol_version": 1000, "little_endian": True, "type_sizes": {"int": 4}}
    return {
        "sys_info": plain_pickle(system, protocol),
        "pickle": file.getvalue(),
        "tensors": tensors,
        "storages": out.getvalue(),
    }


def archive(parts, order=ORDER, *, mtime=0, change=lambda info: None):
    """A tar archive of these members; `change` may alter each header."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in order:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(parts[name]), mtime
            change(info)
            tar.addfile(info, io.BytesIO(parts[name]))
    return file.getvalue()


def old_saved(thing, protocol=2, **options):
    """A whole checkpoint of 0.1.9."""
    return archive(old_parts(thing, protocol), **options)
