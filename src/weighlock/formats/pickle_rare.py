"""Opcodes that checkpoints seldom use: text forms of protocol 0, long forms, hand-made pickles.

Those that only put a value on the stack are in `VALUES`: a function of each reads the value and
gives the position after it. Those that change the stack in another way are in `RARE`. The frequent
opcodes are in the loop of `inert_pickle`.
"""

import codecs
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from weighlock.formats.pickle_records import (
    Call,
    Global,
    Malformed,
    PersistentId,
    SetRecord,
    append,
    check_key,
    set_items,
)

__all__ = ["RARE", "VALUES"]

codecs.lookup("raw-unicode-escape")  # imported now, not when a pickle asks for it

_LONGEST_INT = 4096  # bytes or digits: converting digits takes quadratic time


class Machine(Protocol):
    """What an opcode may ask of the machine."""

    persistent_ids: list[PersistentId]

    def line_(self, pos: int) -> tuple[bytes, int]:
        """A line of text without its newline, and the position after it."""

    def counted_(self, pos: int, width: int) -> tuple[bytes, int]:
        """Bytes behind a length of that width, and the position after them."""

    def fixed_(self, pos: int, count: int) -> bytes:
        """Exactly so many bytes."""

    def global_(self, module: str, name: str, offset: int) -> Global:
        """The record of a global."""


Stack: TypeAlias = list[Any]
After: TypeAlias = tuple[Stack, int]
Rare: TypeAlias = Callable[[Machine, Stack, list[Stack], dict[int, Any], int], After]
Read: TypeAlias = Callable[[Machine, int], tuple[Any, int]]

RARE: dict[int, Rare] = {}
"""Opcode to function of the whole state: it gives the stack and the position after it."""


def _opcode(*codes: int) -> Callable[[Rare], Rare]:
    def enter(function: Rare) -> Rare:
        RARE.update(dict.fromkeys(codes, function))
        return function

    return enter


@_opcode(0x80)
def _proto(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    version = machine.fixed_(pos, 1)[0]
    if version > 5:
        raise Malformed(f"is of protocol {version}, 5 is the highest known")
    return stack, pos + 1


@_opcode(0x30)
def _pop(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    if stack:
        stack.pop()
    else:
        stack = outer.pop()
    return stack, pos


@_opcode(0x31)
def _pop_mark(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    return outer.pop(), pos


@_opcode(0x32)
def _dup(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    stack.append(stack[-1])
    return stack, pos


@_opcode(0x6C)
def _list(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    before = outer.pop()
    before.append(stack)
    return before, pos


@_opcode(0x64)
def _dict(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    before = outer.pop()
    found: dict[Any, Any] = {}
    set_items(found, stack)
    before.append(found)
    return before, pos


@_opcode(0x91)
def _frozenset(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    before = outer.pop()
    before.append(SetRecord(stack, frozen=True))
    return before, pos


@_opcode(0x90)
def _add_items(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    before = outer.pop()
    for value in stack:
        check_key(value)
    append(before[-1], stack)
    return before, pos


@_opcode(0x92)
def _newobj_ex(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    kwargs, args = stack.pop(), stack.pop()
    if type(args) is not tuple or type(kwargs) is not dict:
        raise Malformed("makes an object with arguments that are not a tuple and a dict")
    stack[-1] = Call(stack[-1], args, kwargs)
    return stack, pos


@_opcode(0x6F)
def _obj(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    before = outer.pop()
    before.append(Call(stack[0], tuple(stack[1:])))
    return before, pos


@_opcode(0x69)
def _inst(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    module, after = machine.line_(pos)
    name, after = machine.line_(after)
    before = outer.pop()
    found = machine.global_(module.decode(), name.decode(), pos - 1)
    before.append(Call(found, tuple(stack)))
    return before, after


@_opcode(0x70)
def _put(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    line, after = machine.line_(pos)
    memo[_index(line)] = stack[-1]
    return stack, after


@_opcode(0x67)
def _get(
    machine: Machine, stack: Stack, outer: list[Stack], memo: dict[int, Any], pos: int
) -> After:
    line, after = machine.line_(pos)
    stack.append(memo[_index(line)])
    return stack, after


def _index(line: bytes) -> int:
    if not line.isdigit() or len(line) > 10:
        raise Malformed("numbers a memo entry by something else than a number")
    return int(line)


def _line(value_of: Callable[[bytes], Any]) -> Read:
    """Reads a line of text."""

    def read(machine: Machine, pos: int) -> tuple[Any, int]:
        line, after = machine.line_(pos)
        return value_of(line), after

    return read


def _counted(width: int, value_of: Callable[[bytes], Any]) -> Read:
    """Reads bytes behind a length of that width."""

    def read(machine: Machine, pos: int) -> tuple[Any, int]:
        raw, after = machine.counted_(pos, width)
        return value_of(raw), after

    return read


def _int(line: bytes) -> int:
    special = {b"00": False, b"01": True}
    return special[line] if line in special else _decimal(line)


def _long(line: bytes) -> int:
    return _decimal(line.removesuffix(b"L"))


def _decimal(text: bytes) -> int:
    if len(text) > _LONGEST_INT or not re.fullmatch(rb"[+-]?\d+", text.strip()):
        raise Malformed("holds an int that is too long or none")
    return int(text)


def _float(line: bytes) -> float:
    try:
        return float(line[:_LONGEST_INT])
    except ValueError as error:
        raise Malformed("holds a float that is none") from error


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _long4(machine: Machine, pos: int) -> tuple[int, int]:
    length = _signed(machine.fixed_(pos, 4))
    if not 0 <= length <= _LONGEST_INT:
        raise Malformed(f"holds an int of {length:,} bytes")
    raw, after = machine.counted_(pos, 4)
    return _signed(raw), after


def _persid(machine: Machine, pos: int) -> tuple[PersistentId, int]:
    line, after = machine.line_(pos)
    record = PersistentId(line.decode("ascii"))
    machine.persistent_ids.append(record)
    return record, after


def _empty_set(machine: Machine, pos: int) -> tuple[SetRecord, int]:
    return SetRecord([], frozen=False), pos


def _utf8(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _unicode(line: bytes) -> str:
    return str(line, "raw-unicode-escape")


def _string(line: bytes) -> "str | bytes":
    line = line.strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise Malformed("holds a string without its quotes")
    return _text(_unescaped(line[1:-1]))


def _text(raw: bytes) -> "str | bytes":
    """A Python 2 string: text if it can be, bytes otherwise."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|\n|.)", re.DOTALL)
_SIMPLE = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f"}
_SIMPLE |= {b"v": b"\v", b"\n": b"", b"\\": b"\\", b"'": b"'", b'"': b'"'}


def _unescaped(raw: bytes) -> bytes:
    def plain(match: "re.Match[bytes]") -> bytes:
        code = match[1]
        if code in _SIMPLE:
            return _SIMPLE[code]
        if code[:1] == b"x":
            return bytes([int(code[1:], 16)])
        if code.isdigit():
            return bytes([int(code, 8) & 0xFF])
        return match[0]

    return _ESCAPE.sub(plain, raw)


VALUES: dict[int, Read] = {
    0x49: _line(_int),  # INT
    0x4C: _line(_long),  # LONG
    0x46: _line(_float),  # FLOAT
    0x53: _line(_string),  # STRING
    0x56: _line(_unicode),  # UNICODE
    0x50: _persid,  # PERSID
    0x8A: _counted(1, _signed),  # LONG1
    0x8B: _long4,  # LONG4
    0x43: _counted(1, bytes),  # SHORT_BINBYTES
    0x42: _counted(4, bytes),  # BINBYTES
    0x8E: _counted(8, bytes),  # BINBYTES8
    0x96: _counted(8, bytes),  # BYTEARRAY8
    0x55: _counted(1, _text),  # SHORT_BINSTRING
    0x54: _counted(4, _text),  # BINSTRING
    0x8D: _counted(8, _utf8),  # BINUNICODE8
    0x8F: _empty_set,  # EMPTY_SET
}
"""Opcode to function that reads a value."""
