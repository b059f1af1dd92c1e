"""The tree inside a checkpoint: which tensors it holds under which names, and what else.

Knows nodes and paths; what a single node is, `rebuild` and `record_nodes` say. Every walk is
iterative and goes by identity: a pickle of 500 bytes can share its lists 2**60 times over.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.formats.meanings import ComposedTensor, InlineTensor, Meaning
from weighlock.formats.pickle_records import (
    NUMBER_TUPLES,
    Call,
    Global,
    PersistentId,
    SetRecord,
)
from weighlock.formats.rebuild import attributes_of, objects_in, tensor_of
from weighlock.formats.record_keys import SIMPLE, label_of, plain_key
from weighlock.formats.record_nodes import children_of, entries_in, is_bare, plain_object
from weighlock.limits import Limits
from weighlock.tensors.dtypes import DType
from weighlock.tensors.groups import Group
from weighlock.tensors.spec import check_name

__all__ = ["RecordTree", "read_tree"]


@dataclass(frozen=True, slots=True)
class RecordTree:
    """What a checkpoint holds."""

    tensors: dict[str, Meaning]
    extras: dict[Any, Any]
    """What is not a tensor, as plain values."""
    notes: tuple[str, ...]
    """What a reader should know: names and keys that had to be changed to stay apart."""
    groups: dict[str, Group]
    """Tensors that are several of those above together."""


def read_tree(root: Any, limits: Limits | None = None) -> RecordTree:
    """Find every tensor below a record, and everything else as plain values.

    Raises:
        LayoutError: a tensor contradicts itself.
        LimitExceeded: it is nested too deeply, or gives more names than the limits allow.
    """
    survey = _Survey(limits or Limits())
    survey.visit(root)
    naming = _Naming(survey)
    naming.name_below(root)
    extras = survey.value_of(root)
    if not isinstance(extras, dict):
        is_nothing = extras is None and root is not None  # it was a tensor
        extras = {} if is_nothing else {"": extras}
    notes = (*naming.notes, *survey.notes)
    return RecordTree(naming.tensors, extras, notes, naming.groups)


_LISTS = (list, tuple, SetRecord)
_LONG_TEXT = 256
_FIRST_ARGS = 4
"""Arguments of which something may be made: no more are looked at."""
_WRAPPED = 8
_MOST_NOTES = 100
_MOST_NAME_BYTES = 64 * 1024 * 1024
_REMEMBERED_PATHS = 10_000


class _Opened:
    """A node whose children are being looked at.

    They are pairs, but of a list the bare values: those may be millions of numbers.
    """

    __slots__ = ("children", "node")

    def __init__(self, node: Any, children: Collection[Any]) -> None:
        self.node = node
        self.children = children

    def values(self) -> Iterator[Any]:
        """The children without their keys."""
        if type(self.node) in _LISTS:
            return iter(self.children)
        return (child for _, child in self.children)


class _Survey:
    """One pass over every node, children first: what is a tensor, what holds one, what is plain."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.meaning: dict[int, Meaning] = {}
        self.holds_tensors: set[int] = set()
        self.plain: dict[int, Any] = {}
        self._pruned: set[int] = set()
        self._used: set[int] = set()
        self._makers: set[int] = set()
        self._copied_bytes = self._entries = 0
        self.notes: list[str] = []

    def visit(self, root: Any) -> None:
        most_depth = self.limits.depth
        seen: set[int] = set()
        open_nodes: set[int] = set()
        stack: list[Any] = [root]
        while stack:
            node = stack.pop()
            if type(node) is _Opened:
                self._close(node)
                open_nodes.discard(id(node.node))
                continue
            key = id(node)
            if key in seen or type(node) in SIMPLE:
                continue
            seen.add(key)
            if len(open_nodes) > most_depth:
                self.limits.check("depth", len(open_nodes), "nesting of the checkpoint")
            if type(node) is Call and node.args:
                self._count_uses(node)
                for state in node.states or ():  # a numpy array's data is the last of five
                    if type(state) is tuple and state and type(state[-1]) is Call:
                        self._count_uses(state[-1])
            if type(node) is Call:
                self._count_entries(entries_in(node))
            meaning = tensor_of(node)
            if meaning is not None:
                self.meaning[key] = meaning
                self.holds_tensors.add(key)
                if isinstance(meaning, InlineTensor) and meaning.shape == ():
                    self.plain[key] = np.frombuffer(meaning.data, meaning.dtype)[0].item()
                objects = objects_in(node)
                if objects:
                    stack.append(objects)
                    continue
                attributes = attributes_of(node)
                self._count_entries(len(attributes))
                stack.extend(attributes.values())
                continue
            self._count_entries(1)
            opened = _Opened(node, _children(node))
            open_nodes.add(key)
            stack.append(opened)
            below = [child for child in opened.values() if type(child) not in SIMPLE]
            stack.extend(reversed(below))

    def _count_entries(self, count: int) -> None:
        self._entries += count
        if self._entries > self.limits.pickle_entries:
            self.limits.check("pickle_entries", self._entries, "entries of the checkpoint")

    def _count_uses(self, maker: Call) -> None:
        """Refuse long texts that thousands of records would each make a copy of."""
        if not maker.args:
            return
        for _ in range(_WRAPPED):  # bytearray(encode(text)): the innermost makes it, once
            if type(maker.args[0]) is not Call or not maker.args[0].args:
                break
            maker = maker.args[0]
        texts = [x for x in maker.args[:_FIRST_ARGS] if type(x) is str and len(x) > _LONG_TEXT]
        if not texts or id(maker) in self._makers:
            return
        self._makers.add(id(maker))
        for text in texts:
            if id(text) in self._used:
                self._copied_bytes += len(text)
                self.limits.check("pickle_bytes", self._copied_bytes * 8, "copies of texts")
            self._used.add(id(text))

    def _close(self, opened: _Opened) -> None:
        node, holds_tensors = opened.node, self.holds_tensors
        if any(id(child) in holds_tensors for child in opened.values()):
            holds_tensors.add(id(node))
        plain = self.plain[id(node)] = self._plain(opened)
        if id(node) in holds_tensors and is_bare(plain):
            self._pruned.add(id(node))

    def value_of(self, child: Any) -> Any:
        """A child as a plain value; None for a tensor, and for what is still open (a cycle)."""
        return child if type(child) in SIMPLE else self.plain.get(id(child))

    def _is_pruned(self, child: Any) -> bool:
        """Whether nothing but tensors was there."""
        key = id(child)
        return key in self._pruned or (key in self.meaning and self.plain.get(key) is None)

    def _plain(self, opened: _Opened) -> Any:
        node, kind = opened.node, type(opened.node)
        if kind is Global:
            return node.dotted
        if kind is PersistentId:
            return None
        if kind in _LISTS:
            values = [self.value_of(child) for child in opened.children]
            return tuple(values) if kind is tuple else values
        entries: dict[Any, Any] = {}
        crowded = len(opened.children) > NUMBER_TUPLES
        numbers: Counter[str] = Counter()
        for key, child in opened.children:
            if type(child) not in SIMPLE and self._is_pruned(child):
                continue
            name = key if type(key) is str else plain_key(key, crowded=crowded)
            if name in entries:
                name = self._told_apart(label_of(key)[:_LONG_TEXT], entries, numbers)
            entries[name] = self.value_of(child)
        return entries if kind is dict else plain_object(node, entries)

    def _told_apart(self, label: str, entries: dict[Any, Any], numbers: Counter[str]) -> str:
        """A key for what would be called as something else is; with a note, but not thousands."""
        numbers[label] += 1
        while (name := f"{label}#{numbers[label] + 1}") in entries:
            numbers[label] += 1
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(f"among the extras, two keys would be {label!r}; one is {name!r}")
        elif len(self.notes) == _MOST_NOTES:
            self.notes.append("further keys among the extras were told apart by a number")
        return name


def _children(node: Any) -> Collection[Any]:
    if type(node) is SetRecord:
        return node.values
    if type(node) in (list, tuple):
        return node  # type: ignore[no-any-return]
    return node.items() if type(node) is dict else children_of(node)


class _Naming:
    """Walks every path that leads to a tensor, and names the tensor by it."""

    def __init__(self, survey: _Survey) -> None:
        self._survey = survey
        self.tensors: dict[str, Meaning] = {}
        self.groups: dict[str, Group] = {}
        self.notes: list[str] = []
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._numbers: Counter[str] = Counter()
        self._name_bytes = self._parts = 0

    def name_below(self, root: Any) -> None:
        """Fill `tensors`, `groups` and `notes`."""
        limits = self._survey.limits
        for path, node in self._paths_to_tensors(root):
            meaning = self._survey.meaning[id(node)]
            name = self._enter(path, meaning)
            if isinstance(meaning, ComposedTensor):
                parts = {
                    part: self._enter((*path, part), inner) for part, inner in meaning.parts.items()
                }
                self.groups[name] = Group(meaning.kind, _shown(meaning.dtype), meaning.shape, parts)
            if len(self.tensors) > limits.tensors:
                limits.check("tensors", len(self.tensors), "names of tensors")

    def _paths_to_tensors(self, root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        survey = self._survey
        path: list[Any] = []
        on_path = {id(root)}
        nodes = [root]
        stack: list[Iterator[tuple[Any, Any]]] = []
        if id(root) in survey.meaning:
            yield (), root
            stack.append(iter(attributes_of(root).items()))
        elif id(root) in survey.holds_tensors:
            stack.append(iter(children_of(root)))
        steps, most_steps = 0, 8 * survey.limits.tensors + 8192
        while stack:
            steps += 1
            # Every tensor is a few steps away; more means paths that are many and lead nowhere.
            if steps > most_steps:
                survey.limits.check("tensors", steps // 8, "steps on the way to tensors")
            step = next(stack[-1], None)
            if step is None:
                stack.pop()
                on_path.discard(id(nodes.pop()))
                if path:
                    path.pop()
                continue
            label, child = step
            key = id(child)
            below: Collection[tuple[Any, Any]]
            if key in survey.meaning:
                yield (*path, label), child
                below = attributes_of(child).items()
                steps += len(below)
            elif key in survey.holds_tensors:
                below = children_of(child)
                steps += entries_in(child) if type(child) is Call else 0
            else:
                continue
            if below and key not in on_path:
                path.append(label)
                nodes.append(child)
                on_path.add(key)
                stack.append(iter(below))

    def _enter(self, path: tuple[Any, ...], meaning: Meaning) -> str:
        limits = self._survey.limits
        self._parts += len(path)  # a few to a name, unless names are made to be many and long
        if self._parts // 8 > limits.tensors:
            limits.check("tensors", self._parts // 8, "names of tensors, by their parts")
        name = ".".join([label_of(part) for part in path]) if path else "tensor"
        try:
            check_name(name)
        except LayoutError:
            escaped = name.encode("unicode_escape").decode() if name else "''"
            name = "\\__metadata__" if name == "__metadata__" else escaped
            self.notes.append(f"a name that no file can hold is shown as {name}")
        if len(name) > limits.name_bytes:
            limits.check("name_bytes", len(name), "length of a name")
        self._name_bytes += len(name)
        if self._name_bytes > _MOST_NAME_BYTES:
            limits.check("tensors", limits.tensors + 1, "names of tensors, which grow too long")
        if name in self.tensors:
            first, self._numbers[name] = name, self._numbers[name] + 1
            while (name := f"{first}#{self._numbers[first] + 1}") in self.tensors:
                self._numbers[first] += 1
            self.notes.append(
                f"{_spelled(self._paths.get(first, ()))} and {_spelled(path)} would both be named "
                f"{first!r}; the second is {name}"
            )
        self.tensors[name] = meaning
        if len(self._paths) < _REMEMBERED_PATHS:
            self._paths[name] = path
        return name


def _shown(torch_name: str) -> str:
    """A dtype as everything else shows it, if it is one."""
    try:
        return DType.of(f"torch.{torch_name}").value
    except UnsupportedDType:
        return torch_name


def _spelled(path: tuple[Any, ...]) -> str:
    parts = [repr(part) if type(part) in SIMPLE else label_of(part) for part in path]
    return "$" + "".join(f"[{part}]" for part in parts)
