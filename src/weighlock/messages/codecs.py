"""Registered types ⇄ plain values. Knows names that users chose; a message names no class.

`encode` gives anything a message carries, tensors and other registered objects included; `decode`
takes it back. Only the very type counts that was registered, not its subclasses.
"""

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np

from weighlock.errors import CodecRefused, LocalProtocolError, MessageInvalid
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef

__all__ = ["DEFAULT", "Codec", "Registry", "register", "register_dataclass", "register_enum"]

_KNOWN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict),
        *(OrderedDict, datetime, date, time, timedelta, np.ndarray, Catalog),
    }
)
_KNOWN_WITH_KINDS = (np.generic, np.dtype, TensorRef)

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


class Codec(NamedTuple):
    """How objects of one type travel."""

    name: str
    type: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


class Registry:
    """The types a program sends and takes, by the names it gave them."""

    __slots__ = ("_by_name", "_by_type")

    def __init__(self) -> None:
        self._by_name: dict[str, Codec] = {}
        self._by_type: dict[type, Codec] = {}

    def __repr__(self) -> str:
        return f"<Registry of {sorted(self._by_name)}>"

    def copy(self) -> "Registry":
        """Another registry of the same types."""
        other = Registry()
        other._by_name.update(self._by_name)
        other._by_type.update(self._by_type)
        return other

    def of_type(self, kind: type) -> Codec | None:
        """How objects of exactly this type travel, if it is registered."""
        return self._by_type.get(kind)

    def of_name(self, name: str) -> Codec | None:
        """What a message means by this name, if it is registered."""
        return self._by_name.get(name)

    def register(
        self,
        kind: type[T],
        *,
        name: str,
        encode: Callable[[T], object],
        decode: Callable[[Any], T],
    ) -> None:
        """Let objects of a type travel.

        Args:
            kind: the type; objects of subclasses are not meant.
            name: what messages call it. Sender and receiver must agree on it; it is never imported.
            encode: gives values that travel: plain ones, tensors, other registered objects.
            decode: takes what `encode` gave, and may refuse it by any exception.

        Raises:
            LocalProtocolError: the type or the name is taken.
        """
        if not isinstance(name, str) or not name:
            raise LocalProtocolError(f"a type is registered under a text, not under {name!r}")
        taken = self._by_name.get(name)
        if taken is not None:
            raise LocalProtocolError(f"{name!r} is the registered name of {taken.type.__name__}")
        known = self._by_type.get(kind)
        if known is not None:
            raise LocalProtocolError(f"{kind.__name__} is registered already, as {known.name!r}")
        if not isinstance(kind, type) or kind in _KNOWN or issubclass(kind, _KNOWN_WITH_KINDS):
            raise LocalProtocolError(f"{kind!r} cannot be registered: messages know it already")
        codec = Codec(name, kind, encode, decode)
        self._by_name[name] = codec
        self._by_type[kind] = codec

    def register_dataclass(self, kind: type[T], *, name: str) -> type[T]:
        """Let objects of a dataclass travel, field by field. Returns the class."""
        if not dataclasses.is_dataclass(kind):
            raise LocalProtocolError(f"{kind.__name__} is not a dataclass")
        fields = [field.name for field in dataclasses.fields(kind) if field.init]

        def encode(value: T) -> object:
            return {field: getattr(value, field) for field in fields}

        def decode(plain: Any) -> Any:
            if not isinstance(plain, dict) or plain.keys() != set(fields):
                found = sorted(map(str, plain)) if isinstance(plain, dict) else plain
                raise MessageInvalid(f"{name!r} has the fields {fields}, not {found!r:.200}")
            return kind(**plain)

        self.register(kind, name=name, encode=encode, decode=decode)
        return kind

    def register_enum(self, kind: type[E], *, name: str) -> type[E]:
        """Let members of an enum travel: by name, flags by value. Returns the class."""
        if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            raise LocalProtocolError(f"{kind!r} is not an enum")
        is_flag = issubclass(kind, enum.Flag)

        def encode(value: E) -> object:
            return value.value if is_flag else value.name

        def decode(plain: Any) -> E:
            return kind(plain) if is_flag else kind[plain]

        self.register(kind, name=name, encode=encode, decode=decode)
        return kind


DEFAULT = Registry()
"""The registry of whoever passes none: the one thing of the library that programs change."""


def register(
    kind: type[T],
    *,
    name: str,
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    registry: Registry = DEFAULT,
) -> None:
    """Let objects of a type travel in messages; see `Registry.register`."""
    registry.register(kind, name=name, encode=encode, decode=decode)


def register_dataclass(kind: type[T], *, name: str, registry: Registry = DEFAULT) -> type[T]:
    """Let objects of a dataclass travel in messages, field by field. Returns the class."""
    return registry.register_dataclass(kind, name=name)


def register_enum(kind: type[E], *, name: str, registry: Registry = DEFAULT) -> type[E]:
    """Let members of an enum travel in messages, by name, flags by value. Returns the class."""
    return registry.register_enum(kind, name=name)


def refuse(value: object, path: str) -> CodecRefused:
    """The error for something that no message carries, with what to do about it."""
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    if isinstance(value, type):
        remedy = "messages carry no classes"
    elif dataclasses.is_dataclass(value):
        remedy = f"pass register_dataclass({kind.__name__}, name=…)"
    elif isinstance(value, enum.Enum):
        remedy = f"pass register_enum({kind.__name__}, name=…)"
    elif isinstance(value, _KNOWN_WITH_KINDS):
        remedy = "send plain values"  # these cannot be registered
    elif hasattr(value, "state_dict"):
        remedy = "send its state_dict()"
    else:
        remedy = f"send plain values, or register({kind.__name__}, name=…, encode=…, decode=…)"
    return CodecRefused(f"{name} is not a type that travels: {remedy}", path=path)
