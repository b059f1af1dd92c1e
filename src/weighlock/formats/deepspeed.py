"""DeepSpeed's ZeRO checkpoints, stages 1 to 3: the consolidated fp32 weights as a catalog.

A folder holds one file of optimizer states for each rank, in which the fp32 weights lie flat, and
files of model states that name the parameters and their shapes. Opening reads the heads of these
files; a parameter is read from the places it lies in. Knows the files and what they hold; which
elements make a parameter is `deepspeed_plan`'s.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from weighlock.errors import FormatError, LayoutError, TruncatedFile
from weighlock.formats.deepspeed_plan import Planned, plan_stage_3, plan_stages_1_and_2
from weighlock.formats.files_beside import FilesBeside
from weighlock.formats.meanings import MOST, check_product, ints, short
from weighlock.formats.sharded import confined
from weighlock.limits import Limits
from weighlock.sources.joined import Joined, Run
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.convert import CastRef
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    from weighlock.sources.base import Source
    from weighlock.tensors.ref import TensorRef

__all__ = ["is_deepspeed", "open_deepspeed", "tag_in"]

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_LATEST = "latest"
_STATE = "optimizer_state_dict"
_FLAT = {False: "single_partition_of_fp32_groups", True: "fp32_flat_groups"}
"""Where the flat weights are: in stages 1 and 2, and in stage 3."""

Open = Callable[["Source", Limits], Catalog]


def is_deepspeed(names: Sequence[str]) -> bool:
    """Whether a directory of these files is a ZeRO checkpoint."""
    return any(map(_OPTIMIZER.fullmatch, names)) and any(map(_MODEL.fullmatch, names))


def tag_in(path: str, names: Sequence[str]) -> str | None:
    """The folder that the file `latest` of a directory names, if it is a ZeRO checkpoint."""
    if _LATEST not in names:
        return None
    try:
        with open(os.path.join(path, _LATEST), "rb") as file:
            tag = file.read(256).decode().strip()
        folder = os.path.join(path, tag)
        is_plain = tag in names and tag == os.path.basename(tag) and not os.path.islink(folder)
        return folder if is_plain and is_deepspeed(os.listdir(folder)) else None
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def open_deepspeed(path: str, names: Sequence[str], limits: Limits, open_source: Open) -> Catalog:
    """The catalog of a folder.

    Buffers of floating-point numbers are given as fp32, as the weights are; integers stay integers.

    Args:
        path: the folder.
        names: the files in it.
        limits: what the input may ask for.
        open_source: opens one of the files.

    Raises:
        FormatError: files are missing, broken, or contradict each other.
        LimitExceeded: it asks for more than the limits allow.
    """
    optimizer, model = _files_of(path, names)
    limits.check("shards", len(optimizer) + len(model), f"{path}: files of the checkpoint")
    index = os.path.join(path, model[0])  # it names the parameters; all else lies beside it
    places = {name: confined(index, name) for name in (*optimizer, *model)}
    files = FilesBeside(places, limits)
    try:
        states = [open_source(files.source(name), limits) for name in model]
        ranks = [open_source(files.source(name), limits) for name in optimizer]
        return _catalog(path, states, ranks, files, limits)
    except FormatError as error:
        files.close()
        raise type(error)(str(error), source=None if error.source else path) from error
    except BaseException:
        files.close()
        raise


def _files_of(path: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files of optimizer states and of model states, each in the order of ranks."""
    found: list[list[str]] = []
    for pattern in (_OPTIMIZER, _MODEL):
        matches = [match for match in map(pattern.fullmatch, names) if match]
        parallel = {int(match[2]) for match in matches}
        if parallel != {0}:
            raise FormatError(
                f"is split over {len(parallel)} model-parallel ranks, which are not put together",
                source=path,
            )
        by_rank = {int(match[1] or 0): match[0] for match in matches}
        if len(by_rank) != len(matches):
            raise LayoutError("has two files of one rank", source=path)
        if sorted(by_rank) != list(range(len(by_rank))):
            missing = min(set(range(len(by_rank))) - by_rank.keys())
            raise TruncatedFile(f"has no file of rank {missing}", source=path)
        found.append([by_rank[rank] for rank in sorted(by_rank)])
    strange = [n for n in names if n.endswith("_optim_states.pt") and n not in found[0]]
    if strange:
        raise FormatError(f"holds {strange[0]!r}: experts are not put together", source=path)
    return found[0], found[1]


def _catalog(
    path: str, states: list[Catalog], ranks: list[Catalog], files: FilesBeside, limits: Limits
) -> Catalog:
    is_stage_3 = any(name.startswith(f"{_STATE}.{_FLAT[True]}.") for name in ranks[0])
    key = f"{_STATE}.{_FLAT[is_stage_3]}."
    flat = [_flat_groups(rank, key, number) for number, rank in enumerate(ranks)]
    _check_complete(ranks[0].extras, len(ranks))
    _check_no_experts(states)
    first = states[0]
    shapes = [_shapes(group, "param_shapes") for group in _list(first.extras.get("param_shapes"))]
    limits.check("tensors", sum(map(len, shapes)) * len(ranks), f"{path}: parts of parameters")
    sizes = [[ref.spec.size for ref in groups] for groups in flat]
    if is_stage_3:
        plan = plan_stage_3(shapes, sizes)
    else:
        plan = plan_stages_1_and_2(shapes, sizes, _paddings(ranks[0].extras))
    refs = _buffers(first)
    refs.update(_frozen(states if is_stage_3 else states[:1]))
    for name, planned in plan.items():
        refs[name] = _joined(name, planned, flat)
    shared = first.extras.get("shared_params")
    for name, kept in shared.items() if isinstance(shared, Mapping) else ():
        if isinstance(name, str) and isinstance(kept, str) and kept in refs:
            refs[name] = refs[kept].renamed(name)
    named = {**first.globals}
    for other in (*states[1:], *ranks):
        named = {**other.globals, **named}
    told = "3" if is_stage_3 else "1 or 2"
    note = f"fp32 weights put together from {len(ranks):,} ranks of ZeRO stage {told}"
    check = partial(_check_all, (*states, *ranks))
    beside = Beside({}, first.extras, (note,), {}, named, check)
    return Catalog(refs, {"format": "pt"}, files.close, beside=beside)


def _check_all(catalogs: Sequence[Catalog], progress: Callable[[int], None]) -> None:
    for catalog in catalogs:
        catalog.check(progress)


def _flat_groups(rank: Catalog, key: str, number: int) -> list[StoredRef]:
    """The flat fp32 weights of a rank, group by group."""
    groups: list[StoredRef] = []
    while (ref := rank.get(f"{key}{len(groups)}")) is not None:
        is_plain = isinstance(ref, StoredRef) and ref.contiguous_span is not None
        if not isinstance(ref, StoredRef) or not is_plain or len(ref.shape) != 1:
            raise LayoutError(f"group {len(groups)} of rank {number} does not lie flat in its file")
        if ref.dtype is not DType.F32:
            raise LayoutError(f"group {len(groups)} of rank {number} is {ref.dtype}, not F32")
        groups.append(ref)
    if not groups:
        raise LayoutError(f"the optimizer states of rank {number} hold no fp32 weights")
    return groups


def _check_complete(extras: Mapping[Any, Any], ranks: int) -> None:
    state = extras.get(_STATE)
    count = state.get("partition_count") if isinstance(state, Mapping) else None
    told = max(count, default=None) if isinstance(count, list) and _are_ints(count) else count
    if type(told) is int and told != ranks:
        raise TruncatedFile(f"was saved by {told:,} ranks, files of {ranks:,} are there")


def _check_no_experts(states: Sequence[Catalog]) -> None:
    """Refuse experts that lie in parts over ranks of their own, as DeepSpeed's own merging does."""
    for state in states:
        layers = state.extras.get("ds_autoep_layers") or state.extras.get("autoep_layers")
        for layer in layers if isinstance(layers, (list, tuple)) else ():
            if isinstance(layer, Mapping) and layer.get("checkpoint_format") == "zero3_partitioned":
                raise FormatError("holds experts in parts, which are not put together")


def _paddings(extras: Mapping[Any, Any]) -> list[tuple[int, ...]] | None:
    """Elements behind each parameter of each group that belong to none; None if it says nothing."""
    state = extras.get(_STATE)
    told = state.get("param_alignment_paddings") if isinstance(state, Mapping) else None
    if told is None:
        return None
    if not isinstance(told, (list, tuple)):
        raise LayoutError(f"its optimizer states hold {short(told)} as param_alignment_paddings")
    return [_counts(group) for group in told]


def _counts(group: object) -> tuple[int, ...]:
    if isinstance(group, (list, tuple)) and _are_ints(group):
        counts = tuple(group)
        if all(0 <= count < MOST for count in counts):
            return counts
    raise LayoutError(f"its optimizer states hold {short(group)} as paddings of a group")


def _are_ints(values: Sequence[object]) -> bool:
    return all(type(value) is int for value in values)


def _list(value: object) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return (value,)
    if not isinstance(value, (list, tuple)) or not value:
        raise LayoutError(f"its model states hold {short(value)} as param_shapes")
    return value


def _shapes(group: object, what: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name, checked."""
    if not isinstance(group, Mapping):
        raise LayoutError(f"its model states hold {short(group)} in {what}")
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in group.items():
        if not isinstance(name, str):
            raise LayoutError(f"its {what} name something {short(name)}")
        found[name] = ints(shape, "size")
        check_product(found[name])
    return found


def _buffers(state: Catalog) -> "dict[str, TensorRef]":
    """Buffers of the module; its parameters are there, too, but in the precision of training."""
    found: dict[str, TensorRef] = {}
    names = state.extras.get("buffer_names")
    for name in names if isinstance(names, (list, tuple)) else ():
        ref = state.get(f"module.{name}")
        if isinstance(name, str) and ref is not None:
            wide = ref.dtype.is_float and not ref.dtype.is_packed
            found[name] = CastRef.of(ref.renamed(name), DType.F32) if wide else ref.renamed(name)
    return found


def _frozen(states: list[Catalog]) -> "dict[str, TensorRef]":
    """Parameters that were not trained: whole, or in stage 3 a part of each in every rank."""
    shapes = states[0].extras.get("frozen_param_shapes") or {}
    found: dict[str, TensorRef] = {}
    for name, shape in _shapes(shapes, "frozen_param_shapes").items():
        parts = [state.get(f"frozen_param_fragments.{name}") for state in states]
        runs: list[Run] = []
        for number, part in enumerate(parts):
            span = part.contiguous_span if isinstance(part, StoredRef) else None
            if not isinstance(part, StoredRef) or span is None or part.dtype != parts[0].dtype:  # type: ignore[union-attr]
                raise LayoutError(f"frozen parameter {name!r} has no plain part in rank {number}")
            runs.append(Run(part.source, span.offset, span.length))  # type: ignore[arg-type]
        spec = TensorSpec(name, parts[0].dtype, shape)  # type: ignore[union-attr]
        found[name] = _over(spec, tuple(runs))
    return found


def _joined(name: str, planned: Planned, flat: Sequence[Sequence[StoredRef]]) -> "TensorRef":
    runs = []
    for rank, group, start, elements in planned.parts:
        ref = flat[rank][group]
        span = ref.contiguous_span
        assert span is not None  # noqa: S101
        runs.append(Run(ref.source, span.offset + 4 * start, 4 * elements))  # type: ignore[arg-type]
    return _over(TensorSpec(name, DType.F32, planned.shape), tuple(runs))


def _over(spec: TensorSpec, runs: tuple[Run, ...]) -> StoredRef:
    """A tensor over the beginning of runs; over the file itself, where it lies in one."""
    joined = Joined(runs, spec.name)
    if spec.nbytes > joined.size:
        raise LayoutError(
            f"tensor {spec.name!r} takes {spec.nbytes:,} bytes, its parts have {joined.size:,}"
        )
    one = joined.within(0, spec.nbytes)
    if one is not None:
        return StoredRef(spec, one.source, Span(one.offset, spec.nbytes))
    return StoredRef(spec, joined, Span(0, spec.nbytes))
