"""The tree inside a checkpoint: which tensors it holds under which names, and what else.

Knows containers, modules and objects by how their records look; not files. Every walk is iterative
and goes by identity: a pickle of 500 bytes can share its lists 2**60 times over.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weighlock.errors import LayoutError
from weighlock.formats.meanings import InlineTensor, Meaning
from weighlock.formats.pickle_records import Call, Global, PersistentId, SetRecord
from weighlock.formats.rebuild import attributes_of, tensor_of
from weighlock.formats.rebuild_numpy import raw_bytes
from weighlock.formats.torch_names import canonical
from weighlock.limits import Limits
from weighlock.tensors.spec import check_name

__all__ = ["RecordTree", "read_tree"]


@dataclass(frozen=True, slots=True)
class RecordTree:
    """What a checkpoint holds."""

    tensors: dict[str, Meaning]
    extras: dict[Any, Any]
    """What is not a tensor, as plain values."""
    notes: tuple[str, ...]
    """What a reader should know: names that had to be changed to stay apart."""


def read_tree(root: Any, limits: Limits | None = None) -> RecordTree:
    """Find every tensor below a record, and everything else as plain values.

    Raises:
        LayoutError: a tensor contradicts itself.
        LimitExceeded: it is nested too deeply, or gives more names than the limits allow.
    """
    survey = _Survey(limits or Limits())
    survey.visit(root)
    tensors, notes = _Naming(survey).names_below(root)
    extras = survey.plain.get(id(root))
    if not isinstance(extras, dict):
        extras = {} if extras is None else {"": extras}
    return RecordTree(tensors, extras, notes)


_DICTS = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "Counter"),
    ("builtins", "dict"),
}
_LISTS = {
    ("builtins", "list"),
    ("builtins", "tuple"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "deque"),
    ("torch", "Size"),
}
_SIMPLE = {int, float, bool, str, bytes, type(None)}
_LONG_TEXT = 65_536
_LONGEST_PATH = 4096
_MOST_NAME_BYTES = 64 * 1024 * 1024
_REMEMBERED_PATHS = 10_000
_LARGEST_KEY = 2**61 - 2  # larger ones can be chosen to share one hash
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"}


def _name_of(call: Call) -> tuple[str, str]:
    func = call.func
    if type(func) is PersistentId and type(func.pid) is tuple and len(func.pid) > 1:
        func = func.pid[1]  # ('module', class, file, source)
    return canonical(func.module, func.name) if type(func) is Global else ("", "")


def _attributes(call: Call) -> dict[Any, Any]:
    """What BUILD would make attributes of: a dict, or a pair of a dict and a dict of slots."""
    found: dict[Any, Any] = {}
    for state in call.states or ():
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if all(type(part) in (dict, type(None)) for part in parts):
            for part in parts:
                found.update(part or {})
        else:
            found["state"] = state
    return found


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Pairs of a dict, whether plain or a record."""
    if type(value) is dict:
        return list(value.items())
    if type(value) is not Call:
        return []
    pairs: list[tuple[Any, Any]] = []
    first = value.args[0] if value.args else None
    if _name_of(value) in _DICTS and type(first) is list:  # Python 2 wrote [[key, value], …]
        pairs = [(p[0], p[1]) for p in first if type(p) in (list, tuple) and len(p) == 2]
    elif _name_of(value) in _DICTS and type(first) is dict:
        pairs = list(first.items())
    # Of two values of a key the last counts. What Python could not hash is a key of its own.
    last = {_token(key): (key, item) for key, item in [*pairs, *(value.items or ())]}
    return list(last.values())


def _token(key: Any) -> Any:
    if type(key) is int and abs(key) > _LARGEST_KEY:
        raise LayoutError(f"an int of {key.bit_length():,} bits is used as a key")
    return (type(key), key) if type(key) in _SIMPLE else id(key)


def _module_children(state: dict[Any, Any]) -> list[tuple[Any, Any]] | None:
    """Children of a pickled torch module under their state-dict names; None if it is none."""
    if "_parameters" not in state or "_modules" not in state:
        return None
    hidden = set()
    for value in _elements(state.get("_non_persistent_buffers_set")):
        hidden.add(value if type(value) is str else None)
    children = _entries(state["_parameters"])
    children += [
        (k, v) for k, v in _entries(state.get("_buffers")) if type(k) is not str or k not in hidden
    ]
    return children + _entries(state["_modules"])


def _elements(value: Any) -> list[Any]:
    if type(value) is SetRecord:
        return value.values
    if type(value) is Call:
        first = value.args[0] if value.args else ()
        inner = list(first) if type(first) in (list, tuple) else []
        return inner + list(value.appended or ())
    return list(value) if type(value) in (list, tuple) else []


def children_of(value: Any) -> list[tuple[Any, Any]]:
    """What a node holds, each with its key, index or attribute name."""
    kind = type(value)
    if kind is dict:
        return list(value.items())
    if kind in (list, tuple, SetRecord):
        return list(enumerate(_elements(value)))
    if kind is not Call:
        return []
    attributes = _attributes(value)
    module = _module_children(attributes)
    if module is not None:
        return module
    name = _name_of(value)
    if name in _DICTS:
        return _entries(value)  # its attributes, such as `_metadata`, are not entries
    if name in _LISTS:
        return list(enumerate(_elements(value)))
    children = list(attributes.items()) + _entries(value)
    children += list(enumerate(value.appended or ()))
    children += [("args", value.args)] if value.args else []
    return children + ([("kwargs", value.kwargs)] if value.kwargs else [])


class _Survey:
    """One pass over every node, children first: what is a tensor, what holds one, what is plain."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.meaning: dict[int, Meaning] = {}
        self.holds_tensors: set[int] = set()
        self.plain: dict[int, Any] = {}
        self._pruned: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._kept: list[Any] = []  # records made on the way, kept so that no id is used twice

    def visit(self, root: Any) -> None:
        most_depth = self.limits.depth
        done: set[int] = set()
        open_nodes: set[int] = set()
        stack: list[tuple[Any, list[tuple[Any, Any]] | None]] = [(root, None)]
        while stack:
            node, children = stack.pop()
            key = id(node)
            if children is not None:
                self._close(node, children)
                open_nodes.discard(key)
                done.add(key)
                continue
            if key in done or key in open_nodes or type(node) in _SIMPLE:
                continue
            if len(open_nodes) > most_depth:
                self.limits.check("depth", len(open_nodes), "nesting of the checkpoint")
            if type(node) is Call and node.args:
                self._count_uses(node.args[0])
            meaning = tensor_of(node)
            if meaning is not None:
                self.meaning[key] = meaning
                self.holds_tensors.add(key)
                if isinstance(meaning, InlineTensor) and meaning.shape == ():
                    self.plain[key] = np.frombuffer(meaning.data, meaning.dtype)[0].item()
                done.add(key)
                stack.extend([(child, None) for child in attributes_of(node).values()])
                continue
            children = children_of(node)
            self._kept.append(children)
            open_nodes.add(key)
            stack.append((node, children))
            stack.extend((child, None) for _, child in reversed(children))

    def _count_uses(self, part: Any) -> None:
        """Refuse one long text that thousands of records would each make a copy of."""
        if type(part) in (str, bytes) and len(part) > _LONG_TEXT:
            self._uses[id(part)] += 1
            copies = self._uses[id(part)] * len(part)
            self.limits.check("pickle_bytes", copies * 8, "copies of one text")

    def _close(self, node: Any, children: list[tuple[Any, Any]]) -> None:
        if any(id(child) in self.holds_tensors for _, child in children):
            self.holds_tensors.add(id(node))
        plain = self.plain[id(node)] = self._plain(node, children)
        if id(node) in self.holds_tensors and _is_bare(plain):
            self._pruned.add(id(node))

    def value_of(self, child: Any) -> Any:
        """A child as a plain value; None for a tensor, and for what is still open (a cycle)."""
        return child if type(child) in _SIMPLE else self.plain.get(id(child))

    def _is_pruned(self, child: Any) -> bool:
        """Whether nothing but tensors was there."""
        key = id(child)
        return key in self._pruned or (key in self.meaning and self.plain.get(key) is None)

    def _plain(self, node: Any, children: list[tuple[Any, Any]]) -> Any:
        kind = type(node)
        if kind is Global:
            return f"{node.module}.{node.name}"
        if kind is PersistentId:
            return None
        if kind in (list, SetRecord):
            return [self.value_of(child) for _, child in children]
        if kind is tuple:
            return tuple(self.value_of(child) for _, child in children)
        entries = {
            _plain_key(key): self.value_of(child)
            for key, child in children
            if not self._is_pruned(child)
        }
        return entries if kind is dict else _plain_object(node, entries)


def _is_bare(plain: Any) -> bool:
    """Whether nothing is left of a container once the tensors are out of it."""
    if isinstance(plain, (list, tuple)):
        return all(value is None for value in plain)
    return plain is None or plain == {}


def _plain_object(call: Call, entries: dict[Any, Any]) -> Any:
    """An object as a plain value: what it is where that is known, else its class and content."""
    module, name = _name_of(call)
    if (module, name) in _LISTS:
        values = tuple(entries.values())
        return values if name in ("tuple", "Size", "frozenset") else list(values)
    if (module, name) in _DICTS or (module, name) in (
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
    ):
        return entries
    raw = raw_bytes(call)
    if raw is not None:
        return raw
    texts = [part for part in call.args if type(part) is str]
    is_path = module == "pathlib" and name in _PATHS and len(texts) == len(call.args)
    if is_path and sum(map(len, texts)) <= _LONGEST_PATH:
        return "/".join(call.args).replace("//", "/")
    if (module, name) == ("torch", "device"):
        return ":".join(label_of(part) for part in call.args if type(part) in (str, int))
    parts = call.args[:2]
    small = all(type(p) is float or (type(p) is int and abs(p) <= _LARGEST_KEY) for p in parts)
    if (module, name) == ("builtins", "complex") and parts and small:
        return complex(*parts)
    if module.endswith("AttributeDict") or name == "AttributeDict":
        return entries
    return {"__class__": f"{module}.{name}".strip("."), **entries}


def _plain_key(key: Any) -> Any:
    if type(key) is tuple and len(key) <= 8 and all(type(part) in _SIMPLE for part in key):
        return key
    return key if type(key) in _SIMPLE else label_of(key)


def label_of(key: Any) -> str:
    """A key as a part of a name."""
    if type(key) is str:
        return key
    if type(key) is bytes:
        return key.decode("utf-8", "backslashreplace")
    if type(key) is int and abs(key) > _LARGEST_KEY:
        return f"an int of {key.bit_length()} bits"
    if type(key) in (int, bool, float, type(None)):
        return str(key)
    if type(key) is tuple and len(key) <= 8 and all(type(part) in _SIMPLE for part in key):
        return f"({', '.join(label_of(part) for part in key)})"
    return f"{_name_of(key)[1]}" if type(key) is Call else type(key).__name__


class _Naming:
    """Walks every path that leads to a tensor, and names the tensor by it."""

    def __init__(self, survey: _Survey) -> None:
        self._survey = survey
        self._tensors: dict[str, Meaning] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._notes: list[str] = []
        self._numbers: Counter[str] = Counter()
        self._name_bytes = self._parts = 0

    def names_below(self, root: Any) -> tuple[dict[str, Meaning], tuple[str, ...]]:
        limits = self._survey.limits
        for path, node in self._paths_to_tensors(root):
            self._enter(path, self._survey.meaning[id(node)])
            if len(self._tensors) > limits.tensors:
                limits.check("tensors", len(self._tensors), "names of tensors")
        return self._tensors, tuple(self._notes)

    def _paths_to_tensors(self, root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        survey = self._survey
        if id(root) in survey.meaning:
            yield (), root
            return
        path: list[Any] = []
        on_path: set[int] = set()
        stack: list[Iterator[tuple[Any, Any]]] = []
        nodes: list[Any] = []
        if id(root) in survey.holds_tensors:
            stack, nodes, on_path = [iter(children_of(root))], [root], {id(root)}
        steps = 0
        while stack:
            steps += 1
            # Every tensor is a few steps away; more means paths that are many and lead nowhere.
            if steps % 1024 == 0:
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
            if key in survey.meaning:
                yield (*path, label), child
                for name, value in attributes_of(child).items():
                    if id(value) in survey.meaning:
                        yield (*path, label, name), value
            elif key in survey.holds_tensors and key not in on_path:
                path.append(label)
                nodes.append(child)
                on_path.add(key)
                stack.append(iter(children_of(child)))

    def _enter(self, path: tuple[Any, ...], meaning: Meaning) -> None:
        limits = self._survey.limits
        self._parts += len(path)  # a few to a name, unless names are made to be many and long
        if self._parts // 8 > limits.tensors:
            limits.check("tensors", self._parts // 8, "names of tensors, by their parts")
        name = ".".join([label_of(part) for part in path]) or "tensor"
        try:
            check_name(name)
        except LayoutError:
            escaped = name.encode("unicode_escape").decode() if name else "''"
            self._notes.append(f"a name that no file can hold is shown as {escaped!r}")
            name = "\\__metadata__" if name == "__metadata__" else escaped
        if len(name) > limits.name_bytes:
            limits.check("name_bytes", len(name), "length of a name")
        self._name_bytes += len(name)
        if self._name_bytes > _MOST_NAME_BYTES:
            limits.check("tensors", limits.tensors + 1, "names of tensors, which grow too long")
        if name in self._tensors:
            first, self._numbers[name] = name, self._numbers[name] + 1
            while (name := f"{first}#{self._numbers[first] + 1}") in self._tensors:
                self._numbers[first] += 1
            self._notes.append(
                f"{_spelled(self._paths.get(first, ()))} and {_spelled(path)} would both be named "
                f"{first!r}; the second is {name}"
            )
        self._tensors[name] = meaning
        if len(self._paths) < _REMEMBERED_PATHS:
            self._paths[name] = path


def _spelled(path: tuple[Any, ...]) -> str:
    parts = [repr(part) if type(part) in _SIMPLE else label_of(part) for part in path]
    return "$" + "".join(f"[{part}]" for part in parts)
