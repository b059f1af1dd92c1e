"""What is already here of a remote file: an interrupted attempt, or an earlier version of a model.

One rule for both: their bytes, laid out as the remote header says, are hashed block by block, and
what matches its digest need not be pulled. Nothing else identifies content.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from blake3 import blake3

from weighlock.errors import SourceError
from weighlock.formats.detect import open_catalog
from weighlock.limits import Limits
from weighlock.sources.grid import block_count, block_span
from weighlock.sources.http import HttpSource
from weighlock.sources.local import FileSource
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import refs_of
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.contents import Contents
from weighlock.transfer.digests import in_two_threads
from weighlock.transfer.landing import FileLanding, Landing
from weighlock.transfer.layout import Segment, VirtualFile

__all__ = ["Base", "BaseContents", "is_copy", "opened_base", "take_from_base", "take_from_part"]

Base: TypeAlias = "Mapping[str, object] | str | os.PathLike[str]"
"""A model one has: a catalog, arrays, or a path."""


@contextlib.contextmanager
def opened_base(base: "Base | None", limits: Limits) -> Iterator[Catalog | None]:
    """The model one has, as a catalog; closed at the end if it was opened for this."""
    if isinstance(base, (str, os.PathLike)):
        with open_catalog(base, limits) as opened:
            yield opened
    elif base is None or isinstance(base, Catalog):
        yield base
    else:
        yield Catalog({ref.name: ref for ref in refs_of(base)})


class BaseContents:
    """A model one has, laid out as a remote file that resembles it.

    Args:
        source: the remote file.
        remote: its catalog.
        base: the model; tensors of the same name, dtype and shape count.
    """

    def __init__(self, source: HttpSource, remote: Catalog, base: Mapping[str, TensorRef]) -> None:
        stored = {ref.span.offset: ref for ref in remote.values() if isinstance(ref, StoredRef)}
        refs = [stored[offset] for offset in sorted(stored)]
        start = min((ref.span.offset for ref in refs), default=source.size)
        header = bytearray(start)
        source.read_into(0, memoryview(header))
        segments = []
        for ref in refs:
            mine = base.get(ref.name)
            if ref.span.length and mine is not None and mine.spec == ref.spec:
                segments.append(Segment(ref.span, mine))
        file = VirtualFile(bytes(header), tuple(segments), source.size)
        self._contents = Contents(file, abort=source.remote.abort)

    def close(self) -> None:
        """Let go of what was gathered."""
        self._contents.close()

    def read_into(self, block: int, buffer: memoryview) -> memoryview | None:
        """The block as the base has it; None if it has not all of it."""
        file = self._contents.file
        span = block_span(block, file.size)
        here = sum(end - begin for _, begin, end in file.touched(span))
        here += max(0, min(span.end, len(file.header)) - span.offset)
        if here != span.length:
            return None
        view = buffer[: span.length]
        try:
            self._contents.read_into(span.offset, view)
        except SourceError:
            return None  # a base that cannot be read is no base
        return view


def take_from_base(
    source: HttpSource,
    base: BaseContents,
    blocks: Sequence[int],
    landing: Landing,
    on_block: Callable[[int], None],
) -> list[int]:
    """Land every block the base has; returns those that must be pulled."""

    def land(block: int, view: memoryview) -> None:
        landing.put(block, view)
        on_block(block)

    return _take(source, blocks, base.read_into, land)


def take_from_part(
    source: HttpSource,
    landing: FileLanding,
    blocks: Sequence[int],
    on_block: Callable[[int], None],
) -> list[int]:
    """Find every block an interrupted attempt has already written; returns those it has not."""
    first = bytearray(min(8, source.size))
    source.read_into(0, memoryview(first))

    def land(block: int, view: memoryview) -> None:
        if block == 0:
            landing.put(0, view)
        on_block(block)

    return _take(
        source, blocks, lambda block, buffer: landing.have(block, buffer, bytes(first)), land
    )


def is_copy(source: HttpSource, path: str) -> bool:
    """Whether a file is, block by block, what a source with digests offers.

    Raises:
        SourceError: it cannot be read.
    """
    if not source.verifies:
        return False
    with contextlib.closing(FileSource(path)) as file:

        def read(block: int, buffer: memoryview) -> memoryview:
            span = block_span(block, file.size)
            view = buffer[: span.length]
            file.read_into(span.offset, view)
            return view

        if file.size != source.size:
            return False
        return not _take(source, range(block_count(file.size)), read, lambda block, view: None)


def _take(
    source: HttpSource,
    blocks: Iterable[int],
    have: Callable[[int, memoryview], memoryview | None],
    land: Callable[[int, memoryview], None],
) -> list[int]:
    missing: set[int] = set()
    adding = threading.Lock()
    wanted = list(blocks)

    def check(block: int, buffer: memoryview) -> None:
        source.remote.abort.check()
        view = have(block, buffer)
        if view is not None:
            digest = blake3(view).digest()
            if source.remote.persist(lambda: source.remote.matches(block, digest)):
                land(block, view)
                return
        with adding:
            missing.add(block)

    in_two_threads(wanted, check)
    return [block for block in wanted if block in missing]
