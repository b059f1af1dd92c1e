"""JSON that means one thing only: no duplicate keys, no NaN, bounded depth and size.

Two readers that disagree about a header see two different models in one file. Knows JSON; not
what it describes.
"""

import json
import math
from typing import Any, NoReturn

import numpy as np

from weighlock.errors import HeaderError

__all__ = ["parse"]


_DEPTH = 127
"""Levels of arrays and objects; serde_json, on which other readers are built, goes no deeper."""


class _Duplicate(ValueError):
    pass


def parse(raw: bytes, *, source: str, tokens: int) -> Any:
    """Parse bytes as strict JSON.

    Args:
        raw: the text, in UTF-8 without a byte order mark.
        source: what to call it in errors.
        tokens: most objects, arrays and commas it may hold. Counted before anything is built, so
            that a small text cannot become gigabytes of empty lists.

    Raises:
        HeaderError: it is not JSON, or not strict, or holds more than `tokens`.
    """
    found = raw.count(b"{") + raw.count(b"[") + raw.count(b",")
    if found > tokens:  # it seldom is; texts may hold as many as they like
        found = _outside_texts(raw)
    if found > tokens:
        raise HeaderError(
            f"the JSON holds {found:,} objects, arrays and commas, {tokens:,} are expected",
            source=source,
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise HeaderError(
            f"the JSON is not UTF-8 at byte {error.start}: {error.reason}",
            source=source,
            offset=error.start,
        ) from error
    try:
        found = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except _Duplicate as error:
        raise HeaderError(str(error), source=source) from error
    except RecursionError as error:
        raise HeaderError("the JSON is nested too deeply", source=source) from error
    except (ValueError, OverflowError) as error:  # or ints of more digits than Python converts
        raise HeaderError(f"the JSON cannot be read: {error}", source=source) from error
    _check(found, source)
    return found


_BLOCK = 1024 * 1024


def _outside_texts(raw: bytes) -> int:
    """How many objects, arrays and commas stand outside of texts, up to the first error at least.

    Where quotes do not pair up, or a backslash stands outside of texts, a parser stops, too.
    """
    found = at = 0
    is_inside = False
    while at < len(raw):
        block = raw[at : at + _BLOCK]
        at += len(block)
        if (len(block) - len(block.rstrip(b"\\"))) % 2 and at < len(raw):
            block, at = block[:-1], at - 1  # it goes with what follows
        codes = np.frombuffer(block.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        inside = np.logical_xor.accumulate(codes == ord('"')) ^ is_inside
        structure = (codes == ord("{")) | (codes == ord("[")) | (codes == ord(","))
        found += int(np.count_nonzero(structure & ~inside))
        is_inside = bool(inside[-1]) if codes.size else is_inside
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(f"the key {key!r} occurs twice in one object")
            seen.add(key)
    return found


def _integer(text: str) -> int | float:
    if text == "-0":
        return -0.0  # as in other readers: no integer
    number = int(text)
    if len(text) > 300:
        float(number)  # other readers take it for a double, and refuse what is out of its range
    return number


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is out of range")
    return number


def _check(found: Any, source: str) -> None:
    """Raise unless every text can be written and nothing lies deeper than others read."""
    level, depth = [found], 0
    while level:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, (dict, list)):
                if depth > _DEPTH:
                    raise HeaderError("the JSON is nested too deeply", source=source)
                below += value
                below += value.values() if isinstance(value, dict) else ()
            elif isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    raise HeaderError(
                        f"the JSON holds a lone surrogate in {value[:40]!r}", source=source
                    ) from error
        level = below


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
