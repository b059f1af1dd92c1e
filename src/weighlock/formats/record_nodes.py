"""What the nodes of a checkpoint's tree hold, and what they are as plain values.

Knows containers, modules and objects by how their records look; each function looks at one node and
its children, never below. Walking is `record_tree`'s.
"""

from typing import Any

from weighlock.formats.pickle_records import LARGEST_KEY, Call, PersistentId, SetRecord
from weighlock.formats.rebuild_numpy import raw_bytes
from weighlock.formats.record_keys import SIMPLE, class_of, label_of, name_of

__all__ = ["children_of", "entries_in", "is_bare", "label_of", "plain_object"]

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
_LONGEST_PATH = 1024
_MOST_PARTS = 64
_WRAPPED = 16
"""How many records around a tensor are looked through."""
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"}


_GRAPHS = {
    ("torch.fx.graph_module", "reduce_graph_module"),
    ("torch.fx.graph_module", "reduce_package_graph_module"),
    ("torch.fx.graph_module", "reduce_deploy_graph_module"),
}
"""What makes a traced module of its attributes, and of the code that runs it."""

_PERSISTENT = "_reconstruct_persistent_obj"
"""What makes an object of `{"state": its attributes, "module_src": its code, …}`, in the module of
any project: whole generators of images are pickled so."""

_MODULE_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _states(call: Call) -> list[Any]:
    """Arguments of BUILD: of those given more than once the last, as that counts.

    A pair of a dict and a dict of slots are two.
    """
    found: dict[int, Any] = {}
    for state in call.states or ():
        is_pair = type(state) is tuple and len(state) == 2
        parts = state if is_pair and all(type(p) in (dict, type(None)) for p in state) else (state,)
        for part in parts:
            found.pop(id(part), None)
            found[id(part)] = part
    return list(found.values())


def _attributes(call: Call) -> dict[Any, Any]:
    """What BUILD would make attributes of, or a function that puts a traced module together."""
    found: dict[Any, Any] = {}
    if name_of(call) in _GRAPHS and call.args and type(call.args[0]) is dict:
        found.update(call.args[0])
    found.update(_persistent_state(call) or {})
    for state in _states(call):
        if type(state) in (dict, type(None)):
            found.update(state or {})
        else:
            found["state"] = state
    return found


def _persistent_state(call: Call) -> dict[Any, Any] | None:
    given = call.args[0] if len(call.args) == 1 else None
    if type(given) is not dict or name_of(call)[1] != _PERSISTENT:
        return None
    state = given.get("state")
    return state if type(state) is dict else None


def entries_in(call: Call) -> int:
    """How many entries it takes to tell what an object holds: those of all that it is made of."""
    count = _numbers_of_scales(call)
    for _ in range(_WRAPPED):
        if call.args and type(call.args[0]) is PersistentId:
            break  # a plain tensor
        states = _states(call)
        state_of_it = _persistent_state(call)
        if state_of_it is not None:
            states.append(state_of_it)
        parts = [*states, *call.args[:1], call.items, call.appended, call.states]
        for state in (*states, *call.args[:1]):
            if type(state) is dict and "_modules" in state:
                parts += [state.get(name) for name in _MODULE_PARTS]
        for part in parts[:]:
            if type(part) is Call:
                parts += [*part.args[:1], part.items, part.appended]
        for state in call.args[3:4]:  # the attributes of a wrapped tensor: a dict, or several
            parts += [state, *(state if type(state) is tuple else ())]
        count += sum(_length(part) for part in parts)
        inner = next((part for part in call.args[:3] if type(part) is Call), None)
        if inner is None:
            break
        call = inner
    return count


def _numbers_of_scales(call: Call) -> int:
    """Numbers of a quantised tensor that lie in lists: each time they are copied."""
    if len(call.args) < 5 or type(call.args[4]) is not tuple:
        return 0
    parts = [p.args[0] if type(p) is Call and p.args else p for p in call.args[4][:4]]
    return sum(map(_length, parts))


def _length(value: Any) -> int:
    if type(value) is SetRecord:
        return len(value.values)
    return len(value) if type(value) in (dict, list, tuple) else 0


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Pairs of a dict, whether plain or a record."""
    if type(value) is dict:
        return list(value.items())
    if type(value) is not Call:
        return []
    pairs: list[tuple[Any, Any]] = []
    first = value.args[0] if value.args else None
    if name_of(value) in _DICTS and type(first) is list:  # Python 2 wrote [[key, value], …]
        pairs = [(p[0], p[1]) for p in first if type(p) in (list, tuple) and len(p) == 2]
    elif name_of(value) in _DICTS and type(first) is dict:
        pairs = list(first.items())
    # Of two values of a key the last counts. What Python could not hash is a key of its own.
    last = {_token(key): (key, item) for key, item in [*pairs, *(value.items or ())]}
    return list(last.values())


def _token(key: Any) -> Any:
    if type(key) is int and abs(key) > LARGEST_KEY:
        return hex(key)
    return (type(key), key) if type(key) in SIMPLE else id(key)


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
    name = name_of(value)
    if name in _DICTS:
        return _entries(value)  # its attributes, such as `_metadata`, are not entries
    if name in _LISTS:
        return list(enumerate(_elements(value)))
    children = list(attributes.items()) + _entries(value)
    children += list(enumerate(value.appended or ()))
    if value.args and _persistent_state(value) is None:
        children.append(("args", value.args))
    return children + ([("kwargs", value.kwargs)] if value.kwargs else [])


def is_bare(plain: Any) -> bool:
    """Whether nothing is left of a container once the tensors are out of it."""
    if isinstance(plain, (list, tuple)):
        return all(value is None for value in plain)
    return plain is None or plain == {}


def plain_object(call: Call, entries: dict[Any, Any]) -> Any:
    """An object as a plain value: what it is where that is known, else its class and content."""
    module, name = name_of(call)
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
    texts = [part for part in call.args[:_MOST_PARTS] if type(part) is str]
    is_short = len(call.args) <= _MOST_PARTS and sum(map(len, texts)) <= _LONGEST_PATH
    if is_short and module == "pathlib" and name in _PATHS and len(texts) == len(call.args):
        return "/".join(call.args).replace("//", "/")
    if is_short and (module, name) == ("torch", "device"):
        return ":".join(label_of(part) for part in call.args if type(part) in (str, int))
    parts = call.args[:2]
    small = all(type(p) is float or (type(p) is int and abs(p) <= LARGEST_KEY) for p in parts)
    if (module, name) == ("builtins", "complex") and parts and small:
        return complex(*parts)
    if module.endswith("AttributeDict") or name == "AttributeDict":
        return entries
    return {"__class__": class_of(call), **entries}
