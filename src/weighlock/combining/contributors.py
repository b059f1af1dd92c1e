"""Who is combined: opened, named, weighed, and compared by what they say they hold.

Knows catalogs, paths and URLs; reads headers only.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeAlias

from weighlock.abort import Abort
from weighlock.errors import (
    Aborted,
    CombineError,
    ProtocolError,
    SourceError,
    SpoolClosed,
    TransferError,
    WeighlockError,
)
from weighlock.formats.detect import open_catalog
from weighlock.formats.save import own_metadata, source_positions
from weighlock.limits import Limits
from weighlock.sources.access import Access, shown
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import FileSource
from weighlock.sources.resting import Rests
from weighlock.sources.window import Window
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import as_ref
from weighlock.tensors.ref import TensorRef

__all__ = [
    "Combinable",
    "Contributor",
    "Lost",
    "Missing",
    "Opening",
    "Shared",
    "agreed_metadata",
    "aligned",
    "checked_weight",
    "in_file_order",
    "is_loss",
    "labelled",
    "named",
    "weighed",
]

Combinable: TypeAlias = "Mapping[str, object] | str | os.PathLike[str]"
"""A catalog, a state dict, a path or a URL."""

Missing: TypeAlias = Literal["error", "skip"]

_SHOWN = 3
"""So many contributors are named in one error."""


@dataclass(frozen=True, slots=True)
class Contributor:
    """One of those that are combined."""

    label: str
    """What to call it in errors and reports."""
    catalog: Catalog
    weight: float


@dataclass(frozen=True, slots=True)
class Opening:
    """How contributors are opened."""

    access: Access | None = None
    verify: bool = True
    limits: Limits | None = None
    abort: Abort | None = None
    missing: Missing = "error"
    """What becomes of tensors that a file has and that are not read: nobody else tells of them."""
    rests: bool = False
    """There are so many that none is to keep a connection, or what came with it."""

    def open(self, given: Combinable, label: str, closing: ExitStack) -> Catalog:
        """The catalog of one; what is opened for it is closed with the stack.

        Raises:
            WeighlockError: it cannot be opened. The message begins with its label.
            CombineError: it has tensors that are not read, and none may be missing.
            TypeError: it is no model.
            Aborted: somebody said stop.
        """
        if self.abort is not None:
            self.abort.check()
        _check_is_model(given, label)
        if isinstance(given, Catalog):
            return given
        try:
            if isinstance(given, Mapping):
                return Catalog({name: as_ref(name, value) for name, value in given.items()})
            opened = open_catalog(
                given, self.limits, access=self.access, verify=self.verify, abort=self.abort
            )
            closing.enter_context(opened)
            if self.missing == "error":
                _check_is_read(opened, label)
            found = opened.readable()
        except Aborted:
            raise
        except WeighlockError as error:
            named(error, label)
            raise
        source = None if opened.is_sharded else _source_of(opened)  # shards rest by themselves
        # So many contributors that none may hold a file have limits that say so.
        has_no_files = self.limits is not None and not self.limits.open_files
        is_to_rest = has_no_files if isinstance(source, FileSource) else self.rests
        if is_to_rest and isinstance(source, Rests):
            source.rest()
        return found


def _check_is_read(catalog: Catalog, label: str) -> None:
    for name, reason in catalog.unreadable.items():
        raise CombineError(
            f"tensor {name!r} is not read: {reason}; "
            f'missing="skip" (--skip-missing) leaves out {len(catalog.unreadable)}',
            contributor=label,
            tensor=name,
        )


def _source_of(catalog: Catalog) -> object:
    """What a catalog of one file reads from in the end; None if it has no tensor."""
    found = islice((source for ref in catalog.values() for source in ref.sources()), 1)
    source: object = next(found, None)
    while isinstance(source, (InflatedSource, Window)):
        source = source.source
    return source


def weighed(
    given: "Mapping[str, Combinable] | Iterable[Combinable]",
    weights: "Iterable[float] | Mapping[str, float] | None",
) -> list[tuple[str, Combinable, float]]:
    """Label, contributor and weight of each; nothing is opened.

    Raises:
        CombineError: there is nobody, two have one name, or a weight is missing, negative or no
            number.
    """
    pairs = _labelled_all(given)
    if not pairs:
        raise CombineError("there is nothing to combine: no contributor was given")
    labels = Counter(label for label, _ in pairs)
    if len(labels) < len(pairs):
        raise CombineError(f"two contributors are called {labels.most_common(1)[0][0]!r}")
    if isinstance(weights, (str, bytes)) or not isinstance(weights, (Iterable, type(None))):
        raise CombineError(
            f"weights={weights!r}: they are numbers, one for each contributor; "
            "the file to write is out="
        )
    if isinstance(weights, Mapping):
        names = list(given) if isinstance(given, Mapping) else []
        strangers = [name for name in weights if name not in names]
        if strangers:
            raise CombineError(f"there is a weight for {strangers[0]!r}, who does not contribute")
        listed = [weights.get(name) for name in names]
    else:
        listed = [1.0] * len(pairs) if weights is None else list(weights)
    if len(listed) != len(pairs):
        raise CombineError(f"there are {len(pairs)} contributors and {len(listed)} weights")
    checked = [
        (label, value, checked_weight(weight, label))
        for (label, value), weight in zip(pairs, listed, strict=True)
    ]
    total = sum(weight for *_, weight in checked)
    if not 0 < total < math.inf:
        remedy = "divide them all by one number" if total else "one must weigh more than 0"
        raise CombineError(
            f"the weights add up to {total:g}, which makes no mean: {_said(checked)}; {remedy}"
        )
    return checked


def _said(contributors: Sequence[tuple[str, Combinable, float]]) -> str:
    """Who has which weight, the largest ones first."""
    ordered = sorted(contributors, key=lambda each: -each[2])
    said = ", ".join(f"{label} has {weight:g}" for label, _, weight in ordered[:_SHOWN])
    return said + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def _labelled_all(
    given: "Mapping[str, Combinable] | Iterable[Combinable]",
) -> list[tuple[str, Combinable]]:
    """Label and contributor of each."""
    one = "pass a list of models, such as [a, b], or a mapping of names to models"
    if isinstance(given, (Catalog, str, bytes, os.PathLike)) or _is_module(given):
        raise CombineError(f"{one}, not one model")
    if isinstance(given, Mapping):
        if any(map(_is_tensor, given.values())):
            raise CombineError(f"these are tensors, not models: {one}")
        return [(str(name), value) for name, value in given.items()]
    if not isinstance(given, Iterable):
        raise TypeError(f"cannot combine a {type(given).__name__}: {one}")
    listed = list(given)
    return [
        (labelled(f"contributor {n + 1} of {len(listed)}", value), value)
        for n, value in enumerate(listed)
    ]


def _check_is_model(given: object, label: str) -> None:
    """Refuse what is often taken for a model; what else is none, whoever opens it tells."""
    if _is_module(given):
        raise TypeError(f"{label}: is a {type(given).__name__}: pass its state_dict()")
    if _is_tensor(given):
        raise TypeError(f"{label}: is a tensor: a model is a mapping of names to tensors")


def _is_module(value: object) -> bool:
    return callable(getattr(value, "state_dict", None))


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def checked_weight(weight: object, label: str) -> float:
    """The weight, if it is a number from 0 on.

    Raises:
        CombineError: it is not.
    """
    try:
        value = math.nan if isinstance(weight, (str, bytes)) else float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise CombineError(
            f"{label}: has the weight {weight!r}; a weight is a number from 0 on",
            contributor=label,
        )
    return value


def labelled(role: str, value: Combinable) -> str:
    """What to call a contributor in errors: what it is here, and where it comes from."""
    if isinstance(value, str) and value.lower().startswith(("http://", "https://")):
        return f"{role} ({shown(value)})"
    return f"{role} ({os.fspath(value)})" if isinstance(value, (str, os.PathLike)) else role


def named(error: WeighlockError, whose: str) -> None:
    """Have an error say first whose fault it is. Its class and its numbers stay."""
    error.args = (f"{whose}: {error}", *error.args[1:])


def is_loss(error: BaseException) -> bool:
    """Whether an error means that a contributor cannot be read, rather than that it is wrong."""
    losses = (SourceError, SpoolClosed, TransferError, ProtocolError)
    return isinstance(error, losses) and not isinstance(error, Aborted)


class Lost(Exception):
    """A contributor could not be read; `error` says why, and names it."""

    def __init__(self, owner: int, error: WeighlockError) -> None:
        super().__init__(str(error))
        self.owner = owner
        self.error = error


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor, and those who have it."""

    name: str
    refs: tuple[TensorRef, ...]
    owners: tuple[int, ...]
    """The number of each contributor that has a ref here."""
    lacking: tuple[int, ...] = ()

    def only(self, keep: Callable[[int], bool]) -> "Shared":
        """The same without some owners."""
        kept = [
            (ref, owner) for ref, owner in zip(self.refs, self.owners, strict=True) if keep(owner)
        ]
        return replace(
            self, refs=tuple(ref for ref, _ in kept), owners=tuple(owner for _, owner in kept)
        )


def aligned(
    contributors: Sequence[Contributor],
    missing: Missing,
    *,
    same_dtype: bool = True,
    besides: Container[str] = (),
) -> list[Shared]:
    """Every tensor with those who have it, in the order of the first contributor.

    Args:
        contributors: all of them.
        missing: what becomes of tensors that somebody lacks.
        same_dtype: whether all must have the same.
        besides: names that are not asked for.

    Raises:
        CombineError: one has another shape or dtype, or lacks a tensor and none may.
        FormatError: a file of a contributor that is opened now is broken.
        Lost: or it cannot be read.
    """
    names = dict.fromkeys(name for c in contributors for name in c.catalog)
    asked = [name for name in names if name not in besides]
    return [_shared(name, contributors, missing, same_dtype) for name in asked]


def _shared(
    name: str, contributors: Sequence[Contributor], missing: Missing, same_dtype: bool
) -> Shared:
    owners = tuple(n for n, c in enumerate(contributors) if name in c.catalog)
    lacking: tuple[int, ...] = ()
    if len(owners) < len(contributors):
        present = set(owners)
        lacking = tuple(n for n in range(len(contributors)) if n not in present)
    first = contributors[owners[0]]
    if lacking and missing == "error":
        label = contributors[lacking[0]].label
        raise CombineError(
            f"{label}: lacks tensor {name!r}, which {first.label} has; "
            'missing="skip" (--skip-missing) combines those who have it',
            contributor=label,
            tensor=name,
        )
    refs = tuple(_ref(name, contributors[owner], owner) for owner in owners)
    for owner, ref in zip(owners, refs, strict=True):
        if ref.shape != refs[0].shape or (same_dtype and ref.dtype != refs[0].dtype):
            label = contributors[owner].label
            # Where dtypes may differ, that of the first is not what is wrong.
            others = f"{refs[0].dtype} " if same_dtype else ""
            raise CombineError(
                f"{label}: tensor {name!r} is {ref.dtype} {list(ref.shape)}, but "
                f"{others}{list(refs[0].shape)} in {first.label}",
                contributor=label,
                tensor=name,
            )
    return Shared(name, refs, owners, lacking)


def _ref(name: str, contributor: Contributor, owner: int) -> TensorRef:
    """A contributor's tensor, for which a shard may have to be opened."""
    try:
        return contributor.catalog[name]
    except WeighlockError as error:
        named(error, f"{contributor.label}: tensor {name!r}")
        if is_loss(error):
            raise Lost(owner, error) from error.__cause__
        raise


def agreed_metadata(catalogs: Iterable[Catalog]) -> dict[str, str]:
    """What all of them say about themselves."""
    said = [own_metadata(catalog) for catalog in catalogs]
    return {key: text for key, text in said[0].items() if all(o.get(key) == text for o in said[1:])}


def in_file_order(tensors: Sequence[Shared]) -> list[Shared]:
    """The tensors as they lie in the file of whoever comes first, so that it is read straight."""
    positions = source_positions([shared.refs[0] for shared in tensors])
    if not positions:
        return list(tensors)
    return sorted(tensors, key=lambda shared: positions[shared.name])
