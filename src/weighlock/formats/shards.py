"""Tensors spread over the files of a sharded model, as they are written.

Knows which tensor goes into which shard; a shard is written by a `Writer`, and the directory they
lie in is `disk.directory`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from weighlock.disk.directory import AtomicDirectory
from weighlock.errors import LayoutError
from weighlock.formats.sharded import shard_name
from weighlock.formats.writer import Writer
from weighlock.lifetimes import Lifetime
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import TensorSpec

__all__ = ["PlannedShards", "StreamedShards", "split"]

MakeWriter = Callable[[str, list[TensorSpec] | None], Writer]
"""Makes the writer of a file in the staged directory."""


def split(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive groups of at most `max_bytes`; a larger tensor is a group of its own."""
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if groups[-1] and used + spec.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += spec.nbytes
    return groups


class PlannedShards(Lifetime):
    """Shards of tensors that are all known; each is finished when its last tensor has come."""

    def __init__(
        self,
        directory: AtomicDirectory,
        specs: list[TensorSpec],
        max_bytes: int,
        make_writer: MakeWriter,
    ) -> None:
        self._directory = directory
        self._groups = split(specs, max_bytes)
        self._make_writer = make_writer
        self._shard_of = {s.name: n for n, group in enumerate(self._groups) for s in group}
        if len(self._shard_of) != len(specs):
            twice, _ = Counter(spec.name for spec in specs).most_common(1)[0]
            raise LayoutError(f"tensor {twice!r} is named twice")
        self._left = [len(group) for group in self._groups]
        self._missing = dict.fromkeys(self._shard_of)
        self._writers: dict[int, Writer] = {}
        self.total_bytes = sum(spec.nbytes for spec in specs)

    @property
    def weight_map(self) -> dict[str, str]:
        """Which tensor lies in which file."""
        return {name: self._file_name(number) for name, number in self._shard_of.items()}

    def _leave(self, error: BaseException | None) -> None:
        try:
            if error is None:
                self._finish_rest()
        finally:
            for writer in self._writers.values():
                writer.discard()  # does nothing to those that are finished

    def copy_all(self, refs: Iterable[TensorRef]) -> None:
        """Write tensors, each into its shard."""
        by_shard: dict[int, list[TensorRef]] = {}
        for ref in refs:
            number = self._shard_of.get(ref.name)
            if number is None:
                raise LayoutError(f"tensor {ref.name!r} was not announced in specs")
            if ref.name not in self._missing:
                raise LayoutError(f"tensor {ref.name!r} came twice")
            del self._missing[ref.name]
            by_shard.setdefault(number, []).append(ref)
        for number, members in by_shard.items():
            writer = self._writer(number)
            writer.copy_all(members)
            self._left[number] -= len(members)
            if self._left[number] == 0:
                writer.finish()

    def _finish_rest(self) -> None:
        if self._missing:
            more = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            raise LayoutError(
                f"{self._directory.path}: tensor {next(iter(self._missing))!r}{more} was never "
                "written"
            )
        for number, group in enumerate(self._groups):
            if not group:
                self._writer(number).finish()  # a model without tensors is one empty file

    def _writer(self, number: int) -> Writer:
        if number not in self._writers:
            path = self._directory.path_of(self._file_name(number))
            self._writers[number] = self._make_writer(path, self._groups[number])
        return self._writers[number]

    def _file_name(self, number: int) -> str:
        return shard_name(number + 1, len(self._groups))


class StreamedShards(Lifetime):
    """Shards of tensors that are not known beforehand: a new one when the last is full."""

    def __init__(self, directory: AtomicDirectory, max_bytes: int, make_writer: MakeWriter) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._make_writer = make_writer
        self._shard_of: dict[str, int] = {}
        self._count = 0
        self._used = 0
        self._writer: Writer | None = None
        self.total_bytes = 0

    @property
    def weight_map(self) -> dict[str, str]:
        """Which tensor lies in which file."""
        return {name: shard_name(n, self._count) for name, n in self._shard_of.items()}

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            if self._writer is not None:
                self._writer.discard()
            return
        (self._writer or self._current(0)).finish()
        # How many there are is known only now, and every name says it.
        for number in range(1, self._count + 1):
            self._directory.rename(_provisional(number), shard_name(number, self._count))

    def copy_all(self, refs: Iterable[TensorRef]) -> None:
        """Write tensors into the current shard, or a new one where they do not fit."""
        for ref in refs:
            if ref.name in self._shard_of:
                raise LayoutError(f"tensor {ref.name!r} came twice")
            self._current(ref.nbytes).copy_all([ref])
            self._shard_of[ref.name] = self._count
            self._used += ref.nbytes
            self.total_bytes += ref.nbytes

    def _current(self, nbytes: int) -> Writer:
        if self._writer is not None and self._used and self._used + nbytes > self._max_bytes:
            self._writer.finish()
            self._writer = None
        if self._writer is None:
            self._count += 1
            self._used = 0
            path = self._directory.path_of(_provisional(self._count))
            self._writer = self._make_writer(path, None)
        return self._writer


def _provisional(number: int) -> str:
    return f"shard-{number:05d}"
