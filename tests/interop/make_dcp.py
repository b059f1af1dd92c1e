"""Distributed checkpoints whose tensors lie in chunks of several ranks, as many processes save.

One process cannot save them with torch alone: the files are put together here, by what torch's own
classes and `torch.save` make of the parts. Torch reads them back.
"""

import io
import itertools
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["grid", "metadata_of", "write_dcp"]


def grid(shape, *cuts):
    """Boxes (offsets, sizes) of a shape cut at these positions of each dimension."""
    boxes = [((), ())]
    for size, cut in zip(shape, cuts, strict=True):
        edges = [0, *cut, size]
        boxes = [
            ((*offsets, low), (*sizes, high - low))
            for offsets, sizes in boxes
            for low, high in itertools.pairwise(edges)
        ]
    return boxes


def write_dcp(directory, tensors, objects=None, ranks=2, change=lambda metadata: metadata):
    """Write a checkpoint; `tensors` are (tensor, boxes) by name, dealt to the ranks in turn."""
    directory.mkdir(exist_ok=True)
    files = {f"__{rank}_0.distcp": io.BytesIO() for rank in range(ranks)}
    turns = 0
    described, stored = {}, {}

    def put(index, value):
        nonlocal turns
        name = list(files)[turns % ranks]
        turns += 1
        buffer = io.BytesIO()
        torch.save(value, buffer)
        stored[index] = _StorageInfo(name, files[name].tell(), buffer.tell())
        files[name].write(buffer.getvalue())

    for name, (tensor, boxes) in tensors.items():
        chunks = []
        for offsets, sizes in boxes:
            part = tensor
            for axis, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(axis, first, size)
            put(MetadataIndex(name, offsets), part.clone())
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        properties = TensorProperties.create_from_tensor(tensor)
        described[name] = TensorStorageMetadata(properties, tensor.size(), chunks)
    for name, value in (objects or {}).items():
        put(MetadataIndex(name), value)
        described[name] = BytesStorageMetadata()
    for name, file in files.items():
        (directory / name).write_bytes(file.getvalue())
    metadata = change(Metadata(described, storage_data=stored))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return metadata


def metadata_of(directory):
    return pickle.loads((directory / ".metadata").read_bytes())
