"""Write a safetensors file of any size, holding none of it.

Knows where tensors go in the file and how their bytes get there; that the file appears whole or
not at all is `disk.atomic`'s.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from weighlock.disk.atomic import AtomicFile
from weighlock.disk.lease import SpoolFile
from weighlock.disk.spool import Spool
from weighlock.errors import LayoutError, LocalProtocolError, ShortRead
from weighlock.formats.finishing import Finish
from weighlock.formats.gathered import Gathered
from weighlock.formats.placement import Placement, Planned, Streamed
from weighlock.formats.safetensors import check_metadata
from weighlock.lifetimes import Lifetime
from weighlock.limits import Limits
from weighlock.sources.local import FileSource
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.convert import as_ref
from weighlock.tensors.ref import PIECE_BYTES, TensorRef
from weighlock.tensors.spec import SpecsLike, TensorSpec
from weighlock.tensors.stored import StoredRef
from weighlock.tensors.torch import TorchRef

if TYPE_CHECKING:
    import os

    from weighlock.disk.effects import Disk
    from weighlock.tensors.catalog import Catalog

__all__ = ["Finish", "Writer"]


class Writer(Lifetime):
    """Writes tensors into a new safetensors file, in any order.

    The file appears under its path when the writer is finished: by `finish()`, by
    `finish_in_background()`, or by leaving the `with` block without an exception. Before that, and
    after any error, whatever was at the path stays as it was and nothing lies beside it.

    Args:
        path: the destination; a spool for a temporary file, which `landed()` opens.
        specs: what will be written. Given, every tensor has its place from the start, aligned to
            its element size, and exactly these must be written. Not given, tensors are laid down
            as they come.
        data_order: the names in the order their data shall lie, elements of one width together;
            without it, in the order of the specs. Readers list tensors in the order of the specs.
        metadata: text to store beside the tensors. `{"format": "pt"}` is added if torch tensors are
            written and it says nothing about the format itself.
        durable: survive a power loss once finished.
        staged: the file lies in a directory that is put in place, and synced, as a whole.
        header_bytes: without specs, the room to keep for the header; if it turns out too small the
            data is moved, by the file system where it can, by copying where it cannot.
        progress: called after each step with the bytes it wrote.
        limits: bounds of the header.

    A tensor that fails halfway (its source cannot be read, the disk is full) ends the writer: there
    is no finishing a file with a torn tensor in it. Tensors may be written from several threads.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str] | Spool",
        specs: "SpecsLike | None" = None,
        *,
        data_order: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        durable: bool = True,
        staged: bool = False,
        header_bytes: int = 256 * 1024,
        progress: Callable[[int], None] | None = None,
        limits: Limits | None = None,
        disk: "Disk | None" = None,
    ) -> None:
        limits = limits or Limits()
        self._metadata = check_metadata(metadata)
        self._claimed: set[str] = set()
        self._written: set[str] = set()
        self._parts: dict[str, tuple[int, int]] = {}
        self._is_sealed = False
        """Nothing can be placed any more."""
        self._broken = False
        self._torch = False
        self._progress = progress or (lambda _: None)
        self._lock = threading.Lock()
        self._placement: Placement
        if specs is None:
            self._placement = Streamed(header_bytes, limits)
        else:
            announced = TensorSpec.several(specs)
            by_name = {spec.name: spec for spec in announced}
            ordered = None if data_order is None else _in_order(by_name, data_order)
            self._placement = Planned(announced, self._metadata, limits, ordered)
        self._file: AtomicFile
        if isinstance(path, Spool):
            self._file = path.file()
        else:
            self._file = AtomicFile(path, durable=durable, staged=staged, disk=disk)
        try:
            self._file.reserve(self._placement.total_bytes)
            if specs is not None:
                # What is written within a file takes the kernel less than what makes it longer.
                self._file.truncate(self._placement.total_bytes)
        except BaseException:
            self._file.discard()
            raise

    @property
    def path(self) -> str:
        """The destination."""
        return self._file.path

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            self.discard()
        elif not self._is_sealed:
            self.finish()
        elif self._broken:
            raise LayoutError(f"{self.path}: was given up when a tensor could not be written")

    def write(self, name: str, tensor: object) -> None:
        """Write a tensor: a numpy array, a torch tensor on any device, or a ref.

        Raises:
            LayoutError: it is not what was announced, was written before, or is not a plain tensor.
        """
        self.copy_all([as_ref(name, tensor)])

    def copy(self, name: str, ref: TensorRef) -> None:
        """Write a tensor from where it lies; between files, without passing through here."""
        self.copy_all([as_ref(name, ref)])

    def copy_all(self, refs: Iterable[TensorRef]) -> None:
        """Write many tensors in the order of the file, those that lie end to end as one."""
        placed: list[tuple[int, TensorRef]] = []
        try:
            for ref in refs:
                placed.append((self._claim(ref), ref))  # noqa: PERF401 - kept if the next is refused
            placed.sort(key=lambda pair: pair[0])
            with Gathered(self._file, self._progress) as output:
                for offset, run in _runs(placed):
                    self._write_run(offset, run, output)
            with self._lock:
                self._written.update(ref.name for _, ref in placed)
        except BaseException:
            if placed:  # places that were given away and not filled
                self._broken = True
                self.discard()
            raise

    def write_part(self, spec: TensorSpec, start: int, data: memoryview) -> None:
        """Write bytes of a tensor that comes in parts, from byte `start` of it on.

        Parts come in any order and from any thread. The tensor is complete when as many bytes came
        as it has: parts that overlap are the caller's fault.
        """
        with self._lock:
            if spec.name not in self._parts:
                self._parts[spec.name] = self._placed(spec), spec.nbytes
            self._check_open(spec.name)
            offset, _ = self._parts[spec.name]
        try:
            self._file.write(offset + start, data)
        except BaseException:
            # Not discarded here: other threads, still writing, would say that instead of this.
            self._broken = True
            raise
        with self._lock:
            left = self._parts[spec.name][1] - len(data)
            self._parts[spec.name] = offset, left
            if not left:
                self._written.add(spec.name)
        self._progress(len(data))

    def finish(self) -> None:
        """Put the file in place.

        Raises:
            LayoutError: tensors that were announced are missing. The destination is untouched.
            DiskError: the disk refused. The destination is untouched.
        """
        self._seal()
        self._file.commit()

    def landed(self, limits: Limits | None = None) -> "Catalog":
        """What was written to a spool, once finished. Its file lives as long as the refs.

        Raises:
            LocalProtocolError: it was written to a path, which `weighlock.open` opens.
        """
        from weighlock.formats.spooled import open_landed

        if not isinstance(self._file, SpoolFile):
            raise LocalProtocolError(f"{self.path}: is no spool's; weighlock.open reads it")
        lease = self._file.lease
        if lease is None:
            raise LocalProtocolError(f"{self.path}: is not finished")
        return open_landed(lease, limits)

    def finish_in_background(self) -> Finish:
        """Return at once and put the file in place from another thread.

        Every byte has been handed to the system already: the arrays that were written may change.
        What can be wrong with the tensors is raised here; what the disk says, by `result()`.
        """
        self._seal()
        return Finish(self._file.commit)

    def discard(self) -> None:
        """Give up: the destination stays as it was and nothing lies beside it. Idempotent."""
        self._is_sealed = True
        self._file.discard()

    def _claim(self, ref: TensorRef) -> int:
        """The offset in the file for a tensor that is about to be written."""
        with self._lock:
            offset = self._placed(ref.spec)
            self._torch = self._torch or isinstance(ref, TorchRef)
            return offset

    def _check_open(self, name: str) -> None:
        if self._is_sealed:
            raise LayoutError(
                f"{self.path}: tensor {name!r} came after the file was finished or given up"
            )

    def _placed(self, spec: TensorSpec) -> int:
        self._check_open(spec.name)
        if spec.name in self._claimed:
            raise LayoutError(f"{self.path}: tensor {spec.name!r} was already written")
        offset = self._placement.place(spec)
        self._claimed.add(spec.name)
        return offset

    def _write_run(self, offset: int, run: list[TensorRef], output: Gathered) -> None:
        """Write tensors that follow each other, in the file and, if several, in their source."""
        first = run[0]
        if len(run) == 1 and (memory := first.memory()) is not None:
            output.keep(offset, memory)
            return
        if isinstance(first, StoredRef) and isinstance(first.source, FileSource):
            span = first.contiguous_span
            length = sum(ref.nbytes for ref in run)
            if span is not None and length:
                self._copy_span(first.source, span.offset, offset, length)
                return
        for ref in run:
            for piece in ref.pieces(PIECE_BYTES):
                output.pass_on(offset, piece)
                offset += len(piece)

    def _copy_span(self, source: FileSource, start: int, offset: int, length: int) -> None:
        """Copy bytes of a file: in the kernel as far as it can, the rest through a buffer."""
        with source.descriptor() as source_fd:
            done = self._file.copy(source_fd, start, offset, length, self._progress)
        if done == length:
            return
        buffer = byte_view(empty((min(PIECE_BYTES, length),), np.dtype(np.uint8)))
        while done < length:
            piece = buffer[: length - done]
            source.read_into(start + done, piece)
            self._file.write(offset + done, piece)
            self._progress(len(piece))
            done += len(piece)

    def _seal(self) -> None:
        """Write the header, after making sure that nothing is missing and nothing comes."""
        try:
            with self._lock:  # who comes later is refused: offsets change from here on
                if self._is_sealed:
                    raise LayoutError(f"{self.path}: was already finished or discarded")
                self._check_complete()
                self._is_sealed = True
            if self._torch:
                self._metadata.setdefault("format", "pt")
            lacking = self._placement.lacking(self._metadata)
            if lacking:
                self._make_room(lacking)
            self._file.write(0, memoryview(self._placement.header(self._metadata)))
        except BaseException:
            self.discard()
            raise

    def _check_complete(self) -> None:
        missing = self._placement.missing(self._written)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise LayoutError(f"{self.path}: tensor {missing[0]!r}{more} was never written")
        unfinished = self._claimed - self._written
        if unfinished:
            raise LayoutError(
                f"{self.path}: tensor {min(unfinished)!r} is still being written by another "
                "thread: wait for it before finishing"
            )

    def _make_room(self, count: int) -> None:
        """Move the data section away from the start, for a header longer than what was kept."""
        inserted = self._file.insert(0, count)
        if inserted:
            self._placement.moved(inserted)
            return
        before, self._file = self._file, self._file.another()
        try:
            start = self._placement.data_start
            self._placement.moved(count)
            _move(before, start, self._file, self._placement.data_start, self._placement.data_bytes)
        finally:
            before.discard()


def _in_order(specs: Mapping[str, TensorSpec], names: Iterable[str]) -> list[TensorSpec]:
    names = list(names)
    if len(names) != len(specs) or specs.keys() != set(names):
        differing = sorted(specs.keys() ^ set(names)) or names
        raise LayoutError(f"data_order must name every tensor of specs once: see {differing[0]!r}")
    return [specs[name] for name in names]


def _move(source: AtomicFile, start: int, target: AtomicFile, offset: int, count: int) -> None:
    target.reserve(offset + count)
    done = target.copy(source.descriptor(), start, offset, count)
    buffer = byte_view(empty((min(PIECE_BYTES, count - done),), np.dtype(np.uint8)))
    while done < count:
        piece = buffer[: count - done]
        if not source.read_into(start + done, piece):
            raise ShortRead(
                f"{target.path}: what was written for it ends before byte "
                f"{start + done + len(piece):,}",
                wanted=count,
                got=done,
            )
        target.write(offset + done, piece)
        done += len(piece)


def _runs(placed: list[tuple[int, TensorRef]]) -> Iterable[tuple[int, list[TensorRef]]]:
    """Group tensors that lie end to end both in the new file and in one source."""
    run: list[TensorRef] = []
    start = reached = source_reached = 0
    for offset, ref in placed:
        span = ref.contiguous_span if isinstance(ref, StoredRef) else None
        joins = (
            span is not None
            and bool(run)
            and isinstance(ref, StoredRef)
            and isinstance(run[0], StoredRef)
            and ref.source is run[0].source
            and offset == reached
            and span.offset == source_reached
        )
        if not joins:
            if run:
                yield start, run
            run, start = [], offset
        run.append(ref)
        reached = offset + ref.nbytes
        source_reached = span.end if span is not None else -1
    if run:
        yield start, run
