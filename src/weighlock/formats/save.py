"""Save tensors from anywhere into one safetensors file or several. Knows what to write where."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from weighlock.disk.atomic import AtomicFile
from weighlock.disk.directory import AtomicDirectory
from weighlock.disk.spool import Spool
from weighlock.errors import LayoutError
from weighlock.formats.grouping import GROUPS_KEY, written_groups
from weighlock.formats.safetensors import check_metadata, is_alias
from weighlock.formats.sharded import INDEX_NAME, build_index
from weighlock.formats.shards import PlannedShards, StreamedShards
from weighlock.formats.writer import Writer
from weighlock.limits import Limits, check_number
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import refs_of, refs_of_pairs
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import SpecsLike, TensorSpec
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    import os

__all__ = [
    "Tensors",
    "check_tied",
    "metadata_to_write",
    "own_metadata",
    "save",
    "source_positions",
    "untied",
]

Tensors: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"


@overload
def save(
    path: "str | os.PathLike[str]",
    tensors: Tensors,
    specs: "SpecsLike | None" = None,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    *,
    tied: Literal["copy", "alias"] = "copy",
    max_shard_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    limits: Limits | None = None,
) -> None: ...


@overload
def save(
    path: Spool,
    tensors: Tensors,
    specs: "SpecsLike | None" = None,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    *,
    tied: Literal["copy", "alias"] = "copy",
    progress: Callable[[int], None] | None = None,
    limits: Limits | None = None,
) -> Catalog: ...


def save(
    path: "str | os.PathLike[str] | Spool",
    tensors: Tensors,
    specs: "SpecsLike | None" = None,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    *,
    tied: Literal["copy", "alias"] = "copy",
    max_shard_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    limits: Limits | None = None,
) -> Catalog | None:
    """Write tensors to a safetensors file, holding a few megabytes of them at most.

    Args:
        path: the destination; with `max_shard_bytes`, a directory that is new or empty. A spool
            for a temporary file.
        tensors: a mapping or catalog, or an iterable of `(name, tensor)`; a tensor is a numpy
            array, a torch tensor on any device, or a ref, which is copied from where it lies.
        specs: what an iterable will give, in any order, as `TensorSpec` or `(name, dtype, shape)`,
            or a mapping or catalog of the same names. Without it the file is laid down as tensors
            come.
        metadata: text to store beside the tensors; a catalog's own is kept if this is not given.
        durable: survive a power loss once this returns.
        tied: tensors of a mapping that are the same view of the same memory are written once for
            each name (`"copy"`) or once, with the other names in the metadata (`"alias"`).
        max_shard_bytes: write `model-00001-of-0000N.safetensors` files with at most so many bytes
            of tensors each, a larger tensor in a file of its own, and their index.
        progress: called after each step with the bytes it wrote.
        limits: bounds of the header.

    Returns:
        For a spool, the catalog of what was written, which lives as long as its refs.

    Raises:
        LayoutError: tensors and specs disagree, or something is not a plain tensor.
        DiskError: the disk refused.
        On any exception the destination is untouched and nothing lies beside it.
    """
    limits = limits or Limits()
    check_tied(tied)
    if max_shard_bytes is not None:  # a shard must hold something
        check_number("max_shard_bytes", max_shard_bytes, 1, is_whole=True)
    beside = check_metadata(metadata_to_write(tensors, metadata))
    refs: Iterable[TensorRef]
    aliases: dict[str, str] = {}
    if isinstance(tensors, Mapping):
        known = refs_of(tensors)
        if tied == "alias":
            known, aliases = untied(known, beside)
        refs = known
        if specs is None:
            specs = [ref.spec for ref in known]
    elif tied == "alias":
        raise LayoutError(
            'tied="alias" needs a mapping: tensors of an iterable may share memory by chance'
        )
    else:
        refs = refs_of_pairs(tensors)
    job = _Job(durable, beside, aliases, source_positions(refs), progress, limits)
    announced = None if specs is None else TensorSpec.several(specs)
    check_texts(beside, announced or ())
    if isinstance(path, Spool):
        if max_shard_bytes is not None:
            raise LayoutError("max_shard_bytes: what is saved to a spool is one file")
        with job.writer(path, announced) as writer:
            _write_all(writer, refs)
        return writer.landed(limits)
    if max_shard_bytes is None:
        with job.writer(path, announced) as writer:
            _write_all(writer, refs)
    else:
        _save_sharded(path, refs, announced, max_shard_bytes, job)
    return None


@dataclass(frozen=True, slots=True)
class _Job:
    """What every file of one save has in common."""

    durable: bool
    metadata: Mapping[str, str]
    aliases: Mapping[str, str]
    """Names that are not written, and the names of the tensors they stand for."""
    positions: Mapping[str, int]
    """Where tensors lie in the file they come from: written in that order, it is read straight."""
    progress: Callable[[int], None] | None
    limits: Limits

    def staged_writer(self, path: str, specs: list[TensorSpec] | None) -> Writer:
        """A writer for one file of a directory that is put in place as a whole."""
        return self.writer(path, specs, staged=True)

    def writer(
        self,
        path: "str | os.PathLike[str] | Spool",
        specs: list[TensorSpec] | None,
        *,
        staged: bool = False,
    ) -> Writer:
        """A writer for one file; its metadata holds the aliases of the tensors it gets."""
        order = None
        if specs is not None and self.positions:
            order = sorted((s.name for s in specs), key=lambda name: self.positions.get(name, 0))
        names = {spec.name for spec in specs or ()}
        aliases = {alias: name for alias, name in self.aliases.items() if name in names}
        return Writer(
            path,
            specs,
            data_order=order,
            metadata={**self.metadata, **aliases},
            durable=self.durable,
            staged=staged,
            progress=self.progress,
            limits=self.limits,
        )


def source_positions(refs: Iterable[TensorRef]) -> dict[str, int]:
    """Offsets of tensors that all lie in one source; of any others, none."""
    stored = [ref for ref in refs if isinstance(ref, StoredRef)] if isinstance(refs, list) else []
    if not stored or len(stored) != len(refs) or len({id(ref.source) for ref in stored}) != 1:  # type: ignore[arg-type]
        return {}
    return {ref.name: ref.span.offset for ref in stored}


def _write_all(
    writer: "Writer | PlannedShards | StreamedShards", refs: Iterable[TensorRef]
) -> None:
    if isinstance(refs, list):
        writer.copy_all(refs)  # all at once, so that neighbours are copied together
    else:
        for ref in refs:
            writer.copy_all([ref])


def own_metadata(catalog: Catalog) -> dict[str, str]:
    """What a catalog's files say about the model, without what described only the files.

    Shards say it each for themselves: what all of them agree on counts.
    """
    shards = list(catalog.shards().values())
    agreed = dict(shards[0].metadata) if shards else {}
    for shard in shards[1:]:
        agreed = {key: text for key, text in agreed.items() if shard.metadata.get(key) == text}
    dropped = {"total_size", GROUPS_KEY}
    dropped |= {*catalog.aliases, *(name for s in shards for name in s.aliases)}
    return {
        key: value for key, value in {**agreed, **catalog.metadata}.items() if key not in dropped
    }


def metadata_to_write(
    tensors: object, metadata: Mapping[str, str] | None
) -> Mapping[str, str] | None:
    """What a file that is written of tensors says beside them: what is given, or a catalog's own.

    Which of them belong together it says in any case.
    """
    if not isinstance(tensors, Catalog):
        return metadata
    given = own_metadata(tensors) if metadata is None else metadata
    return {**written_groups(tensors.groups), **given}


def check_tied(tied: str) -> None:
    """Raise `LayoutError` unless it says what becomes of tied tensors."""
    if tied not in ("copy", "alias"):
        raise LayoutError(f'tied={tied!r}: tied tensors are written as "copy" or as "alias"')


def check_texts(metadata: Mapping[str, str], specs: Iterable[TensorSpec]) -> None:
    """Raise `LayoutError` for what every reader would take for another name of a tensor."""
    names = {spec.name for spec in specs}
    for key, value in metadata.items():
        if is_alias(key, value, names):
            raise LayoutError(
                f"metadata {key!r} is {value!r}, the name of a tensor: readers take {key!r} for "
                "another name of it, as of tied tensors; word it otherwise"
            )


def untied(
    refs: list[TensorRef], metadata: Mapping[str, str]
) -> tuple[list[TensorRef], dict[str, str]]:
    """The refs without those that repeat another, and the names of those: name to name kept."""
    first: dict[object, str] = {}
    kept: list[TensorRef] = []
    aliases: dict[str, str] = {}
    for ref in refs:
        # Tensors without bytes share whatever address they have by chance.
        name = first.setdefault(ref.identity(), ref.name) if ref.nbytes else ref.name
        if name == ref.name:
            kept.append(ref)
        elif ref.name in metadata or ref.name == "format":
            raise LayoutError(
                f"tensor {ref.name!r} is tied to {name!r}, but the metadata has a {ref.name!r} too"
            )
        else:
            aliases[ref.name] = name
    return kept, aliases


def _save_sharded(
    path: "str | os.PathLike[str]",
    refs: Iterable[TensorRef],
    specs: list[TensorSpec] | None,
    max_bytes: int,
    job: _Job,
) -> None:
    shards: PlannedShards | StreamedShards
    with AtomicDirectory(path, durable=job.durable) as directory:
        if specs is None:
            shards = StreamedShards(directory, max_bytes, job.staged_writer)
        else:
            directory.reserve(sum(spec.nbytes for spec in specs))
            shards = PlannedShards(directory, specs, max_bytes, job.staged_writer)
        with shards:
            _write_all(shards, refs)
        weight_map = dict(shards.weight_map)
        weight_map.update((alias, weight_map[name]) for alias, name in job.aliases.items())
        with AtomicFile(directory.path_of(INDEX_NAME), durable=job.durable, staged=True) as file:
            texts = {key: text for key, text in job.metadata.items() if key != GROUPS_KEY}
            index = build_index(weight_map, shards.total_bytes, texts)
            file.write(0, memoryview(index))
