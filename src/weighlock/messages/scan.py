"""How many values a msgpack text holds and how deep, before any of them is built. Pure.

msgspec makes room for a list as its head announces it, and nests as deep as Python lets it: a few
hostile bytes would ask for gigabytes. Here only heads are looked at. What is between them is
skipped by one regular expression, so a long list of numbers costs next to nothing.
"""

import re

from weighlock.errors import LimitExceeded, MessageInvalid
from weighlock.limits import Limits

__all__ = ["check_tree"]

# Every value whose length its first byte tells. Containers, and texts, bytes and extensions with a
# length of their own, are not among them.
_FIXED = (
    rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}"
    rb"|[\xcb\xcf\xd3].{8}|\xd4.{2}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
) + b"|".join(b"%c.{%d}" % (0xA0 + length, length) for length in range(32))

_one = re.compile(_FIXED, re.DOTALL)
_run = re.compile(b"(?:" + _FIXED + b")*+", re.DOTALL)

_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_tree(tree: bytes, limits: Limits) -> None:
    """Check that the tree is one value, of no more nodes and levels than allowed.

    Raises:
        LimitExceeded: there are more.
        MessageInvalid: it ends early, late, or within a value.
    """
    size = len(tree)
    nodes, position = 1, 0
    missing = [1]  # of each container that is open, how many values are still to come
    while True:
        run = _run.match(tree, position)
        if run is not None and run.end() > position:
            count = len(_one.findall(tree, position, run.end()))
            missing[-1] -= count
            position = run.end()
            while missing[-1] < 0 and len(missing) > 1:
                over = missing.pop()
                missing[-1] += over  # what was too many for one belongs to the one around it
        while len(missing) > 1 and missing[-1] == 0:
            missing.pop()
        if position >= size or missing[0] < 0 or (len(missing) == 1 and missing[0] == 0):
            break
        head = tree[position]
        missing[-1] -= 1
        if 0x80 <= head <= 0x9F or head in _CONTAINERS:
            if head <= 0x9F:
                position, children = position + 1, (head & 0x0F) * (2 if head < 0x90 else 1)
            else:
                width, each = _CONTAINERS[head]
                position += 1 + width
                children = each * int.from_bytes(tree[position - width : position], "big")
            nodes += children
            limits.check("message_nodes", nodes, "values in the tree of a message")
            if nodes > size:
                raise MessageInvalid(
                    f"the tree announces {nodes:,} values and has {size:,} bytes for them"
                )
            missing.append(children)
            if len(missing) - 2 > limits.message_depth:  # the first level is the message itself
                _too_deep(limits)
        else:
            width = _LENGTH_BYTES.get(head) or _EXTENSIONS.get(head, 0)
            length = int.from_bytes(tree[position + 1 : position + 1 + width], "big")
            position += 1 + width + length + (head in _EXTENSIONS)
            if position > size or not width:
                raise MessageInvalid(f"the tree ends, or makes no sense, before byte {size:,}")
    if position != size or any(missing):
        raise MessageInvalid(f"the tree of {size:,} bytes is not one value from end to end")


def _too_deep(limits: Limits) -> None:
    raise LimitExceeded(
        f"the tree of a message is nested deeper than {limits.message_depth} levels; pass "
        "limits=Limits(message_depth=…) if you trust it",
        limit="message_depth",
        asked=limits.message_depth + 1,
        allowed=limits.message_depth,
    )
