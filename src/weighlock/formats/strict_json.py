"""JSON that means one thing only: no duplicate keys, no NaN, bounded depth and size.

Two readers that disagree about a header see two different models in one file. Knows JSON; not
what it describes.
"""

import json
from typing import Any, NoReturn

from weighlock.errors import HeaderError

__all__ = ["parse"]


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
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except _Duplicate as error:
        raise HeaderError(str(error), source=source) from error
    except RecursionError as error:
        raise HeaderError("the JSON is nested too deeply", source=source) from error
    except ValueError as error:  # JSONDecodeError, and ints of more digits than Python converts
        raise HeaderError(f"the JSON cannot be read: {error}", source=source) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(f"the key {key!r} occurs twice in one object")
            seen.add(key)
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
