"""Which files weights lie in, and in which format: told to people, decided elsewhere."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from weighlock.cli.shared import is_url
from weighlock.formats.npz import is_npz
from weighlock.formats.plain_pickle import is_pickle
from weighlock.formats.tar_directory import is_tar
from weighlock.formats.torch_legacy import is_legacy
from weighlock.formats.zip_directory import read_directory
from weighlock.limits import Limits
from weighlock.sources.base import Source
from weighlock.sources.http import HttpSource
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.joined import Joined
from weighlock.sources.local import FileSource
from weighlock.sources.window import Window
from weighlock.tensors.catalog import Catalog

__all__ = ["Files", "files_of"]


@dataclass(frozen=True, slots=True)
class Files:
    """The files that the tensors of a catalog lie in."""

    format: str
    count: int
    nbytes: int


def files_of(path: str, catalog: Catalog) -> Files | None:
    """Where the tensors of an open catalog lie; None if there are none, and it is no file."""
    found: dict[str, FileSource | HttpSource] = {}
    for ref in catalog.values():
        for source in ref.sources():
            found.update((one.label, one) for one in _innermost(source))
    if found:
        kind = _spread(found) or _format(next(iter(found.values())))
        if catalog.is_sharded:
            kind = f"sharded {kind}"
        return Files(kind, len(found), sum(one.size for one in found.values()))
    if is_url(path) or not os.path.isfile(path):
        return None
    with closing(FileSource(path)) as file:  # without tensors, or all of it was read to memory
        return Files(_format(file), 1, file.size)


def _innermost(source: object) -> Iterator[FileSource | HttpSource]:
    if isinstance(source, Joined):
        for run in source.runs:
            yield from _innermost(run.source)
    elif isinstance(source, (InflatedSource, Window)):
        yield from _innermost(source.source)
    elif isinstance(source, (FileSource, HttpSource)):
        yield source


def _spread(labels: dict[str, FileSource | HttpSource]) -> str | None:
    """What many processes saved together: the names of its files tell."""
    for label in labels:
        if label.partition("?")[0].endswith(".distcp"):
            return "PyTorch distributed checkpoint"
        if label.endswith("_optim_states.pt"):
            return "DeepSpeed ZeRO folder"
    return None


def _format(source: Source) -> str:
    """In the order in which a reader is chosen; what was opened is in one of them."""
    first = bytearray(min(source.size, 512))
    source.read_into(0, memoryview(first))
    is_header = first[8:9] == b"{"  # of a safetensors file, whatever its length looks like
    if first.startswith(b"PK\x03\x04") and first[4:9] != b"\0\0\0\0{":
        members = read_directory(source, Limits(), fold_case=False)
        return "npz" if is_npz(members) else "PyTorch ZIP checkpoint"
    if is_legacy(bytes(first)):
        return "PyTorch legacy checkpoint"
    if is_tar(bytes(first)) and not is_header:
        return "PyTorch tar checkpoint"
    if first[:4] == b"GGUF" and any(first[4:8]):
        return "GGUF"
    if first.startswith(b"\x93NUMPY"):
        return "npy"
    return "pickle" if is_pickle(bytes(first)) and not is_header else "safetensors"
