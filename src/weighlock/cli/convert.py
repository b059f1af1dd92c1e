"""`weighlock convert`: weights into safetensors, streaming."""

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.names import chosen_by, renamed
from weighlock.cli.progress import progress_bar, quiet_option
from weighlock.cli.shared import (
    SIZE,
    check_target,
    json_option,
    label,
    note_other_name,
    print_json,
    print_notes,
    tell,
    weights,
)
from weighlock.cli.text import counted, escaped, size
from weighlock.errors import UnsupportedDType
from weighlock.formats.grouping import GROUPS_KEY
from weighlock.formats.save import own_metadata, save
from weighlock.sources.access import Credential
from weighlock.tensors.arrays import Array
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import CastRef
from weighlock.tensors.dtypes import DType
from weighlock.tensors.naming import some_names
from weighlock.tensors.ref import TensorRef

__all__ = ["command"]


class _FloatDType(click.ParamType):  # type: ignore[type-arg]
    """What weights can be converted to; as integers nothing would be left of most of them."""

    name = "dtype"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> DType:
        try:
            dtype = DType.of(value)
        except UnsupportedDType:
            dtype = None
        if dtype is None or not _is_possible(dtype):
            what = value if dtype is None else dtype
            possible = [d.value.lower() for d in DType if _is_possible(d)]
            self.fail(f"weights are not converted to {what}, but to {', '.join(possible)}")
        return dtype


def _is_possible(dtype: DType) -> bool:
    has_sign = dtype is not DType.F8_E8M0  # of which scales are made
    return dtype.is_float and has_sign and not dtype.is_packed and dtype.in_safetensors


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Counting(CastRef):
    """Counts the numbers that are finite, and are not any more in the new dtype."""

    lost: Counter[str] = field(default_factory=Counter)

    def _cast(self, values: Array) -> Array:
        result = CastRef._cast(self, values)
        odd = ~np.isfinite(result)
        if odd.any():
            self.lost[self.name] += int(np.count_nonzero(np.isfinite(values[odd])))
        return result


@click.command("convert")
@weights("source")
@click.argument("target", type=click.Path())
@click.option(
    "--select", "--names", "patterns", multiple=True, metavar="GLOB", help="Only these tensors."
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="REGEX=TEXT",
    help=r"Replace in every name, as in '^module\.=' or 'layer_(\d+)=layers.\1'. The last '=' "
    "ends the REGEX.",
)
@click.option(
    "--dtype",
    type=_FloatDType(),
    help="Convert floating-point tensors, but not the scales of quantised ones: bf16, f32, f16, …",
)
@click.option(
    "--max-shard-size",
    type=SIZE,
    help="Write a directory of files of this size at the most, such as 5GB.",
)
@click.option(
    "--tied",
    type=click.Choice(["copy", "alias"]),
    default="copy",
    show_default=True,
    help="Write a tensor of several names once for each of them (copy), or once, with its other "
    "names in the metadata (alias).",
)
@click.option("--metadata", "texts", multiple=True, metavar="KEY=TEXT", help="Add metadata.")
@click.option(
    "--skip-unsupported",
    is_flag=True,
    help="Leave out what safetensors cannot hold, instead of refusing.",
)
@click.option("-f", "--force", is_flag=True, help="Replace TARGET if it is a file.")
@click.option(
    "--no-sync", is_flag=True, help="Do not wait until it is on the disk: a power loss may take it."
)
@quiet_option
@credential_options
@json_option
def command(
    source: str,
    target: str,
    patterns: Sequence[str],
    renames: Sequence[str],
    dtype: DType | None,
    max_shard_size: int | None,
    tied: str,
    texts: Sequence[str],
    skip_unsupported: bool,
    force: bool,
    no_sync: bool,
    quiet: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """Write the tensors of SOURCE to TARGET as safetensors.

    Copies go from file to file in the kernel where they can, and never hold a whole tensor.
    """
    check_target(target, force=force, is_directory=max_shard_size is not None)
    with weighlock.open(source, access=access_to(credential, source)) as catalog:
        notes = catalog.notes
        print_notes(notes, {})  # what is left out is told below
        lost: Counter[str] = Counter()
        chosen = _chosen(catalog, patterns, renames, dtype, lost)
        if dtype is not None:
            packed = [r for r in chosen.values() if r.dtype.is_packed and r.dtype.is_float]
            notes = (*notes, *_left_packed(packed))
            print_notes(_left_packed(packed), {})
        skipped = _unsupported(chosen, patterns)
        if skipped and not skip_unsupported:
            name, reason = next(iter(skipped.items()))
            raise UnsupportedDType(
                f"{label(source)}: tensor {name!r} cannot be written: {reason}; "
                f"--skip-unsupported leaves out {len(skipped)}"
            )
        chosen = chosen.only(name for name in chosen if name not in skipped)
        for ref in chosen.values():
            ref.check_whole()
        shared = _shared_names(chosen)
        total = sum(ref.nbytes for ref in chosen.values()) if tied == "copy" else chosen.nbytes
        with progress_bar(f"{label(source)} → {target}", total, quiet=quiet) as progress:
            save(  # type: ignore[call-overload]
                target,
                chosen,
                metadata=_metadata(chosen, texts) if texts else None,
                durable=not no_sync,
                tied=tied,
                max_shard_bytes=max_shard_size,
                progress=progress,
            )
    if max_shard_size is None:
        note_other_name(target)
    if as_json:
        facts: dict[str, object] = {"source": label(source), "target": target}
        facts |= {"tensors": len(chosen), "bytes": total}
        facts |= {"skipped": skipped, "tied": shared, "overflowed": dict(+lost)}
        print_json({**facts, "notes": notes})
    else:
        for name, count in (+lost).items():
            numbers = "1 number is" if count == 1 else f"{count:,} numbers are"
            tell(f"note: {escaped(name)}: {numbers} too large for {dtype}")
        for name, reason in skipped.items():
            click.echo(f"left out: {escaped(name)}: {escaped(reason)}")
        if shared:
            how = "written once for each name" if tied == "copy" else "written once"
            names = (
                "1 name shares its" if len(shared) == 1 else f"{len(shared):,} names share their"
            )
            click.echo(f"{names} tensor with another: {how}")
        click.echo(f"{escaped(target)}: {counted(len(chosen), 'tensor')}, {size(total)}")


def _chosen(
    catalog: Catalog,
    patterns: Sequence[str],
    renames: Sequence[str],
    dtype: DType | None,
    lost: Counter[str],
) -> Catalog:
    catalog = chosen_by(catalog, patterns)
    for rename in renames:
        catalog = renamed(catalog, rename)
    if dtype is None:
        return catalog
    groups = catalog.groups.values()
    kept = {part for g in groups if g.is_quantized for part in g.parts.values()}
    return catalog.map(
        lambda ref: (
            ref
            if not ref.dtype.is_float or ref.dtype.is_packed or ref.name in kept
            else _cast(ref, dtype, lost)
        )
    )


def _left_packed(refs: Sequence[TensorRef]) -> tuple[str, ...]:
    """What to say of tensors that stay as they are."""
    if not refs:
        return ()
    which = some_names([ref.name for ref in refs])
    return (f"{which}: of less than a byte each, numbers are not converted",)


def _cast(ref: TensorRef, dtype: DType, lost: Counter[str]) -> TensorRef:
    cast = CastRef.of(ref, dtype)
    return _Counting(cast.spec, cast.original, lost) if isinstance(cast, CastRef) else cast


def _unsupported(catalog: Catalog, patterns: Sequence[str]) -> dict[str, str]:
    """What a safetensors file cannot hold, and why."""
    found = {
        name: reason
        for name, reason in catalog.unreadable.items()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    for name, ref in catalog.items():
        if not ref.dtype.in_safetensors:
            found[name] = f"safetensors has no type for {ref.dtype}"
    return found


def _shared_names(catalog: Catalog) -> dict[str, str]:
    """Names whose tensor goes by an earlier name too, and that name."""
    first: dict[object, str] = {}
    shared: dict[str, str] = {}
    for name, ref in catalog.items():
        kept = first.setdefault(ref.identity(), name) if ref.nbytes else name
        if kept != name:
            shared[name] = kept
    return shared


def _metadata(catalog: Catalog, texts: Sequence[str]) -> dict[str, str]:
    given = dict(_pair("--metadata", text) for text in texts)
    if GROUPS_KEY in given:
        raise click.BadParameter(
            f"{GROUPS_KEY!r} is written by weighlock itself", param_hint="--metadata"
        )
    return {**own_metadata(catalog), **given}


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"{text!r} has no '=', or nothing before it", param_hint=option)
    return key, value
