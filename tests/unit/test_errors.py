"""The error tree: who inherits from whom, and what each carries."""

import builtins
import copy
import pickle
import re

import pytest

import weighlock
from weighlock import errors

TREE = [
    # class, its parent in the tree, the builtin a stranger would catch
    ("WeighlockError", None, Exception),
    ("FormatError", "WeighlockError", ValueError),
    ("HeaderError", "FormatError", ValueError),
    ("LayoutError", "FormatError", ValueError),
    ("UnsupportedDType", "FormatError", ValueError),
    ("TruncatedFile", "FormatError", ValueError),
    ("SourceError", "WeighlockError", OSError),
    ("ShortRead", "SourceError", OSError),
    ("SourceChanged", "SourceError", OSError),
    ("DiskError", "WeighlockError", OSError),
    ("NoSpace", "DiskError", OSError),
    ("NotDurable", "DiskError", OSError),
    ("SpoolClosed", "DiskError", OSError),
    ("CombineError", "WeighlockError", ValueError),
    ("MessageError", "WeighlockError", Exception),
    ("CodecRefused", "MessageError", TypeError),
    ("MessageInvalid", "MessageError", ValueError),
    ("LimitExceeded", "WeighlockError", Exception),
    ("UnsupportedPickle", "FormatError", ValueError),
    ("NotFound", "SourceError", FileNotFoundError),
    ("NotAllowed", "SourceError", PermissionError),
    ("TransferError", "WeighlockError", Exception),
    ("ShareGone", "TransferError", Exception),
    ("Refused", "TransferError", Exception),
    ("Aborted", "TransferError", Exception),
    ("ChunkCorrupt", "TransferError", Exception),
    ("PeerLost", "TransferError", OSError),
    ("TransferTimeout", "TransferError", TimeoutError),
    ("ProtocolError", "WeighlockError", Exception),
    ("LocalProtocolError", "ProtocolError", Exception),
    ("RemoteProtocolError", "ProtocolError", Exception),
]

RETRYABLE = {"ChunkCorrupt", "PeerLost", "TransferTimeout"}

EXAMPLES = [
    errors.WeighlockError("went wrong"),
    errors.FormatError("is odd", source="a.safetensors", offset=8),
    errors.HeaderError("is odd", source="a.safetensors", offset=8),
    errors.LayoutError("is odd"),
    errors.UnsupportedDType("is odd", source="a.safetensors"),
    errors.TruncatedFile("is odd", source="a.safetensors"),
    errors.SourceError("cannot be read", errno=5),
    errors.ShortRead("ends early", wanted=10, got=3),
    errors.SourceChanged("is another"),
    errors.DiskError("cannot be put", errno=30),
    errors.NoSpace("is full", wanted_bytes=10, free_bytes=3, errno=28),
    errors.NotDurable("is lost", errno=5),
    errors.SpoolClosed("is gone"),
    errors.CombineError("does not fit", contributor="site-2", tensor="w"),
    errors.MessageError("is odd"),
    errors.CodecRefused("does not travel", path="$.a"),
    errors.MessageInvalid("is no message", path="$[0]"),
    errors.LimitExceeded("too many", limit="tensors", asked=10, allowed=3),
    errors.UnsupportedPickle("is odd", source="a.pt"),
    errors.NotFound("is not there", errno=2),
    errors.NotAllowed("is closed", errno=13),
    errors.TransferError("did not come"),
    errors.ShareGone("is over", reason="expired"),
    errors.Refused("is not for you"),
    errors.Aborted("enough", reason="enough"),
    errors.ChunkCorrupt("is another", chunk=7),
    errors.PeerLost("broke off", retry_after_s=3.5),
    errors.TransferTimeout("says nothing", phase="idle"),
    errors.ProtocolError("is odd"),
    errors.LocalProtocolError("is odd"),
    errors.RemoteProtocolError("is odd"),
]
FIELDS = [
    *("source", "offset", "errno", "wanted", "got"),
    *("reason", "chunk", "retry_after_s", "phase"),
    *("contributor", "tensor"),
    *("wanted_bytes", "free_bytes", "limit", "asked", "allowed", "path"),
]


@pytest.mark.parametrize(("name", "parent", "builtin"), TREE)
def test_each_class_has_its_place_in_the_tree(name, parent, builtin):
    found = getattr(errors, name)
    assert issubclass(found, errors.WeighlockError)
    assert issubclass(found, builtin)
    if parent is not None:
        assert getattr(errors, parent) in found.__bases__
    assert found.retryable is (name in RETRYABLE)


def drawn():
    """What the module's docstring draws: class, parent, and the builtin in brackets."""
    above = {}
    for line in re.search(r"```\n(.*?)```", errors.__doc__, re.DOTALL)[1].splitlines():
        found = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?", line)
        depth, name = len(found[1]) // 3, found[2]
        above[depth] = name
        yield name, above.get(depth - 1) if depth else None, found[3]


def test_the_docstring_draws_the_tree_as_it_is():
    for name, parent, builtin in drawn():
        found = getattr(errors, name)
        if parent is not None:
            assert getattr(errors, parent) in found.__bases__
        if builtin is not None:
            assert getattr(builtins, builtin) in found.__bases__


def test_the_tree_is_complete():
    names = [name for name, _, _ in drawn()]
    assert len(names) == len(set(names))
    assert {name for name, _, _ in TREE} == set(names)
    assert {type(error).__name__ for error in EXAMPLES} == set(names)
    assert set(names) == set(errors.__all__)
    assert set(names) == {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def test_value_and_system_errors_stay_apart():
    for name, _, builtin in TREE[1:]:
        found = getattr(errors, name)
        assert not (issubclass(found, ValueError) and issubclass(found, OSError))
        assert builtin is not Exception or not issubclass(found, ValueError | OSError)


def test_the_root_is_public():
    assert weighlock.WeighlockError is errors.WeighlockError


def test_a_format_error_names_its_source():
    error = errors.HeaderError("is not JSON", source="a.safetensors", offset=8)
    assert str(error) == "a.safetensors: is not JSON"
    assert (error.source, error.offset) == ("a.safetensors", 8)
    alone = errors.LayoutError("a tensor is odd")
    assert str(alone) == "a tensor is odd"
    assert (alone.source, alone.offset) == (None, None)


def test_system_errors_carry_the_system_s_number():
    assert errors.SourceError("gone", errno=5).errno == 5
    assert errors.DiskError("read-only").errno is None
    full = errors.NoSpace("is full", wanted_bytes=10, free_bytes=3, errno=28)
    assert (full.wanted_bytes, full.free_bytes, full.errno) == (10, 3, 28)
    assert str(full) == "is full"


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_errors_survive_the_way_back_from_a_worker_process(error, through):
    # An exception that cannot be unpickled breaks a pool of processes instead of being raised.
    again = through(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    for field in FIELDS:
        assert getattr(again, field, None) == getattr(error, field, None)
