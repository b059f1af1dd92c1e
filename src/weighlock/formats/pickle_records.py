"""What an inert pickle is made of: records that stand for what a pickle would import and call.

Knows how they may be put together, as lists, dicts and sets are; not the bytes they come from, and
not what they mean.
"""

from typing import Any

__all__ = [
    "LARGEST_KEY",
    "NUMBER_TUPLES",
    "Call",
    "Global",
    "Malformed",
    "NotTaken",
    "OddKey",
    "PersistentId",
    "SetRecord",
    "append",
    "check_key",
    "set_items",
]

LARGEST_KEY = 2**64
"""Larger ints can be chosen to share one hash, which makes a dict crawl; of these, at most 16."""

_KEY_DEPTH = 8
_KEY_NODES = 256
NUMBER_TUPLES = 4096
"""Entries of a dict up to which tuples of numbers are taken as keys: they can share a hash, too."""


class Malformed(Exception):
    """What is wrong with a pickle; the machine adds where."""


class NotTaken(Malformed):
    """What the machine does not take although `pickle` may, and then goes on."""


class Global:
    """Something the pickle would import: `module.name`."""

    __slots__ = ("dotted", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.dotted = f"{module}.{name}".strip(".")
        """Both together: once, as thousands of objects may be told by it."""

    def __repr__(self) -> str:
        return f"<Global {self.module}.{self.name}>"


class PersistentId:
    """Something the pickle would ask its loader for: in torch's files, a storage."""

    __slots__ = ("meaning", "pid")

    def __init__(self, pid: Any) -> None:
        self.pid = pid
        self.meaning: Any = None
        """What `rebuild` made of it, once that has been asked: it is asked for every tensor."""


class Call:
    """An object the pickle would make by calling something, and what it would do to it."""

    __slots__ = ("appended", "args", "func", "items", "known", "kwargs", "states")

    known: Any
    """What it was found to be, where many records may share it: bytes, a storage. Else unset."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.states: list[Any] | None = None
        """Arguments of BUILD: what would become its attributes."""
        self.items: list[tuple[Any, Any]] | None = None
        """Pairs of SETITEM, in order."""
        self.appended: list[Any] | None = None
        """Values of APPEND and ADDITEMS, in order."""


class SetRecord:
    """A set or frozenset, as the list of what was put into it."""

    __slots__ = ("frozen", "values")

    def __init__(self, values: list[Any], *, frozen: bool) -> None:
        self.values = values
        self.frozen = frozen


class OddKey:
    """A key of a dict that could be made to hash slowly. It goes by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def set_items(target: Any, values: list[Any]) -> None:
    """What SETITEMS does: alternate keys and values into a dict or an object."""
    if len(values) % 2:
        raise Malformed("sets items of an odd number of keys and values")
    if type(target) is dict:
        for index in range(0, len(values), 2):
            key = values[index]
            if type(key) is not str and check_key(key, len(target)):
                key = OddKey(key)
            target[key] = values[index + 1]
    elif type(target) is Call:
        if target.items is None:
            target.items = []
        target.items.extend(zip(values[::2], values[1::2], strict=True))
    else:
        raise NotTaken(f"sets items of a {type(target).__name__}")


def check_key(key: Any, others: int = 0) -> bool:
    """Refuse what Python could not hash, or only with a deep C stack; True for what may be slow.

    `others` is how many keys are there already: tuples of several numbers can be made to collide,
    as -1 and -2 do, whatever else is in them.
    """
    level = [key]
    nodes = numbers = 0
    is_large = False
    for _ in range(_KEY_DEPTH):
        inner: list[Any] = []
        nodes += len(level)
        if nodes > _KEY_NODES:
            raise NotTaken(f"uses a tuple of more than {_KEY_NODES} values as a key")
        for value in level:
            kind = type(value)
            numbers += kind in (int, float)
            if kind is tuple:
                inner.extend(value)
            elif kind is int:
                is_large |= not -LARGEST_KEY <= value <= LARGEST_KEY
            elif kind in (list, dict):
                raise Malformed(f"uses a {kind.__name__} as a key")
        if not inner:
            return is_large or (numbers > 1 and others >= NUMBER_TUPLES)
        level = inner
    raise NotTaken("uses deeply nested tuples as a key")


def append(target: Any, values: list[Any]) -> None:
    """What APPENDS and ADDITEMS do: values into a list, a set or an object."""
    if type(target) is list:
        target.extend(values)
    elif type(target) is Call:
        if target.appended is None:
            target.appended = []
        target.appended.extend(values)
    elif type(target) is SetRecord and not target.frozen:
        target.values.extend(values)
    else:
        raise NotTaken(f"appends to a {type(target).__name__}")
