"""Whether `pickle` itself would have stopped where the inert machine did.

What is no pickle at all fails at once, for `pickle` as for us: nothing behind the fault is ever
imported or called. But the machine takes less than `pickle` does, and behind what only the machine
refuses anything may follow. Knows where the two differ; reads nothing but the opcode at fault.
"""

import re

from weighlock.errors import FormatError, LimitExceeded, TruncatedFile
from weighlock.formats.inert_pickle import Feed
from weighlock.formats.pickle_records import Malformed, NotTaken

__all__ = ["stops_pickle"]

_READONLY_BUFFER = 0x98
_INT, _LONG, _FLOAT, _GET, _PUT, _LONG4 = 0x49, 0x4C, 0x46, 0x67, 0x70, 0x8B

# What Python takes for a number and the machine does not: other bases, underscores, thousands of
# digits. C reads a line up to its first NUL.
_NUMBER = re.compile(
    rb"\s*[+-]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*)L?\s*(?:\0.*)?",
    re.DOTALL,
)


def stops_pickle(error: FormatError | LimitExceeded, feed: Feed, size: int) -> bool:
    """Whether `pickle` would have noticed the fault as well, and gone no further.

    Args:
        error: what the machine raised.
        feed: what it read.
        size: how many bytes the feed could give in all.
    """
    if isinstance(error, LimitExceeded):
        # A length beyond the end: text read as a pickle asks for gigabytes.
        return error.limit == "pickle_bytes" and error.asked > size
    if isinstance(error, TruncatedFile) or error.offset is None:
        return True
    at = error.offset - feed.offset
    op = feed.data[at]
    if op == _READONLY_BUFFER:  # bytes do for it; the others ask for what only a program can give
        return at == 0
    cause = error.__cause__
    if not isinstance(cause, Malformed):
        return True
    return not isinstance(cause, NotTaken) and not _reads(op, feed.data, at + 1, size)


def _reads(op: int, data: bytes, at: int, size: int) -> bool:
    """Whether `pickle` reads a value of which the machine said that it is none."""
    if op == _LONG4:
        length = int.from_bytes(data[at : at + 4], "little", signed=True)
        return 0 <= length <= size - at - 4
    if op == _GET and at == 1:
        return False  # of a memo with nothing in it
    if op not in (_INT, _LONG, _FLOAT, _GET, _PUT):
        return False
    line = data[at : data.find(b"\n", at)]
    if op != _FLOAT:
        return _NUMBER.fullmatch(line) is not None
    try:
        float(line.partition(b"\0")[0])
    except ValueError:
        return False
    return True
