"""Facts as text for people: escaped names, sizes, tables. Knows terminals; not tensors."""

import decimal
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["as_json_value", "columns", "counted", "escaped", "parse_size", "quantity", "size"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SUFFIXES = {"": 1, "b": 1} | {
    f"{letter}{middle}{end}": (1024 if middle else 1000) ** power
    for power, letter in enumerate("kmgt", 1)
    for middle in ("", "i")
    for end in ("", "b")
}


def escaped(text: str) -> str:
    """Text from a file, safe for a terminal: what is not printable is shown as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def size(count: int) -> str:
    """Bytes in three digits and a decimal unit, as disks and models are sold."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """How many of something: "1 tensor", "2,000 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def quantity(count: int) -> str:
    """A number of parameters as people say it: 7.24 B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= max(1e6, 0.9995 * limit):  # 999.9 million is said as 1 B
            return f"{count / limit:.3g} {unit}"
    return f"{count:,}"


def parse_size(text: str) -> int:
    """Bytes meant by "5GB", "500 MiB", "1024".

    Raises:
        ValueError: it is not a positive size.
    """
    number = text.strip().lower()
    digits = number.rstrip("kmgtib ")
    factor = _SUFFIXES.get(number[len(digits) :].strip())
    if factor is None:
        raise ValueError(f"{text!r} is not a size; write 5GB, 500MiB or a number of bytes")
    try:
        count = int(decimal.Decimal(digits) * factor)
    except (decimal.InvalidOperation, ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is not a size; write 5GB, 500MiB or a number of bytes"
        ) from error
    if count <= 0:
        raise ValueError(f"{text!r} is not a positive size")
    return count


def columns(rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Rows as aligned columns; those numbered in `right` are aligned to the right."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_json_value(value: object, depth: int = 12) -> Any:
    """A plain value as JSON can hold it: keys as text, bytes as a note of their length.

    What is nested deeper than `depth`, what follows the first 1,000 entries of a list or mapping,
    and what follows 10,000 values in all is left out: a checkpoint may nest as it likes, and share
    one list a million times over.
    """
    return _Shortened().value(value, depth)


_MOST_VALUES = 10_000
_MOST_ENTRIES = 1000
_LONG_TEXT = 1000
_MORE = "…"


class _Shortened:
    """Counts the values of one tree; a long text counts as several."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def value(self, value: object, depth: int) -> Any:
        if self._left <= 0:
            return _MORE
        self._left -= 1
        if isinstance(value, (Mapping, list, tuple)):
            if depth == 0:
                return _MORE
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            return self._list(value, depth)
        if isinstance(value, str):
            self._left -= len(value) // _LONG_TEXT
            return value
        if isinstance(value, (bool, float, type(None))):
            return value
        if isinstance(value, int) and -(2**63) <= value < 2**63:
            return value
        return f"<{len(value)} bytes>" if isinstance(value, bytes) else _text(value)

    def _list(self, value: Sequence[object], depth: int) -> list[Any]:
        found = [self.value(item, depth - 1) for item in self._entries(value)]
        return found + ([_MORE] if len(found) < len(value) else [])

    def _mapping(self, value: Mapping[Any, object], depth: int) -> dict[str, Any]:
        found = {_text(key): self.value(value[key], depth - 1) for key in self._entries(value)}
        return found | ({_MORE: _MORE} if len(found) < len(value) else {})

    def _entries(self, values: Collection[Any]) -> Iterator[Any]:
        """The first entries, as long as there is room for more."""
        for value in itertools.islice(values, _MOST_ENTRIES):
            if self._left <= 0:
                break
            yield value


def _text(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return f"<{type(value).__name__}, too long to be written>"
