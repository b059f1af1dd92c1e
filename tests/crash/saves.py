"""The saves that are hurt in these tests, and the eye that judges what they left.

Two models that share no byte, every way weighlock has of writing one, and `seen`, which tells the
old file from the new one and does not accept anything else.
"""

import os

import numpy as np

import weighlock
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.directory import AtomicDirectory
from weighlock.formats.sharded import INDEX_NAME, build_index
from weighlock.formats.shards import PlannedShards, StreamedShards
from weighlock.tensors.convert import as_ref

OLD = {
    "weight": np.arange(300, dtype=np.int32).reshape(20, 15),
    "bias": np.full(7, -1.5, dtype=np.float64),
}
NEW = {
    "weight": np.arange(1000, 1640, dtype=np.float32).reshape(40, 16),
    "bias": np.arange(33, dtype=np.float16) + 1,
    "scale": np.array(0.125, dtype=np.float64),
    "nothing": np.zeros((0, 3), dtype=np.uint8),
    "codes": np.arange(1, 256, dtype=np.uint8),
}
SHARD_BYTES = 300
"""Spreads NEW over three files."""


def specs_of(tensors):
    return [(name, array.dtype, array.shape) for name, array in tensors.items()]


def planned(path, disk=None, tensors=NEW, durable=True):
    """Everything is known before; tensors come in another order than announced."""
    with weighlock.Writer(path, specs_of(tensors), durable=durable, disk=disk) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])


def together(path, disk=None, tensors=NEW, durable=True):
    """All at once, as a state dict is saved: neighbours are written in one call."""
    with weighlock.Writer(path, specs_of(tensors), durable=durable, disk=disk) as writer:
        writer.copy_all([as_ref(name, array) for name, array in tensors.items()])


def streamed(path, disk=None, tensors=NEW, durable=True, header_bytes=1024):
    """Nothing is known before."""
    with weighlock.Writer(path, durable=durable, header_bytes=header_bytes, disk=disk) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def cramped(path, disk=None, tensors=NEW, durable=True):
    """Nothing is known before, and the room kept for the header turns out too small."""
    streamed(path, disk, tensors, durable, header_bytes=64)


def copied(path, disk=None, tensors=NEW, durable=True):
    """From another file, inside the kernel where it can."""
    source = os.path.join(os.path.dirname(path), "source.safetensors")
    if not os.path.exists(source):
        weighlock.save(source, tensors, durable=False)
    with weighlock.open(source) as catalog:
        specs = [ref.spec for ref in catalog.values()]
        with weighlock.Writer(path, specs, durable=durable, disk=disk) as writer:
            writer.copy_all(catalog.values())


SINGLE = {
    "planned": planned,
    "together": together,
    "streamed": streamed,
    "cramped": cramped,
    "copied": copied,
}
"""Ways to one file."""


def sharded(path, disk=None, tensors=NEW, durable=True, *, specs=True, announced=None):
    """Into a directory; with a disk of our own, step by step as `weighlock.save` does it."""
    known = specs_of(announced or tensors) if specs else None
    if disk is None:
        items = iter(tensors.items())
        weighlock.save(path, items, known, durable=durable, max_shard_bytes=SHARD_BYTES)
        return

    def writer(path, specs):
        return weighlock.Writer(
            path, specs, durable=durable, staged=True, header_bytes=1024, disk=disk
        )

    with AtomicDirectory(path, durable=durable, disk=disk) as directory:
        if known is None:
            shards = StreamedShards(directory, SHARD_BYTES, writer)
        else:
            planned = [weighlock.TensorSpec.of(spec) for spec in known]
            shards = PlannedShards(directory, planned, SHARD_BYTES, writer)
        with shards:
            for name, array in tensors.items():
                shards.copy_all([as_ref(name, array)])
        with AtomicFile(
            directory.path_of(INDEX_NAME), durable=durable, staged=True, disk=disk
        ) as file:
            file.write(0, memoryview(build_index(shards.weight_map, shards.total_bytes)))


def sharded_as_they_come(path, disk=None, tensors=NEW, durable=True, *, announced=None):
    """Into a directory, nothing being known before: the files get their names at the end."""
    sharded(path, disk, tensors, durable, specs=False)


SHARDED = {"sharded": sharded, "sharded_as_they_come": sharded_as_they_come}
"""Ways to a directory."""

WAYS = SINGLE | SHARDED


def put_old(path, *, durable=False):
    """Lay the old file down where the new one is going to be."""
    weighlock.save(path, OLD, durable=durable)


def seen(target):
    """What a reader finds at a path, or in bytes: "old", "new" or "absent"; nothing else passes."""
    if target is None or (not isinstance(target, bytes) and not os.path.lexists(target)):
        return "absent"
    with weighlock.open(target) as catalog:
        found = {name: ref.load() for name, ref in catalog.items()}
    for word, model in (("old", OLD), ("new", NEW)):
        if found.keys() == model.keys() and all(_same(found[n], model[n]) for n in model):
            return word
    told = {name: (str(a.dtype), a.shape, a.ravel()[:3].tolist()) for name, a in found.items()}
    raise AssertionError(f"neither the old nor the new model: {told}")


def _same(one, other):
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def beside(path):
    """Names in the directory of a path other than its own and the source's."""
    known = {os.path.basename(path), "source.safetensors", "lost+found"}
    return sorted(set(os.listdir(os.path.dirname(path))) - known)
