"""A pickle read as data: every opcode of protocols 0 to 5, nothing imported, called or set.

What a pickle would import becomes a `Global`, what it would call a `Call`, what it would look up
outside itself a `PersistentId`. These records mean nothing here: `rebuild` gives some of them a
meaning, by name. Knows the pickle format; not torch, and not where bytes come from.
"""

import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from weighlock.errors import FormatError, TruncatedFile, UnsupportedPickle
from weighlock.formats.pickle_feed import PADDING, Feed
from weighlock.formats.pickle_rare import RARE, VALUES
from weighlock.formats.pickle_records import (
    Call,
    Global,
    Malformed,
    NotTaken,
    PersistentId,
    append,
    set_items,
)
from weighlock.limits import Limits

__all__ = ["Feed", "Pickle", "read_pickle"]


@dataclass(frozen=True, slots=True)
class Pickle:
    """One pickle that was read."""

    value: Any
    """Plain values and records; shared and cyclic where the pickle was."""
    globals: dict[tuple[str, str], int]
    """Everything it would import, with the byte at which it was first named."""
    persistent_ids: list[PersistentId]
    """Everything it would ask its loader for, in order."""
    end: int
    """The byte after its STOP."""


_REFUSED = {
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}

_LONGEST_NAME = 1000
"""Characters of module and name: classes of generated code have hundreds."""

_STEP = 65_536
"""Opcodes between two looks at what they have made."""

# Bytes that values take, roughly: what a few kilobytes of a deflated pickle make is counted, as it
# may be gigabytes.
_NUMBER = 40
_TEXT = 64
_TUPLE = 72
_RECORD = 120
_ITEM = 40
_MEMO_ENTRY = 128

_int4 = struct.Struct("<i").unpack_from
_uint4 = struct.Struct("<I").unpack_from
_double = struct.Struct(">d").unpack_from


def read_pickle(
    feed: Feed,
    start: int = 0,
    limits: Limits | None = None,
    named: dict[tuple[str, str], int] | None = None,
) -> Pickle:
    """Read one pickle from a feed.

    Args:
        feed: the bytes.
        start: where the pickle begins in them.
        limits: what it may ask for.
        named: filled with what it would import, also when it turns out broken: `pickle` would have
            imported and called all that before it noticed.

    Raises:
        UnsupportedPickle: it is not a pickle, or uses an opcode that only makes sense with code.
        TruncatedFile: it ends before its STOP.
        LimitExceeded: it is longer, or does more, than the limits allow.
    """
    limits = limits or Limits()
    return _Machine(feed, limits, {} if named is None else named).run(start)


class _Machine:
    """The state that outlives one opcode, apart from the stack, which `run` keeps in locals."""

    def __init__(self, feed: Feed, limits: Limits, named: dict[tuple[str, str], int]) -> None:
        self._feed = feed
        self._limits = limits
        self._places = named
        self._globals: dict[tuple[str, str], Global] = {}
        self._named_bytes = 0
        self._frame_end = 0
        self.persistent_ids: list[PersistentId] = []

    def run(self, start: int) -> Pickle:
        """Execute opcodes until STOP. One function and local names: this loop is the hot path."""
        limits = self._limits
        made = 0
        pos = opcode_at = start
        data, end, low = self._window(pos)
        stack: list[Any] = []
        outer: list[list[Any]] = []
        memo: dict[int, Any] = {}
        op = 0
        try:
            for done in range(0, limits.pickle_opcodes, _STEP):
                for _ in range(min(_STEP, limits.pickle_opcodes - done)):
                    if pos >= low:
                        data, end, low = self._window(pos)
                    opcode_at = pos
                    op = data[pos]
                    pos += 1
                    if op == 0x72:  # LONG_BINPUT
                        memo[_uint4(data, pos)[0]] = stack[-1]
                        pos += 4
                    elif op == 0x4B:  # BININT1
                        stack.append(data[pos])
                        pos += 1
                    elif op == 0x68:  # BINGET
                        stack.append(memo[data[pos]])
                        pos += 1
                    elif op == 0x94:  # MEMOIZE
                        memo[len(memo)] = stack[-1]
                    elif op == 0x28:  # MARK
                        outer.append(stack)
                        stack = []
                    elif op == 0x74:  # TUPLE
                        made += _TUPLE + 8 * len(stack)
                        found = tuple(stack)
                        stack = outer.pop()
                        stack.append(found)
                    elif op == 0x58:  # BINUNICODE
                        made += _TEXT
                        stop = pos + 4 + _uint4(data, pos)[0]
                        if stop > end:
                            data, end, low = self._need(stop)
                        stack.append(str(data[pos + 4 : stop], "utf-8", "surrogatepass"))
                        pos = stop
                    elif op == 0x8C:  # SHORT_BINUNICODE
                        made += _TEXT
                        stop = pos + 1 + data[pos]
                        if stop > end:
                            data, end, low = self._need(stop)
                        stack.append(str(data[pos + 1 : stop], "utf-8", "surrogatepass"))
                        pos = stop
                    elif op == 0x86:  # TUPLE2
                        made += _TUPLE
                        last = stack.pop()
                        stack[-1] = (stack[-1], last)
                    elif op == 0x52:  # REDUCE
                        made += _RECORD
                        args = stack.pop()
                        if type(args) is not tuple:
                            raise Malformed("calls with arguments that are not a tuple")
                        stack[-1] = Call(stack[-1], args)
                    elif op == 0x51:  # BINPERSID
                        made += _RECORD
                        record = stack[-1] = PersistentId(stack[-1])
                        self.persistent_ids.append(record)
                    elif op == 0x4A:  # BININT
                        made += _NUMBER
                        stack.append(_int4(data, pos)[0])
                        pos += 4
                    elif op == 0x71:  # BINPUT
                        memo[data[pos]] = stack[-1]
                        pos += 1
                    elif op == 0x4D:  # BININT2
                        made += _NUMBER
                        stack.append(data[pos] | data[pos + 1] << 8)
                        pos += 2
                    elif op == 0x85:  # TUPLE1
                        made += _TUPLE
                        stack[-1] = (stack[-1],)
                    elif op == 0x89:  # NEWFALSE
                        stack.append(False)
                    elif op == 0x88:  # NEWTRUE
                        stack.append(True)
                    elif op == 0x4E:  # NONE
                        stack.append(None)
                    elif op == 0x29:  # EMPTY_TUPLE
                        stack.append(())
                    elif op == 0x6A:  # LONG_BINGET
                        stack.append(memo[_uint4(data, pos)[0]])
                        pos += 4
                    elif op == 0x63:  # GLOBAL
                        module, pos = self.line_(pos)
                        name, pos = self.line_(pos)
                        data, end, low = self._window(pos)
                        stack.append(self.global_(module.decode(), name.decode(), opcode_at))
                    elif op == 0x93:  # STACK_GLOBAL
                        last = stack.pop()
                        if type(last) is not str or type(stack[-1]) is not str:
                            raise Malformed("names a global by something else than text")
                        stack[-1] = self.global_(stack[-1], last, opcode_at)
                    elif op == 0x87:  # TUPLE3
                        made += _TUPLE
                        last = stack.pop()
                        middle = stack.pop()
                        stack[-1] = (stack[-1], middle, last)
                    elif op == 0x75:  # SETITEMS
                        values = stack
                        made += _ITEM * len(values)
                        stack = outer.pop()
                        set_items(stack[-1], values)
                    elif op == 0x73:  # SETITEM
                        made += 2 * _ITEM
                        last = stack.pop()
                        key = stack.pop()
                        set_items(stack[-1], [key, last])
                    elif op == 0x65:  # APPENDS
                        values = stack
                        stack = outer.pop()
                        append(stack[-1], values)
                    elif op == 0x61:  # APPEND
                        last = stack.pop()
                        append(stack[-1], [last])
                    elif op == 0x7D:  # EMPTY_DICT
                        made += _RECORD
                        stack.append({})
                    elif op == 0x5D:  # EMPTY_LIST
                        made += _RECORD
                        stack.append([])
                    elif op == 0x47:  # BINFLOAT
                        made += _NUMBER
                        stack.append(_double(data, pos)[0])
                        pos += 8
                    elif op == 0x81:  # NEWOBJ
                        made += _RECORD
                        args = stack.pop()
                        if type(args) is not tuple:
                            raise Malformed("makes an object with arguments that are not a tuple")
                        stack[-1] = Call(stack[-1], args)
                    elif op == 0x62:  # BUILD
                        last = stack.pop()
                        target = stack[-1]
                        if type(target) is not Call:
                            raise NotTaken(f"gives state to a {type(target).__name__}")
                        if target.states is None:
                            target.states = []
                        target.states.append(last)
                    elif op == 0x2E:  # STOP
                        value = stack.pop()
                        if pos > end:
                            raise IndexError
                        self._check_made(made, memo, outer)
                        return Pickle(value, self._places, self.persistent_ids, pos)
                    elif op == 0x95:  # FRAME
                        self._begin_frame(pos)
                        pos += 8
                        data, end, low = self._window(pos)
                    elif op in VALUES:
                        made += _RECORD
                        last, pos = VALUES[op](self, pos)
                        stack.append(last)
                        data, end, low = self._window(pos)
                    elif op in RARE:
                        made += _RECORD
                        stack, pos = RARE[op](self, stack, outer, memo, pos)
                        data, end, low = self._window(pos)
                    else:
                        self._refuse(op, opcode_at)
                self._check_made(made, memo, outer)
            asked = limits.pickle_opcodes + 1
            limits.check("pickle_opcodes", asked, f"{self._feed.label}: opcodes in the pickle")
            raise AssertionError("the loop ends only where they are exceeded")
        except FormatError:
            raise
        except Malformed as error:
            raise self._error(f"{error}", op, opcode_at) from error
        except (IndexError, struct.error) as error:
            if pos >= end:
                raise self._truncated(end) from error
            raise self._error("takes from an empty stack", op, opcode_at) from error
        except KeyError as error:
            raise self._error("asks for a memo entry that does not exist", op, opcode_at) from error
        except UnicodeDecodeError as error:
            raise self._error("holds text that is not UTF-8", op, opcode_at) from error
        except ValueError as error:
            raise self._error("holds a text with an escape that is none", op, opcode_at) from error

    def _check_made(self, made: int, memo: dict[int, Any], outer: list[list[Any]]) -> None:
        limits, label = self._limits, self._feed.label
        if len(memo) > limits.pickle_memo:
            limits.check("pickle_memo", len(memo), f"{label}: memo of the pickle")
        made += _MEMO_ENTRY * len(memo) + _RECORD * len(outer) + self._named_bytes
        if made > limits.pickle_made_bytes:
            limits.check("pickle_made_bytes", made, f"{label}: bytes of what the pickle makes")

    def _window(self, pos: int) -> tuple[bytes, int, int]:
        """The bytes to work on, their true end, and the position from which to ask again."""
        feed = self._feed
        self._limits.check("pickle_bytes", pos, f"{feed.label}: bytes of the pickle")
        self._check_frame(pos)
        if pos == self._frame_end:
            self._frame_end = 0
        if not feed.complete:
            if feed.extend(pos + 1 + len(PADDING)):
                low = len(feed.data) - len(PADDING)
                return feed.data, len(feed.data), min(low, self._frame_end or low)
            feed.extend(len(feed.data) + 1)  # learns that there is no more
        end = len(feed.data)
        if pos >= end:
            raise self._truncated(end)
        return feed.padded(), end, min(end, self._frame_end or end)

    def _begin_frame(self, pos: int) -> None:
        """Note where a frame ends; between frames and within one, opcodes count as everywhere."""
        if self._frame_end >= pos:
            raise NotTaken("begins a frame within another")
        length = int.from_bytes(self._need(pos + 8)[0][pos : pos + 8], "little")
        self._frame_end = pos + 8 + length

    def _check_frame(self, stop: int) -> None:
        """Refuse opcodes that reach out of their frame.

        When it reads from a file, `pickle` drops what is left of such a frame: it would go on
        elsewhere than it does in memory, and see another pickle.
        """
        if stop > self._frame_end > 0:
            raise NotTaken("has an opcode across the end of a frame")

    def _need(self, stop: int) -> tuple[bytes, int, int]:
        """The window, after making sure that it reaches to `stop`."""
        self._limits.check("pickle_bytes", stop, f"{self._feed.label}: bytes of the pickle")
        if not self._feed.extend(stop):
            raise self._truncated(len(self._feed.data))
        self._check_frame(stop)
        return self._window(stop - 1)

    def line_(self, pos: int) -> tuple[bytes, int]:
        """A line of text without its newline, and the position after it."""
        feed = self._feed
        searched = pos
        while (stop := feed.data.find(b"\n", searched)) < 0:
            searched = len(feed.data)
            self._limits.check("pickle_bytes", searched, f"{feed.label}: bytes of the pickle")
            if not feed.extend(searched + 1):
                raise self._truncated(searched)
        self._check_frame(stop + 1)
        return feed.data[pos:stop], stop + 1

    def global_(self, module: str, name: str, offset: int) -> Global:
        """The one record of a global, and a note of where it was first named."""
        key = module, name
        found = self._globals.get(key)
        if found is None:
            if len(module) + len(name) > _LONGEST_NAME:
                raise Malformed(f"names a global by {len(module) + len(name):,} characters")
            self._named_bytes += 4 * _RECORD + 2 * (len(module) + len(name))
            found = self._globals[key] = Global(module, name)
            self._places[key] = self._feed.offset + offset
        return found

    def counted_(self, pos: int, width: int) -> tuple[bytes, int]:
        """Bytes behind a length of that width, and the position after them."""
        data = self._need(pos + width)[0]
        stop = pos + width + int.from_bytes(data[pos : pos + width], "little")
        return self._need(stop)[0][pos + width : stop], stop

    def fixed_(self, pos: int, count: int) -> bytes:
        """Exactly so many bytes."""
        return self._need(pos + count)[0][pos : pos + count]

    def _truncated(self, end: int) -> TruncatedFile:
        return TruncatedFile(
            f"the pickle ends at byte {self._feed.offset + end:,} without its STOP",
            source=self._feed.label,
            offset=self._feed.offset + end,
        )

    def _error(self, what: str, op: int, at: int) -> UnsupportedPickle:
        offset = self._feed.offset + at
        return UnsupportedPickle(
            f"the pickle {what} (opcode 0x{op:02x} at byte {offset:,})",
            source=self._feed.label,
            offset=offset,
        )

    def _refuse(self, op: int, at: int) -> NoReturn:
        name = _REFUSED.get(op)
        raise self._error(
            f"uses {name}, which needs code" if name else "has no such opcode", op, at
        )
