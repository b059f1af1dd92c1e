"""Counting a msgpack text without building it: against msgspec, which builds it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from weighlock.errors import LimitExceeded, MessageInvalid, WeighlockError
from weighlock.limits import Limits
from weighlock.messages.scan import check_tree

LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats()),
    *(st.text(max_size=40), st.binary(max_size=300)),
    st.binary(max_size=40).map(lambda data: Ext(3, data)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


def nodes(tree):
    if isinstance(tree, list):
        return 1 + sum(map(nodes, tree))
    if isinstance(tree, dict):
        return 1 + sum(1 + nodes(value) for value in tree.values())
    return 1


def depth(tree):
    if isinstance(tree, (list, dict)):
        inside = tree.values() if isinstance(tree, dict) else tree
        return 1 + max(map(depth, inside), default=0)
    return 0


def passes(text, **limits):
    try:
        check_tree(text, Limits(**limits))
    except WeighlockError:
        return False
    return True


@given(TREES)
def test_nodes_and_depth_are_exact(tree):
    text = msgspec.msgpack.encode(tree)
    # The message itself is a level that does not count.
    exactly = {"message_nodes": nodes(tree), "message_depth": max(0, depth(tree) - 1)}
    assert passes(text, **exactly)
    if nodes(tree) > 1:
        assert not passes(text, **{**exactly, "message_nodes": nodes(tree) - 1})
    if depth(tree) > 1:
        assert not passes(text, **{**exactly, "message_depth": depth(tree) - 2})


@given(TREES, st.data())
def test_a_tree_that_msgspec_reads_passes_and_a_piece_of_one_does_not(tree, data):
    text = msgspec.msgpack.encode(tree)
    assert not passes(text + b"\0")
    assert not passes(text[:-1])
    changed = bytearray(text)
    changed[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        msgspec.msgpack.decode(changed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert passes(bytes(changed), message_depth=10**6)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"\xdd\xff\xff\xff\xff", LimitExceeded),
        (b"\xdf\x7f\xff\xff\xff", LimitExceeded),
        (b"\xdd\x00\x00\xff\xff" * 100, MessageInvalid),
        (b"\x92\xdc\x00", MessageInvalid),
        (b"\x92\xda\x00", MessageInvalid),
        (b"\xdc\x10\x00" + b"\xc0" * 10, MessageInvalid),
        (b"\x91" * 100_000 + b"\xc0", LimitExceeded),
        (b"\x90" * 1_000_000, MessageInvalid),
        (b"\xdb\xff\xff\xff\xff", MessageInvalid),
        (b"\xc9\xff\xff\xff\xff\x01", MessageInvalid),
        (b"\xc1", MessageInvalid),
        (b"", MessageInvalid),
    ],
    ids=lambda value: value[:6].hex() if isinstance(value, bytes) else value.__name__,
)
def test_bombs_are_refused(text, error):
    with pytest.raises(error):
        check_tree(text, Limits())
