"""Checkpoints inside checkpoints: what `torch.save` wrote into bytes that were saved in turn.

Knows where bytes may lie among the extras, and how names of the inner tensors follow from there.
The bytes stay in the extras as well. What cannot be opened is noted and changes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from weighlock.errors import FormatError, LimitExceeded
from weighlock.formats.pickle_records import Call, SetRecord
from weighlock.formats.rebuild_numpy import raw_bytes
from weighlock.formats.record_nodes import label_of
from weighlock.formats.tar_directory import is_tar
from weighlock.formats.torch_legacy import is_legacy
from weighlock.limits import Limits
from weighlock.sources.base import Source
from weighlock.sources.local import BytesSource
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.spec import check_name

__all__ = ["nested_checkpoints", "with_nested", "within"]

_HEAD_BYTES = 512
"""As much of bytes as it takes to tell."""

_Open: TypeAlias = Callable[[Source, Limits], Catalog]
_Check: TypeAlias = Callable[[Callable[[int], None]], None]


def _is_checkpoint(first: bytes) -> bool:
    """Whether bytes that begin so were written by `torch.save`."""
    return first.startswith(b"PK\x03\x04") or is_legacy(first) or is_tar(first)


def with_nested(catalog: Catalog, limits: Limits, open_source: _Open) -> Catalog:
    """The catalog, and the tensors of checkpoints among its extras under `path.name`.

    Each is opened once, where it is found first. Inner pickles may be as long as the bytes they lie
    in, so that all of them together are bounded by the outer one's limit.
    """
    is_torch = catalog.metadata.get("format") == "pt"  # others have no bytes, and long lists
    if not is_torch or catalog.is_sharded or not limits.nested_depth:
        return catalog
    joined: _Joined | None = None
    opened_bytes = 0
    for path, raw in _checkpoints(catalog.extras):
        joined = joined or _Joined(catalog, limits)
        name = ".".join(label_of(part) for part in path)
        bounded = within(raw, limits)
        opened_bytes += len(raw)
        try:
            limits.check("pickle_bytes", opened_bytes, "bytes of nested checkpoints")
            part = open_source(BytesSource(raw, f"bytes at {name}"), bounded)
            joined.add(name, with_nested(part, bounded, open_source))
        except (FormatError, LimitExceeded) as error:
            joined.notes.append(f"{name} begins as a checkpoint and is none: {error}")
    return catalog if joined is None else joined.catalog()


def within(raw: bytes, limits: Limits) -> Limits:
    """What a checkpoint in these bytes may ask for: no more than they are, and one level less."""
    most = min(len(raw), limits.pickle_bytes)
    opcodes = min(most, limits.pickle_opcodes)
    depth = limits.nested_depth - 1
    return replace(limits, pickle_bytes=most, pickle_opcodes=opcodes, nested_depth=depth)


def nested_checkpoints(root: Any) -> Iterator[bytes]:
    """Every checkpoint that lies as bytes among the records of a pickle, once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind not in _HOLDERS or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is bytes:
            if _is_checkpoint(value[:_HEAD_BYTES]):
                yield value
        elif kind is Call:
            parts = (value.args, value.kwargs, value.states, value.items, value.appended)
            stack.extend(parts)
            # Protocol 2 has no bytes: they are made of a text.
            first = value.args[0] if value.args else None
            if type(first) is str and id(first) not in seen:
                seen.add(id(first))
                if _is_checkpoint(first[:_HEAD_BYTES].encode("latin1", "replace")):
                    # What bytes are made of it is not known: these are looked at all the same.
                    yield raw_bytes(value) or first.encode("latin1", "replace")
        else:
            stack.extend(value.values() if kind is dict else _members(value))


_HOLDERS = {bytes, dict, list, tuple, SetRecord, Call}


def _members(value: Any) -> list[Any]:
    return value.values if type(value) is SetRecord else list(value)


def _checkpoints(extras: Any) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    """Every checkpoint in a tree of plain values, by identity: it may be shared many times over."""
    seen: set[int] = set()
    stack: list[tuple[tuple[Any, ...], Any]] = [((), extras)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, bytes):
            if id(value) not in seen and _is_checkpoint(value[:_HEAD_BYTES]):
                seen.add(id(value))
                yield path, value
            continue
        if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        below = [(key, v) for key, v in pairs if isinstance(v, (bytes, dict, list, tuple))]
        stack.extend(((*path, key), item) for key, item in reversed(below))


class _Joined:
    """A catalog to which nested ones are added."""

    def __init__(self, outer: Catalog, limits: Limits) -> None:
        self._outer = outer
        self._limits = limits
        self._refs = dict(outer.items())
        self._unreadable = dict(outer.unreadable)
        self._groups = dict(outer.groups)
        self._named = dict(outer.globals)
        self._checks: list[_Check] = [outer.check]
        self.notes: list[str] = list(outer.notes)

    def add(self, path: str, inner: Catalog) -> None:
        """Take over all that a nested catalog has, below a path."""
        self._limits.check("tensors", len(self._refs) + len(inner), "tensors with nested ones")
        names = {name: self._free(f"{path}.{name}") for name in inner}
        self._refs |= {names[name]: ref.renamed(names[name]) for name, ref in inner.items()}
        for name, reason in inner.unreadable.items():
            self._unreadable[self._free(f"{path}.{name}")] = reason
        for name, group in inner.groups.items():
            self._groups[f"{path}.{name}"] = group.renamed(names.__getitem__)
        self._named = {**inner.globals, **self._named}
        self._checks.append(inner.check)
        self.notes.append(f"{path} is a checkpoint of its own, with {len(inner):,} tensors")
        self.notes += [f"{path}: {note}" for note in inner.notes]

    def _free(self, name: str) -> str:
        """The name, or one like it that is not taken."""
        check_name(name)
        self._limits.check("name_bytes", len(name), "length of a name")
        free, number = name, 1
        while free in self._refs or free in self._unreadable:
            number += 1
            free = f"{name}#{number}"
        if free != name:
            self.notes.append(f"{name!r} is taken: the one of a nested checkpoint is {free}")
        return free

    def catalog(self) -> Catalog:
        """All of it; it takes over what the outer one has to close."""
        check = partial(_check_all, tuple(self._checks))
        beside = Beside(
            self._outer.aliases,
            self._outer.extras,
            tuple(self.notes),
            self._unreadable,
            self._named,
            check,
            self._groups,
        )
        return self._outer.replaced(self._refs, beside)


def _check_all(checks: "tuple[_Check, ...]", progress: Callable[[int], None]) -> None:
    for check in checks:
        check(progress)
