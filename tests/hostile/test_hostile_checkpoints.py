"""B7 to B12: checkpoints made to run code, to lie, or to cost more than they weigh.

A table of files. Each is refused by one class of error, or opens with the right numbers and every
name it would import told. Nothing it says is imported, called or opened: an audit hook watches.
"""

import codecs
import gzip
import itertools
import json
import os
import pickle
import struct
import sys
import zlib
from dataclasses import dataclass

import numpy as np
import pytest

import weighlock
from conftest import open_descriptors
from hostile.make_checkpoints import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BINPERSID,
    BUILD,
    DICT,
    DUP,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    EMPTY_TUPLE,
    FALSE,
    FLOATS,
    GOOD,
    LIST,
    MAGIC,
    MARK,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    OBJ,
    OLD,
    ORDERED,
    POP,
    POP_MARK,
    REBUILD,
    REDUCE,
    SETITEM,
    SETITEMS,
    STACK_GLOBAL,
    TRUE,
    TUPLE,
    TUPLE1,
    TUPLE2,
    Member,
    archive,
    array,
    beside,
    call,
    changed,
    checkpoint,
    get,
    glob,
    ints,
    legacy,
    members,
    num,
    pickled,
    put,
    row,
    storage,
    table,
    tensor,
    text,
    tup,
)
from hostile.watching import watched
from weighlock.errors import (
    FormatError,
    HeaderError,
    LayoutError,
    LimitExceeded,
    TruncatedFile,
    UnsupportedPickle,
)
from weighlock.formats.scanning import scan_source
from weighlock.formats.torch_names import is_known
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.convert import CastRef
from weighlock.tensors.dtypes import DType

ONE_TO_FOUR = {"w": [1.0, 2.0, 3.0, 4.0]}
SYSTEM = ("os", "system")
EVIL = call(glob(*SYSTEM), text("touch hacked"))
HUGE = 2**30_000
"""An int of more digits than Python turns into text."""


@dataclass(frozen=True)
class Row:
    name: str
    content: bytes
    error: type[Exception] | None = None
    says: str = ""
    flagged: frozenset = frozenset()
    """Foreign globals, told by the catalog if it opens, and by the scan in any case."""
    tensors: dict | None = None
    """Values by name, or None where they are not looked at."""
    note: str = ""


def opens(name, content, *flagged, tensors=ONE_TO_FOUR, note=""):
    return Row(name, content, flagged=frozenset(flagged), tensors=tensors, note=note)


def refused(name, content, error, says="", *flagged):
    return Row(name, content, error, says, frozenset(flagged))


def inert(name, opcodes, *flagged, protocol=2):
    """Code beside a good tensor."""
    return opens(name, checkpoint(beside(opcodes), protocol=protocol), *flagged)


def broken(name, opcodes, error=UnsupportedPickle, says=""):
    return refused(name, checkpoint(beside(opcodes)), error, says)


def one(name, error=LayoutError, says="", storages=None, **how):
    """A state dict of one tensor that is wrong."""
    return refused(name, checkpoint(table(("w", tensor(**how))), storages), error, says)


def stack_global(module, name):
    return text(module) + text(name) + STACK_GLOBAL


CODE = [
    refused("a01 nothing but a call", checkpoint(EVIL + EVIL + b"\xff"), UnsupportedPickle, "0xff"),
    opens("a01 os.system", checkpoint(EVIL), SYSTEM, tensors={}),
    inert("a02 eval", call(glob("builtins", "eval"), text("1")), ("builtins", "eval")),
    inert("a02 eval of Python 2", call(glob("__builtin__", "eval")), ("__builtin__", "eval")),
    inert(
        "a04 STACK_GLOBAL",
        call(stack_global("posix", "system"), text("x")),
        ("posix", "system"),
        protocol=4,
    ),
    inert("a05 INST", MARK + text("x") + b"ios\nsystem\n", SYSTEM),
    inert("a06 OBJ", MARK + glob(*SYSTEM) + text("x") + OBJ, SYSTEM),
    inert("a07 NEWOBJ", glob(*SYSTEM) + tup(text("x")) + NEWOBJ, SYSTEM),
    inert(
        "a07 NEWOBJ_EX",
        glob("subprocess", "Popen") + tup(text("x")) + table(("shell", TRUE)) + NEWOBJ_EX,
        ("subprocess", "Popen"),
    ),
    inert("a08 named and not called", glob(*SYSTEM), SYSTEM),
    inert("a09 BUILD of callables", ORDERED + table(("items", glob(*SYSTEM))) + BUILD, SYSTEM),
    inert(
        "a09 BUILD of slots",
        ORDERED + tup(NONE, table(("__class__", glob(*SYSTEM)))) + BUILD,
        SYSTEM,
    ),
    inert("a09 BUILD with __setstate__", ORDERED + table(("__setstate__", EVIL)) + BUILD, SYSTEM),
    inert(
        "a10 a chain of getattr",
        call(
            call(glob("builtins", "getattr"), glob("builtins", "__import__"), text("__call__")),
            text("socket"),
        ),
        ("builtins", "getattr"),
        ("builtins", "__import__"),
    ),
    inert("a10 a dotted name", call(glob("torch", "os.system"), text("x")), ("torch", "os.system")),
    inert("a10 a dotted module", glob("torch._utils.os", "system"), ("torch._utils.os", "system")),
    inert(
        "a10 a dotted name like a known one",
        glob("torch", "FloatStorage.__init__"),
        ("torch", "FloatStorage.__init__"),
    ),
    inert(
        "a11 a checkpoint in a checkpoint",
        call(glob("torch.storage", "_load_from_bytes"), b"C\x03abc"),
        ("torch.storage", "_load_from_bytes"),
    ),
    inert("a12 a call that is popped", EVIL + POP + NONE, SYSTEM),
    inert("a12 a call that is popped with its mark", MARK + EVIL + POP_MARK + NONE, SYSTEM),
    opens("a12 popped before everything", checkpoint(EVIL + POP + GOOD), SYSTEM),
    inert("a13 a memo entry overwritten", glob(*SYSTEM) + put(0) + POP + NONE + put(0), SYSTEM),
    inert(
        "a13 a rebuild function overwritten",
        REBUILD + put(0) + POP + glob(*SYSTEM) + put(0) + POP + call(get(0), text("x")),
        SYSTEM,
    ),
    inert(
        "a14 torch.load",
        call(glob("torch.serialization", "load"), text("x")),
        ("torch.serialization", "load"),
    ),
    inert(
        "a14 runpy, pkgutil, operator, collect_env",
        row(
            glob("runpy", "run_path"),
            glob("pkgutil", "resolve_name"),
            glob("operator", "methodcaller"),
            glob("torch.utils.collect_env", "run"),
        ),
        ("runpy", "run_path"),
        ("pkgutil", "resolve_name"),
        ("operator", "methodcaller"),
        ("torch.utils.collect_env", "run"),
    ),
    inert("a14 a call of a call", call(call(call(glob(*SYSTEM)))), SYSTEM),
    inert("a14 a call of what is no function", call(num(1), text("x"))),
    inert("a14 __reduce__ as an item", ORDERED + text("__reduce__") + EVIL + SETITEM, SYSTEM),
    inert("a14 appended to a call", EVIL + MARK + EVIL + APPENDS, SYSTEM),
    inert("a14 a module that does not exist", glob("no.such.module", "x"), ("no.such.module", "x")),
    inert("a14 a name without letters", glob("", ""), ("", "")),
    inert("a14 a name that is a path", glob("../../x", "/etc/x"), ("../../x", "/etc/x")),
    opens("a14 code as hooks of a tensor", checkpoint(table(("w", tensor(hooks=EVIL)))), SYSTEM),
    refused(
        "a14 code as a storage",
        checkpoint(table(("w", tensor(on=EVIL)))),
        LayoutError,
        "storage",
        SYSTEM,
    ),
    refused(
        "a14 code as a storage class",
        checkpoint(table(("w", tensor(on=storage("system", module="os"))))),
        LayoutError,
        "unknown class",
        SYSTEM,
    ),
    refused(
        "a14 code as a size",
        checkpoint(table(("w", tensor(size=EVIL)))),
        LayoutError,
        "size",
        SYSTEM,
    ),
    opens(
        "a14 code as a key",
        checkpoint(EMPTY_DICT + MARK + text("w") + tensor() + EVIL + NONE + SETITEMS),
        SYSTEM,
    ),
    refused("a16 PERSID as text", checkpoint(beside(b"Pstorage\n")), LayoutError),
    refused(
        "a17 pid 'module' in an archive",
        checkpoint(
            beside(tup(text("module"), glob("m", "C"), text("m.py"), text("x")) + BINPERSID)
        ),
        LayoutError,
        "class",
        ("m", "C"),
    ),
    refused(
        "a18 pid of 2 items",
        checkpoint(beside(tup(text("storage"), NONE) + BINPERSID)),
        LayoutError,
    ),
    refused("a18 pid that is a number", checkpoint(beside(num(1) + BINPERSID)), LayoutError),
    refused("a18 pid of a pid", checkpoint(beside(storage() + BINPERSID)), LayoutError),
    refused("a18 pid popped again", checkpoint(num(1) + BINPERSID + POP + GOOD), LayoutError),
    broken("a19 EXT1", b"\x82\x01", says="EXT1"),
    broken("a19 EXT2", b"\x83\x01\x00", says="EXT2"),
    broken("a19 EXT4", b"\x84\x01\x00\x00\x00", says="EXT4"),
    broken("a19 NEXT_BUFFER", b"\x97", says="NEXT_BUFFER"),
    broken("a19 READONLY_BUFFER", NONE + b"\x98", says="READONLY_BUFFER"),
    broken("a20 STACK_GLOBAL of numbers", num(1) + num(2) + STACK_GLOBAL, says="global"),
    broken("a20 STACK_GLOBAL of a global", glob(*SYSTEM) + text("x") + STACK_GLOBAL, says="global"),
    broken("a21 REDUCE with a list", glob(*SYSTEM) + EMPTY_LIST + REDUCE, says="tuple"),
    broken("a21 NEWOBJ with a dict", glob(*SYSTEM) + EMPTY_DICT + NEWOBJ, says="tuple"),
    broken("a21 NEWOBJ_EX with a list", glob(*SYSTEM) + EMPTY_TUPLE + EMPTY_LIST + NEWOBJ_EX),
    broken("a21 BUILD on a list", EMPTY_LIST + EMPTY_DICT + BUILD, says="list"),
    broken("a21 BUILD on a global", glob(*SYSTEM) + EMPTY_DICT + BUILD),
    broken("a21 OBJ of nothing", MARK + OBJ),
]

PICKLES = [
    refused("b01 protocol 6", checkpoint(protocol=6), UnsupportedPickle, "protocol 6"),
    refused("b01 protocol 255", checkpoint(protocol=255), UnsupportedPickle, "protocol 255"),
    opens("b01 no protocol", checkpoint(protocol=None)),
    opens("b01 protocol 5", checkpoint(protocol=5)),
    opens("b01 a protocol in the middle", checkpoint(beside(b"\x80\x04" + NONE))),
    refused("b02 an empty pickle", archive([Member("a/data.pkl")]), TruncatedFile),
    refused("b02 STOP alone", checkpoint(b""), FormatError),
    refused("b02 no STOP", archive([Member("a/data.pkl", b"\x80\x02}")]), TruncatedFile, "STOP"),
    broken("b02 no such opcode", b"\x00", says="no such opcode"),
    opens("b04 LONG_BINPUT 2**32-1", checkpoint(beside(NONE + put(2**32 - 1)))),
    broken("b04 a memo entry that is not there", get(77), says="memo"),
    broken("b04 GET of no number", b"g-1\n", says="memo"),
    broken("b04 PUT of 11 digits", NONE + b"p99999999999\n"),
    refused("b05 a string of 4 GB", checkpoint(b"X\xff\xff\xff\xff" + GOOD), LimitExceeded),
    refused("b05 a string of 100 MB", checkpoint(b"X\0\0\0\x06" + GOOD), TruncatedFile),
    refused("b06 a string of 2**64", checkpoint(b"\x8d" + b"\xff" * 8), LimitExceeded),
    refused("b06 bytes of 2**63", checkpoint(b"\x8e" + bytes(7) + b"\x80"), LimitExceeded),
    refused("b06 a bytearray of 2**40", checkpoint(b"\x96" + bytes(5) + b"\1\0\0"), LimitExceeded),
    refused("b06 bytes of 4 GB", checkpoint(b"B\xff\xff\xff\xff"), LimitExceeded),
    broken("b07 an int of 2**31-1 bytes", b"\x8b\xff\xff\xff\x7f", says="int"),
    broken("b07 an int of -1 bytes", b"\x8b\xff\xff\xff\xff", says="-1 bytes"),
    broken("b07 an int of 5,000 digits", b"L" + b"9" * 5000 + b"L\n", says="int"),
    broken("b07 an INT of 5,000 digits", b"I" + b"9" * 5000 + b"\n", says="int"),
    broken("b07 an int that is none", b"Labc\n", says="int"),
    broken("b07 an int with underscores", b"I1_0\n", says="int"),
    broken("b07 a float that is none", b"Fabc\n", says="float"),
    opens("b08 a frame that is too long", checkpoint(b"\x95" + b"\xff" * 8 + GOOD, protocol=4)),
    opens("b08 a frame of nothing", checkpoint(b"\x95" + bytes(8) + GOOD, protocol=4)),
    refused("b08 a frame cut off", archive([Member("a/data.pkl", b"\x80\4\x95\1")]), TruncatedFile),
    opens(
        "b12 a list in itself",
        checkpoint(EMPTY_LIST + put(0) + tensor() + APPEND + get(0) + APPEND),
        tensors={"0": ONE_TO_FOUR["w"]},
    ),
    opens("b12 a dict in itself", checkpoint(GOOD + put(0) + text("me") + get(0) + SETITEM)),
    opens(
        "b12 two lists in each other",
        checkpoint(beside(EMPTY_LIST + put(0) + EMPTY_LIST + put(1) + get(0) + APPEND + APPEND)),
    ),
    opens(
        "b12 an object that is its own state",
        checkpoint(beside(call(glob("m", "C")) + put(0) + table(("me", get(0))) + BUILD)),
        ("m", "C"),
    ),
    broken("b15 SETITEM on a list", EMPTY_LIST + NONE + NONE + SETITEM, says="list"),
    broken("b15 SETITEM on a tuple", EMPTY_TUPLE + NONE + NONE + SETITEM, says="tuple"),
    broken("b15 SETITEM on a string", text("x") + NONE + NONE + SETITEM, says="str"),
    broken("b16 SETITEM on a tensor", tensor() + num(0) + num(1) + SETITEM, LayoutError, "items"),
    broken("b16 APPEND to a tensor", tensor() + num(0) + APPEND, LayoutError, "items"),
    broken("b16 SETITEM on a storage", storage() + num(0) + num(1) + SETITEM),
    broken("b17 APPEND to a tuple", EMPTY_TUPLE + NONE + APPEND, says="tuple"),
    broken("b17 APPEND to a dict", EMPTY_DICT + NONE + APPEND, says="dict"),
    broken("b17 APPENDS to nothing", MARK + NONE + APPENDS),
    broken("b17 ADDITEMS to a list of lists", EMPTY_SET + MARK + EMPTY_LIST + ADDITEMS),
    broken("b18 odd SETITEMS", EMPTY_DICT + MARK + NONE + SETITEMS, says="odd"),
    broken("b18 odd DICT", MARK + NONE + DICT, says="odd"),
    broken("b19 a list as a key", EMPTY_DICT + EMPTY_LIST + NONE + SETITEM, says="key"),
    broken("b19 a dict in a tuple as a key", EMPTY_DICT + EMPTY_DICT + TUPLE1 + NONE + SETITEM),
    opens(
        "b19 an int of 70 bits as a key",
        checkpoint(EMPTY_DICT + num(2**70) + tensor() + SETITEM),
        tensors={str(2**70): ONE_TO_FOUR["w"]},
    ),
    broken("b19 9 tuples as a key", EMPTY_DICT + NONE + TUPLE1 * 9 + NONE + SETITEM),
    opens(
        "b22 a lone surrogate as a name",
        checkpoint(table(("\ud800", tensor()))),
        tensors={"\\ud800": ONE_TO_FOUR["w"]},
        note="shown as",
    ),
    opens(
        "b22 an empty name, and __metadata__",
        checkpoint(table(("__metadata__", tensor()))),
        tensors={"\\__metadata__": ONE_TO_FOUR["w"]},
        note="shown as",
    ),
    broken("b23 text that is not UTF-8", b"X\1\0\0\0\xff", says="UTF-8"),
    broken("b23 a global that is not UTF-8", b"c\xff\nx\n", says="UTF-8"),
    broken("b23 a string without quotes", b"Sabc\n", says="quotes"),
    broken("b23 an escape beyond Unicode", b"V\\U00110000\n"),
    refused("b24 a mark that is never used", checkpoint(MARK + b"0" + b"0"), FormatError),
    opens("b24 a mark below the result", checkpoint(MARK + GOOD)),
    opens(
        "b25 two keys of one name",
        checkpoint(EMPTY_DICT + MARK + num(1) + tensor() + text("1") + tensor() + SETITEMS),
        tensors={"1": ONE_TO_FOUR["w"], "1#2": ONE_TO_FOUR["w"]},
        note="both",
    ),
    opens(
        "b25 a key set twice: the last counts",
        checkpoint(table(("w", tensor((2,))), ("w", tensor()))),
    ),
    opens(
        "b25 a key of an OrderedDict set twice: the last counts",
        checkpoint(ORDERED + MARK + text("w") + tensor((2,)) + text("w") + tensor() + SETITEMS),
    ),
    opens(
        "b26 a list as a key of an object",
        checkpoint(beside(ORDERED + EMPTY_LIST + NONE + SETITEM)),
    ),
    opens(
        "b26 a list as a key of a module's buffers",
        checkpoint(
            beside(
                glob("m", "M")
                + EMPTY_TUPLE
                + NEWOBJ
                + table(
                    ("_parameters", ORDERED),
                    ("_modules", ORDERED),
                    ("_buffers", ORDERED + EMPTY_LIST + NONE + SETITEM),
                )
                + BUILD
            )
        ),
        ("m", "M"),
    ),
    opens(
        "b26 a huge int as the name of a tensor",
        checkpoint(ORDERED + num(HUGE) + tensor() + SETITEM),
        tensors={f"an int of {HUGE.bit_length():,} bits": ONE_TO_FOUR["w"]},
    ),
    opens("b26 a huge int", checkpoint(beside(num(HUGE)))),
    opens(
        "b26 complex of a huge int",
        checkpoint(beside(call(glob("builtins", "complex"), num(2**2000)))),
    ),
    opens(
        "b26 a device of a huge number",
        checkpoint(beside(call(glob("torch", "device"), num(HUGE)))),
    ),
]

TENSORS = [
    one("c01 more elements than bytes", on=storage(count=1000), says="1,000"),
    one("c01 fewer elements than bytes", on=storage(count=3), size=(3,), says="3 elements"),
    one("c01 a wider type than bytes", on=storage("DoubleStorage"), says="8 bytes"),
    one("c02 a view beyond the end", size=(5,), says="element 5"),
    one("c02 an offset beyond the end", offset=1, says="element 5"),
    one("c02 a stride beyond the end", size=(2,), stride=(4,), says="element 5"),
    one("c03 a negative size", size=(-4,), says="negative"),
    one("c03 a negative stride", stride=(-1,), says="negative"),
    one("c03 a negative offset", offset=-1, says="-1"),
    one("c04 more sizes than strides", size=(2, 2), says="2 sizes"),
    one("c04 more strides than sizes", stride=(1, 1), says="2 strides"),
    one("c05 a product of 2**64", size=(2**32, 2**32), stride=(0, 0), says="larger"),
    one("c05 a product that is 0 in 64 bits", size=(2**33, 2**33), stride=(0, 0), says="larger"),
    one("c05 a stride of 2**63", size=(2,), stride=(2**63,)),
    one("c05 an offset of 2**64", offset=2**64),
    one("c05 a size no dimension has, and 0", size=(2**100, 0), stride=(1, 1)),
    one("c05 a size no array has, and 0", size=(0, 2**62), stride=(1, 1)),
    one("c06 65 dimensions", size=(1,) * 65, stride=(1,) * 65),
    one("c07 a count of 30,000 bits", on=storage(count=HUGE)),
    one("c07 a count of -30,000 bits", on=storage(count=-HUGE)),
    one("c07 a key of 30,000 bits", on=storage(key=num(HUGE))),
    one("c07 a size of 30,000 bits", size=(HUGE,)),
    one("c07 a size of -30,000 bits", size=(-HUGE,)),
    one("c07 a stride of 30,000 bits", stride=(HUGE,)),
    one("c07 an offset of 30,000 bits", offset=HUGE),
    one("c07 an offset of -30,000 bits", offset=-HUGE),
    one("c09 True as a size", size=tup(TRUE), says="ints"),
    one("c10 4.0 as a size", size=tup(b"G" + struct.pack(">d", 4)), says="ints"),
    one("c10 '4' as a size", size=tup(text("4")), says="ints"),
    one("c10 None as a size", size=NONE, says="size"),
    one("c10 True as an offset", offset=TRUE),
    one("c10 True as a count", on=storage(count=TRUE)),
    one("c10 4.0 as a count", on=storage(count=b"G" + struct.pack(">d", 4))),
    one("c11 a negative count", on=storage(count=-4), says="-4"),
    one("c13 a storage that is not there", TruncatedFile, on=storage(key="1"), says="data/1"),
    one("c14 a key that is a path", TruncatedFile, on=storage(key="../../../etc/passwd")),
    one("c14 a key that is an absolute path", TruncatedFile, on=storage(key="/etc/passwd")),
    one("c14 a key that leads back", TruncatedFile, on=storage(key="../data/0")),
    one("c14 an empty key", TruncatedFile, on=storage(key="")),
    one("c14 a key in other letters", TruncatedFile, on=storage(key="\uff10")),
    one("c15 a key that is a number", on=storage(key=num(0))),
    refused(
        "c16 conj of floats",
        checkpoint(table(("w", tensor((4,), (1,), 0, None, table(("conj", TRUE)))))),
        LayoutError,
        "conj",
    ),
    refused(
        "c16 metadata that is a list",
        checkpoint(table(("w", tensor((4,), (1,), 0, None, row(TRUE))))),
        LayoutError,
        "metadata",
    ),
    refused(
        "c17 rebuilt from 2 arguments", checkpoint(call(REBUILD, storage(), num(0))), LayoutError
    ),
    refused("c17 rebuilt from none", checkpoint(call(REBUILD)), LayoutError),
    refused(
        "c17 v3 with code as its dtype",
        checkpoint(
            call(
                glob("torch._utils", "_rebuild_tensor_v3"),
                storage("UntypedStorage", "0", 16, module="torch.storage"),
                num(0),
                ints(4),
                ints(1),
                FALSE,
                ORDERED,
                glob(*SYSTEM),
            )
        ),
        LayoutError,
        "dtype",
        SYSTEM,
    ),
    refused(
        "c18 a part that begins before its storage",
        checkpoint(
            table(
                ("w", tensor(on=storage("FloatStorage", "0", 4, tup(text("v"), num(-1), num(2)))))
            )
        ),
        LayoutError,
    ),
    refused(
        "c18 a part beyond its storage",
        checkpoint(
            table(("w", tensor(on=storage("FloatStorage", "0", 4, tup(text("v"), num(3), num(2))))))
        ),
        LayoutError,
    ),
    opens(
        "c12 one storage as two types",
        checkpoint(table(("w", tensor()), ("i", tensor(on=storage("IntStorage"))))),
        tensors=ONE_TO_FOUR | {"i": np.frombuffer(FLOATS, "<i4").tolist()},
    ),
    opens(
        "c19 a size of 1 with a stride of 2**62",
        checkpoint(table(("w", tensor((1, 2), (2**62, 2))))),
        tensors={"w": [[1.0, 3.0]]},
    ),
    opens(
        "c19 a size of 1 with a stride of 2**100",
        checkpoint(table(("w", tensor((1, 2), (2**100, 2))))),
        tensors={"w": [[1.0, 3.0]]},
    ),
    opens(
        "c19 empty, at an offset of 2**70",
        checkpoint(table(("w", tensor((0,), (7,), 2**70)))),
        tensors={"w": []},
    ),
    opens(
        "c19 overlapping rows",
        checkpoint(table(("w", tensor((3, 2), (1, 1))))),
        tensors={"w": [[1, 2], [2, 3], [3, 4]]},
    ),
    opens("c20 an array", checkpoint(table(("w", array(ints(4), b"C\x10" + FLOATS))))),
    refused(
        "c20 an array of fewer bytes", checkpoint(array(ints(4), b"C\x01x")), LayoutError, "16"
    ),
    refused("c20 an array of a negative size", checkpoint(array(ints(-4), b"C\x01x")), LayoutError),
    refused(
        "c20 an array of 65 dimensions",
        checkpoint(array(ints(*[1] * 65), b"C\x04abcd")),
        FormatError,
    ),
    refused(
        "c20 an empty array of 2**70 columns",
        checkpoint(array(ints(0, 2**70), b"C\x00")),
        FormatError,
    ),
    refused(
        "c20 an empty array of 2**62 columns",
        checkpoint(array(ints(0, 2**62), b"C\x00")),
        FormatError,
    ),
    refused(
        "c21 17 wrappers",
        checkpoint(
            glob("torch.nn.parameter", "Parameter") * 17 + tensor() + (TUPLE1 + REDUCE) * 17
        ),
        LayoutError,
    ),
]


def with_member(*more):
    return archive(members() + list(more))


def sharing_a_body():
    """Two members in the directory, one local header."""
    found = members(table(("w", tensor()), ("v", tensor(on=storage(key="1")))))
    at = len(archive(found[:2])) - 22 - sum(46 + len(m.name) for m in found[:2])
    return archive([*found, Member("archive/data/1", FLOATS, central={"header": at})])


def wrong_crc(name):
    return changed(name, local={"crc": 1}, central={"crc": 1})


BOMB = bytes(20 * 1024 * 1024)
END = b"PK\5\6" + bytes(16) + b"\0\0"
DEFLATED = [Member(m.name, m.data, deflate=True) for m in members()]

ARCHIVES = [
    opens("d00 the good one", checkpoint()),
    opens("d00 with 64-bit records", checkpoint(wide={})),
    opens("d01 all deflated", archive(DEFLATED)),
    refused(
        "d02 a pickle that unpacks to more than it says",
        changed("data.pkl", deflate=True, local={"size": 9}, central={"size": 9}),
        LayoutError,
        "9",
    ),
    refused(
        "d02 a pickle that unpacks to 20 MB and says 9",
        changed("data.pkl", data=BOMB, deflate=True, local={"size": 9}, central={"size": 9}),
        LayoutError,
    ),
    refused(
        "d02 a byte order that unpacks to 20 MB",
        changed("byteorder", data=BOMB, deflate=True),
        HeaderError,
    ),
    refused(
        "d03 a deflated pickle larger than allowed",
        changed("data.pkl", deflate=True, local={"size": 2**30}, central={"size": 2**30}),
        HeaderError,
        "1,073,741,824",
    ),
    refused(
        "d03 what is not deflated",
        changed("data.pkl", local={"method": 8}, central={"method": 8}),
        FormatError,
        "unpack",
    ),
    refused(
        "d04 a storage twice", with_member(Member("archive/data/0", FLOATS)), LayoutError, "twice"
    ),
    refused(
        "d05 a pickle twice",
        with_member(Member("archive/data.pkl", pickled(GOOD))),
        LayoutError,
        "twice",
    ),
    refused(
        "d05 a pickle in another folder",
        with_member(Member("archive/b/data.pkl", pickled(EVIL))),
        FormatError,
        "two data.pkl",
        SYSTEM,
    ),
    refused(
        "d05 a pickle in another prefix",
        with_member(Member("b/data.pkl", pickled(EVIL))),
        FormatError,
        "two data.pkl",
        SYSTEM,
    ),
    refused(
        "d06 a storage in other case",
        with_member(Member("archive/DATA/0", FLOATS)),
        LayoutError,
        "twice",
    ),
    refused(
        "d06 a pickle in other case",
        with_member(Member("archive/data.PKL", b"x")),
        LayoutError,
        "twice",
    ),
    refused(
        "d07 no pickle", archive([Member("archive/version", b"3\n")]), FormatError, "no data.pkl"
    ),
    refused(
        "d07 no member",
        b"PK\3\4" + bytes(26) + END[:12] + bytes(4) + b"\x1e\0\0\0" + b"\0\0",
        FormatError,
    ),
    refused(
        "d09 another local name",
        changed("data/0", local={"name": b"archive/data/1"}),
        LayoutError,
        "name",
    ),
    refused(
        "d09 a pickle of another local name",
        changed("data.pkl", local={"name": b"archive/data.bad"}),
        LayoutError,
        "name",
    ),
    refused("d10 another local size", changed("data/0", local={"size": 12}), LayoutError, "12"),
    refused(
        "d10 another local stored size", changed("data/0", local={"stored": 12}), LayoutError, "12"
    ),
    refused("d10 another local checksum", changed("data/0", local={"crc": 12}), LayoutError, "12"),
    refused(
        "d10 another size in the directory",
        changed("data/0", central={"size": 12, "stored": 12}),
        LayoutError,
    ),
    refused(
        "d10 a size and a stored size", changed("data/0", central={"size": 12}), LayoutError, "12"
    ),
    refused(
        "d10 a local extra over the next member",
        changed("data/0", local={"extra": b""}, central={"stored": 70, "size": 70}),
        LayoutError,
    ),
    refused("d11 two members with one body", sharing_a_body(), LayoutError),
    refused(
        "d12 a member over the next",
        changed("data/0", central={"stored": 400, "size": 400}),
        LayoutError,
        "over",
    ),
    refused(
        "d12 a member in the directory", changed("version", central={"header": 10**6}), LayoutError
    ),
    refused(
        "d13 a member before the file",
        changed("data/0", central={"header": 2**32 - 2}),
        LayoutError,
    ),
    refused(
        "d14 method 12",
        changed("data/0", local={"method": 12}, central={"method": 12}),
        FormatError,
        "method 12",
    ),
    refused(
        "d15 encrypted",
        changed("data.pkl", local={"flags": 1}, central={"flags": 1}),
        FormatError,
        "encrypted",
    ),
    refused(
        "d15 encrypted in the directory",
        changed("data/0", central={"flags": 1}),
        FormatError,
        "encrypted",
    ),
    refused(
        "d15 encrypted in the local header",
        changed("data/0", local={"flags": 0x801}),
        LayoutError,
        "packed",
    ),
    refused(
        "d16 patched",
        changed("data.pkl", local={"flags": 0x20}, central={"flags": 0x20}),
        FormatError,
        "encrypted",
    ),
    refused(
        "d16 strongly encrypted",
        changed("data.pkl", local={"flags": 0x41}, central={"flags": 0x41}),
        FormatError,
        "encrypted",
    ),
    refused(
        "d34 a masked directory",
        changed("data/0", local={"flags": 0x2000}, central={"flags": 0x2000}),
        FormatError,
        "encrypted",
    ),
    refused("d17 a wrong checksum of the pickle", wrong_crc("data.pkl"), FormatError, "checksum"),
    refused(
        "d17 a wrong checksum of the byte order", wrong_crc("byteorder"), FormatError, "checksum"
    ),
    opens("d17 a wrong checksum of a storage, which verify finds", wrong_crc("data/0")),
    refused(
        "d18 another local method", changed("data/0", local={"method": 8}), LayoutError, "packed"
    ),
    refused("d19 one member more", checkpoint(count=5, here=5), LayoutError, "4 of 5"),
    refused("d19 one member less", checkpoint(count=3, here=3), LayoutError, "after"),
    refused("d19 no member", checkpoint(count=0, here=0), FormatError),
    refused("d19 65,535 members", checkpoint(count=0xFFFF, here=0xFFFF), LayoutError),
    refused("d19 two volumes", checkpoint(count=4, here=2), FormatError, "several files"),
    refused("d19 the second volume", checkpoint(disk=1), FormatError, "several files"),
    refused("d20 an end record in the comment", checkpoint(comment=END), FormatError, "two end"),
    opens("d20 a comment", checkpoint(comment=b"hello")),
    refused("d21 a directory elsewhere", checkpoint(offset=0), LayoutError),
    refused("d21 a shorter directory", checkpoint(size=46), LayoutError),
    refused("d21 a directory of 4 GB", checkpoint(size=2**32 - 1), LayoutError),
    refused("d22 junk before it", checkpoint(prefix=b"junk"), FormatError),
    refused("d22 an archive before it", checkpoint(prefix=checkpoint()), LayoutError),
    refused("d23 junk behind it", checkpoint(suffix=b"junk"), LayoutError, "4 bytes follow"),
    refused("d23 junk of 70 KB behind it", checkpoint(suffix=bytes(70_000)), TruncatedFile),
    opens("d25 no version", archive(members()[:-1])),
    opens("d27 no prefix", archive([Member("data.pkl", pickled(GOOD)), Member("data/0", FLOATS)])),
    refused(
        "d26 a second prefix",
        with_member(Member("other/data/0", FLOATS)),
        LayoutError,
        "other/data/0",
    ),
    refused(
        "d33 a name that leads out", with_member(Member("../../etc/passwd", b"x")), LayoutError
    ),
    opens("d33 a name that leads out of the prefix", with_member(Member("archive/../../x", b"x"))),
    refused("d28 a name with NUL", with_member(Member("archive/data/0\0x", FLOATS)), FormatError),
    opens(
        "d28 a name that is not UTF-8",
        with_member(
            Member("x", b"x", local={"name": b"archive/\xff"}, central={"name": b"archive/\xff"})
        ),
    ),
    refused("d28 a member without a name", with_member(Member("", FLOATS)), FormatError),
    refused(
        "d29 a byte order of garbage",
        changed("byteorder", data=b"\xff\xfe"),
        LayoutError,
        "byte order",
    ),
    refused(
        "d29 a byte order in the middle",
        changed("byteorder", data=b"middle"),
        LayoutError,
        "middle",
    ),
    refused(
        "d29 a byte order of 17 bytes",
        changed("byteorder", data=b"little" + b" " * 11),
        FormatError,
    ),
    opens(
        "d29 big",
        changed("byteorder", data=b"big"),
        tensors={"w": np.frombuffer(FLOATS, ">f4").tolist()},
    ),
    refused(
        "d30 4 GB without saying how much",
        changed("data/0", central={"size": 2**32 - 1, "stored": 2**32 - 1}),
        LayoutError,
        "4 GiB",
    ),
    refused(
        "d30 2**63 bytes in 64 bits",
        changed(
            "data/0",
            central={
                "size": 2**32 - 1,
                "stored": 2**32 - 1,
                "extra": struct.pack("<HHQQ", 1, 16, 2**63, 2**63),
            },
        ),
        LayoutError,
    ),
    refused(
        "d30 64 bits cut off",
        changed("data/0", central={"size": 2**32 - 1, "extra": struct.pack("<HHI", 1, 16, 0)}),
        LayoutError,
    ),
    refused(
        "d31 a 64-bit count that differs",
        checkpoint(wide={"count": 5, "here": 5}),
        LayoutError,
        "disagree",
    ),
    refused(
        "d31 a 64-bit count of 2**63",
        checkpoint(wide={"count": 2**63, "here": 2**63}, count=0xFFFF, here=0xFFFF),
        LimitExceeded,
    ),
    refused(
        "d31 a 64-bit size of 2**63", checkpoint(wide={"size": 2**63}, size=2**32 - 1), LayoutError
    ),
    refused("d31 a 64-bit offset that differs", checkpoint(wide={"offset": 0}), LayoutError),
    refused(
        "d31 a broken 64-bit record",
        checkpoint(wide={"signature": b"PK\6\5"}),
        FormatError,
        "64-bit",
    ),
    refused(
        "d35 a 64-bit locator beyond the end",
        checkpoint(wide={"place": 2**63}),
        LayoutError,
        "64-bit",
    ),
    refused(
        "d35 a 64-bit locator before the file", checkpoint(wide={"place": 0}), LayoutError, "64-bit"
    ),
    refused("d35 two disks", checkpoint(wide={"disks": 2}), LayoutError),
    refused("d36 a download cut off in a storage", checkpoint()[:-300], TruncatedFile, "cut off"),
    refused("d36 a download of 4 bytes", b"PK\3\4", TruncatedFile, "cut off"),
]

EVIL_NUMBER = EVIL + POP

STREAMS = [
    opens("e00 the good one", legacy()),
    opens("e00 code beside a tensor", legacy(table(("w", tensor()), ("x", EVIL))), SYSTEM),
    refused(
        "e01 another magic number",
        legacy(magic=pickled(num(MAGIC + 1))),
        FormatError,
        "without tensors",
    ),
    refused(
        "e02 code in the magic number",
        legacy(magic=pickled(EVIL_NUMBER + num(MAGIC))),
        FormatError,
        "",
        SYSTEM,
    ),
    refused("e02 code as the magic number", legacy(magic=pickled(EVIL)), FormatError, "", SYSTEM),
    refused(
        "e02 code in the protocol",
        legacy(version=pickled(EVIL_NUMBER + num(1001))),
        HeaderError,
        "1001",
        SYSTEM,
    ),
    refused(
        "e02 code in the system information",
        legacy(system=pickled(table(("x", EVIL)))),
        HeaderError,
        "system",
        SYSTEM,
    ),
    refused(
        "e02 code as the system information",
        legacy(system=pickled(EVIL)),
        HeaderError,
        "system",
        SYSTEM,
    ),
    refused(
        "e02 code in the list of keys",
        legacy(keys=EVIL_NUMBER + row(text("0"))),
        LayoutError,
        "keys",
        SYSTEM,
    ),
    refused("e03 protocol 1002", legacy(version=pickled(num(1002))), HeaderError, "1001"),
    refused("e03 protocol True", legacy(version=pickled(TRUE)), HeaderError),
    refused(
        "e03 protocol 1001.0", legacy(version=pickled(b"G" + struct.pack(">d", 1001))), HeaderError
    ),
    refused(
        "e04 system information that is a list", legacy(system=pickled(EMPTY_LIST)), HeaderError
    ),
    refused("e05 a count that differs", legacy(storages=[("0", 3, FLOATS)]), LayoutError, "3"),
    refused("e05 a count of 2**63", legacy(storages=[("0", 2**63, FLOATS)]), LayoutError),
    refused("e06 a storage cut off", legacy()[:-1], TruncatedFile),
    refused("e06 no storage", legacy()[:-24], TruncatedFile),
    refused("e06 half a count", legacy()[:-20], TruncatedFile),
    refused(
        "e07 more elements than the file has",
        legacy(table(("w", tensor(on=storage(count=10**12))))),
        TruncatedFile,
    ),
    refused(
        "e07 a count of 30,000 bits",
        legacy(table(("w", tensor(on=storage(count=HUGE))))),
        FormatError,
    ),
    refused(
        "e08 one storage with two counts",
        legacy(table(("w", tensor()), ("v", tensor((2,), on=storage(count=2))))),
        LayoutError,
    ),
    refused(
        "e08 one storage with two types",
        legacy(table(("w", tensor()), ("v", tensor(on=storage("IntStorage"))))),
        LayoutError,
    ),
    refused("e10 no key", legacy(keys=[]), LayoutError, "not there"),
    refused("e10 another key", legacy(keys=["1"]), LayoutError, "'0'"),
    refused(
        "e11 a key too many",
        legacy(storages=[("0", 4, FLOATS), ("1", 4, FLOATS)]),
        LayoutError,
        "'1'",
    ),
    refused(
        "e12 a key twice",
        legacy(storages=[("0", 4, FLOATS), ("0", 4, FLOATS)]),
        LayoutError,
        "twice",
    ),
    refused("e12 keys that are numbers", legacy(keys=row(num(0))), LayoutError, "keys"),
    refused("e12 keys that are a tuple", legacy(keys=tup(text("0"))), LayoutError, "keys"),
    refused(
        "e12 keys that are a list in themselves",
        legacy(keys=EMPTY_LIST + put(0) + get(0) + APPEND),
        LayoutError,
    ),
    opens(
        "e13 a part of a storage",
        legacy(
            table(
                (
                    "w",
                    tensor(
                        (2,), on=storage("FloatStorage", "0", 4, tup(text("v"), num(1), num(2)))
                    ),
                )
            )
        ),
        tensors={"w": [2.0, 3.0]},
    ),
    refused(
        "e13 a view beyond the part",
        legacy(
            table(
                (
                    "w",
                    tensor(
                        (3,), on=storage("FloatStorage", "0", 4, tup(text("v"), num(1), num(2)))
                    ),
                )
            )
        ),
        LayoutError,
    ),
    opens(
        "e14 a class with its source",
        legacy(
            table(
                ("w", tensor()),
                ("x", tup(text("module"), glob("m", "C"), text("f"), text("s")) + BINPERSID),
            )
        ),
        ("m", "C"),
    ),
    opens("e15 two saves in one file", legacy() + legacy(), note="only the first"),
    opens("e15 junk behind it", legacy() + b"junk", note="4 bytes"),
    opens(
        "e16 a head of protocol 0",
        legacy(magic=f"L{MAGIC}L\n.".encode(), version=b"I1001\n.", protocol=None),
    ),
    opens(
        "e16 code in a pickle without PROTO",
        legacy(table(("w", tensor()), ("x", EVIL)), protocol=None, magic=pickled(num(MAGIC))),
        SYSTEM,
    ),
    opens(
        "e16 code behind a head of protocol 0",
        legacy(
            table(("w", tensor()), ("x", EVIL)),
            magic=f"L{MAGIC}L\n.".encode(),
            version=b"I1001\n.",
            protocol=None,
        ),
        SYSTEM,
    ),
    opens("e16 a head of protocol 4", legacy(protocol=4)),
    refused(
        "e17 code, then an opcode that does not exist",
        legacy(EVIL + b"\xff"),
        UnsupportedPickle,
        "",
        SYSTEM,
    ),
    refused(
        "e17 code, then the end",
        legacy(EVIL + b"X\xff\xff\0\0", storages=())[:-20],
        TruncatedFile,
        "",
        SYSTEM,
    ),
    refused("e18 only the magic number", pickled(num(MAGIC)), TruncatedFile),
]

IMPOSTORS = [
    refused("g20 a page", b"<!DOCTYPE html><html>Sign in</html>", FormatError, "HTML"),
    refused("g20 a page after blank lines", b"\n\n  <html>", FormatError, "HTML"),
    refused(
        "g21 an LFS pointer",
        b"version https://git-lfs.github.com/spec/v1\noid x",
        FormatError,
        "git lfs pull",
    ),
    refused("g22 nothing", b"", FormatError, "empty"),
    refused("g23 zeros", bytes(4096), FormatError, "zeros"),
    refused("g24 gzip", gzip.compress(checkpoint(), mtime=0), FormatError, "gzip"),
    refused("g24 zstd", b"\x28\xb5\x2f\xfd" + bytes(40), FormatError, "zstd"),
    refused("g24 bzip2", b"BZh91AY&SY" + bytes(40), FormatError, "bzip2"),
    refused("g24 xz", b"\xfd7zXZ\0" + bytes(40), FormatError, "xz"),
    refused(
        "g25 a tar", b"sys_info".ljust(257, b"\0") + b"ustar".ljust(255, b"\0"), FormatError, "tar"
    ),
    refused("g25 GGUF", b"GGUF" + bytes(40), FormatError, "GGUF"),
    refused("g25 HDF5", b"\x89HDF\r\n\x1a\n" + bytes(40), FormatError, "HDF5"),
    refused("g25 numpy", b"\x93NUMPY\1\0" + bytes(40), FormatError, "numpy"),
    refused("g25 a plain pickle", pickled(GOOD), FormatError, "data.pkl of a checkpoint"),
    refused("g25 a pickle that runs code", pickled(EVIL), FormatError, "pickle", SYSTEM),
    refused("g25 such a pickle without PROTO", pickled(EVIL, None), FormatError, "", SYSTEM),
    refused(
        "g25 such a pickle that begins with None",
        pickled(NONE + POP + EVIL, None),
        FormatError,
        "",
        SYSTEM,
    ),
    refused(
        "g25 such a pickle behind another", pickled(NONE) + pickled(EVIL), FormatError, "", SYSTEM
    ),
]

CUTS = [
    refused(
        f"b03 the pickle cut off at {at}",
        archive([Member("a/data.pkl", pickled(GOOD)[:at])]),
        FormatError,
    )
    for at in range(0, len(pickled(GOOD)) - 1, 5)
]
CUTS += [
    refused(f"e06 the stream cut off at {at}", legacy()[:at], FormatError)
    for at in range(1, len(legacy()), 7)
]

ROWS = [*CODE, *PICKLES, *TENSORS, *ARCHIVES, *STREAMS, *IMPOSTORS, *CUTS]
every = pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory):
    """Whatever reading imports when it is first needed is there before anything is watched."""
    path = tmp_path_factory.mktemp("good") / "good.pt"
    for content in (checkpoint(), archive(DEFLATED), legacy(), ARCHIVES[0].content):
        path.write_bytes(content)
        for target in (content, path):
            with weighlock.open(target) as catalog:
                catalog["w"].load()
    for codec in ("raw-unicode-escape", "cp437"):  # a test of its own looks at these
        codecs.lookup(codec)


def foreign(names):
    return {name for name in names if not is_known(*name)}


def look(target, case, *allowed):
    """Open a file as a user would, and hold what happens against its row."""
    modules = set(sys.modules)
    with watched(*allowed) as seen:
        try:
            catalog = weighlock.open(target)
        except (FormatError, LimitExceeded) as error:
            refusal, catalog = error, None
        else:
            with catalog:
                values = {name: ref.load() for name, ref in catalog.items() if ref.nbytes < 10**6}
    assert seen == []
    assert set(sys.modules) == modules
    if catalog is None:
        assert case.error is not None, refusal
        assert isinstance(refusal, case.error), repr(refusal)
        assert case.says in str(refusal)
        assert str(refusal).isprintable()
        assert len(str(refusal)) < 1000
        return
    assert case.error is None, dict(catalog)
    assert {name: array.tolist() for name, array in values.items()} == case.tensors
    assert foreign(catalog.globals) == case.flagged
    assert any(case.note in note for note in (*catalog.notes, ""))
    assert bool(catalog.notes) == bool(case.note)


def test_there_are_many_and_no_name_twice():
    names = [case.name for case in ROWS]
    assert len(names) > 300
    assert sorted(set(names)) == sorted(names)


@every
def test_bytes(case):
    look(case.content, case)


@pytest.mark.parametrize("case", ROWS[::3], ids=lambda case: case.name)
def test_file(case, tmp_path):
    path = tmp_path / "model.safetensors"  # content decides, whatever the name says
    path.write_bytes(case.content)
    before = open_descriptors()
    look(path, case, path)
    assert open_descriptors() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def scanned(content):
    """Names found in the order of finding, and the error that ended it."""
    found = []
    try:
        for finding in scan_source(BytesSource(content)):
            found.append((finding.module, finding.name))
    except (FormatError, LimitExceeded) as error:
        return found, error
    return found, None


@every
def test_scan(case):
    modules = set(sys.modules)
    with watched() as seen:
        found, error = scanned(case.content)
    assert seen == []
    assert set(sys.modules) == modules
    if case.error is None:
        assert error is None
    assert case.flagged <= set(found) or (error is not None and case.error is not None)
    if error is None:
        assert case.flagged == foreign(found)


HIDDEN = [
    (
        "behind a wrong checksum",
        archive([Member("a/data.pkl", pickled(EVIL), central={"crc": 1}, local={"crc": 1})]),
    ),
    (
        "in a member of another name",
        archive([*members(), Member("archive/extra.bin", pickled(EVIL))]),
    ),
    (
        "in a second pickle of one member",
        archive([Member("a/data.pkl", pickled(GOOD) + pickled(EVIL))]),
    ),
    ("before an opcode that does not exist", pickled(EVIL + b"\xff")),
    ("before the end of a file that is cut off", pickled(EVIL)[:-1]),
    ("before a bad opcode in the fourth pickle", legacy(EVIL + b"\xff")),
    (
        "in a fourth pickle without PROTO",
        b"".join(
            [pickled(num(MAGIC)), pickled(num(1001)), pickled(EMPTY_DICT), pickled(EVIL, None)]
        ),
    ),
    (
        "behind a member that cannot be unpacked",
        archive(
            [
                Member("a/x", b"no", local={"method": 8}, central={"method": 8}),
                Member("a/data.pkl", pickled(EVIL)),
            ]
        ),
    ),
]


@pytest.mark.parametrize("content", [c for _, c in HIDDEN], ids=[n for n, _ in HIDDEN])
def test_scan_is_never_silent_about_code(content):
    found, error = scanned(content)
    assert SYSTEM in found or error is not None


@pytest.mark.parametrize("length", [0x28, 0x63, 0x4C, 0x5D, 0x7D, 0x69, 0x80, 0x280])
def test_scan_does_not_take_a_safetensors_file_for_a_pickle(length):
    content = length.to_bytes(8, "little") + b"{}".ljust(length)
    assert len(weighlock.open(content)) == 0
    assert scanned(content) == ([], None)


def test_scan_tells_where(tmp_path):
    body = pickled(beside(EVIL))
    content = archive([Member("a/data.pkl", body), Member("a/data/0", FLOATS)])
    (found,) = [f for f in scan_source(BytesSource(content)) if not f.known]
    assert (found.place, found.offset) == ("a/data.pkl", body.index(b"cos\n"))


def test_expanded_view_of_2_to_the_35_opens_and_reads_a_slice():
    with weighlock.open(checkpoint(table(("w", tensor((2**35,), (0,)))))) as catalog:
        assert catalog["w"].shape == (2**35,)
        assert catalog["w"].nbytes == 2**37
        assert catalog["w"][2**34 : 2**34 + 2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda ref: ref.load(),
        lambda ref: ref.torch(),
        lambda ref: np.asarray(ref),
        lambda ref: next(ref.pieces()),
        lambda ref: ref[: 2**39],
        lambda ref: CastRef.of(ref, DType.F16).load(),
        lambda ref: AdjustedRef(ref, neg=True).load(),
    ],
    ids=["load", "torch", "numpy", "pieces", "part", "cast", "adjusted"],
)
def test_a_tensor_is_not_made_large_by_repeating_its_elements(read):
    content = checkpoint(table(("w", tensor((2**40,), (0,)))))
    with weighlock.open(content) as catalog, pytest.raises(LimitExceeded) as caught:
        read(catalog["w"])
    error = caught.value
    assert (error.limit, error.allowed) == ("expanded_bytes", Limits().expanded_bytes)
    assert error.asked >= 2**41
    assert "'w'" in str(error)


def test_how_much_may_be_repeated_is_told_when_it_is_opened():
    content = checkpoint(table(("w", tensor((1000,), (0,)))))
    with weighlock.open(content) as catalog:
        assert catalog["w"].load().tolist() == [1.0] * 1000
    with weighlock.open(content, limits=Limits(expanded_bytes=3999)) as catalog:
        assert catalog["w"][:999].tolist() == [1.0] * 999
        with pytest.raises(LimitExceeded, match="4,000 asked, 3,999 allowed"):
            catalog["w"].load()
        renamed = catalog.rename(lambda name: f"a.{name}")
        with pytest.raises(LimitExceeded, match="4,000 asked, 3,999 allowed"):
            pickle.loads(pickle.dumps(renamed["a.w"])).load()


def test_a_wrong_checksum_of_a_storage_is_found_by_check():
    with weighlock.open(wrong_crc("data/0")) as catalog, pytest.raises(FormatError, match="data/0"):
        catalog.check()


def test_70_000_members():
    storages = {str(n): b"" for n in range(70_000)} | {"0": FLOATS}
    content = checkpoint(storages=storages, wide={})
    with weighlock.open(content) as catalog:
        assert catalog["w"].load().tolist() == ONE_TO_FOUR["w"]
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(content, limits=Limits(tensors=1000))
    assert caught.value.limit == "tensors"


# Bombs: each in a process of its own, so that one that goes off fails its test and nothing else.

OPEN = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
import weighlock
from weighlock.errors import FormatError, LimitExceeded
from weighlock.formats.scanning import scan_source
from weighlock.sources.local import FileSource
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
with weighlock.open(sys.argv[1]) as catalog:
    catalog["w"].load()
before = peak()
try:
    with weighlock.open(sys.argv[2]) as catalog:
        told = {"error": None, "tensors": len(catalog)}
except (FormatError, LimitExceeded) as error:
    told = {"error": type(error).__name__, "length": len(str(error))}
told["grown"] = peak() - before
try:
    source = FileSource(sys.argv[2])
    told["scanned"] = len(list(scan_source(source)))
    source.close()
except (FormatError, LimitExceeded) as error:
    told["scanned"] = type(error).__name__
print(json.dumps(told))
"""


def doubled(bottom, levels=60):
    """Lists of the same list twice."""
    out = bottom + put(0)
    for level in range(levels):
        out += POP + row(get(level) * 2) + put(level + 1)
    return out


def colliding_tuples(bits=16, count=40_000, *, first=b"", into=EMPTY_DICT):
    """Keys that differ and share one hash: -1 and -2 do."""
    keys = itertools.islice(itertools.product(b"\1\2", repeat=bits), count)
    parts = [first + b"".join(b"h" + bytes([k]) for k in key) for key in keys]
    pairs = b"".join(MARK + part + TUPLE + NONE for part in parts)
    return num(-1) + put(1) + POP + num(-2) + put(2) + POP + into + MARK + pairs + SETITEMS


def wide_key(levels=6, width=100):
    """A tuple that holds another a hundred times, and so on, as a key."""
    out = tup(num(1) * width) + put(1)
    for level in range(1, levels):
        out += POP + tup(get(level) * width) + put(level + 1)
    return out + POP + EMPTY_DICT + get(levels) + NONE + SETITEM


def dead_ends(rungs=13, times=1000):
    """A ladder down to one node that leads back to its top, and is reached without it, too."""
    nodes = [EMPTY_LIST + put(n) + POP for n in range(rungs + 1)]
    steps = [get(n) + MARK + get(n + 1) * 2 + APPENDS + POP for n in range(rungs)]
    last = get(rungs) + MARK + tensor() + get(0) * times + APPENDS + POP
    return b"".join([*nodes, *steps, last]) + row(get(0), get(rungs) * times)


LONG = text("x" * 1_000_000) + put(1) + POP
CLASS = glob("m", "C" * 1_000_000) + put(1) + POP


def objects(data):
    """An array of objects whose data are given as opcodes."""
    made = call(glob("numpy._core.multiarray", "_reconstruct"), glob("numpy", "ndarray"), ints(0))
    return made + tup(num(1), ints(1), NONE, FALSE, data) + BUILD


COLLIDING = b"".join(num(k * (2**61 - 1)) + NONE for k in range(1, 60_000))
BYTEARRAY = glob("builtins", "bytearray") + put(2) + POP
LATIN = text("latin1") + put(2) + POP + glob("_codecs", "encode") + put(3) + POP
SAME = b"".join(glob("m", "K") + EMPTY_TUPLE + REDUCE + get(9) for _ in range(60_000))
AGAIN = b"".join(text("a") + get(9) for _ in range(60_000))

# Name, pickle, whether it opens (None: either way).
BOMBS = [
    ("b09 tuples", lambda: NONE + TUPLE1 * 200_000, False),
    ("b09 pairs", lambda: NONE * 200_000 + TUPLE2 * 199_999, False),
    ("b10 lists", lambda: EMPTY_LIST * 200_000 + APPEND * 199_999, False),
    ("b10 dicts", lambda: (EMPTY_DICT + NONE) * 200_000 + NONE + SETITEM * 200_000, False),
    ("b10 calls", lambda: glob("m", "C") * 200_000 + NONE + (TUPLE1 + REDUCE) * 200_000, False),
    ("b10 states", lambda: ORDERED * 100_000 + NONE + BUILD * 100_000, None),
    ("b10 sets", lambda: MARK * 200_000 + NONE + b"\x91" * 200_000, False),
    ("b10 lists by marks", lambda: MARK * 200_000 + LIST * 200_000, False),
    ("b10 marks that are never used", lambda: MARK * 200_000 + GOOD, True),
    ("b10 a deep key", lambda: EMPTY_DICT + NONE + TUPLE1 * 200_000 + NONE + SETITEM, False),
    ("b10 a deep size", lambda: tensor(NONE + TUPLE1 * 200_000), False),
    ("b10 a deep persistent id", lambda: NONE + BINPERSID * 200_000, False),
    (
        "b10 deep Parameters",
        lambda: (
            glob("torch.nn.parameter", "Parameter") * 100_000
            + tensor()
            + (TUPLE1 + REDUCE) * 100_000
        ),
        False,
    ),
    (
        "b10 deep bytearrays",
        lambda: BYTEARRAY + array(ints(1), get(2) * 5000 + b"C\x04abcd" + (TUPLE1 + REDUCE) * 5000),
        None,
    ),
    (
        "b10 bytearrays as deep as allowed",
        lambda: BYTEARRAY + beside(get(2) * 900 + b"C\x04abcd" + (TUPLE1 + REDUCE) * 900),
        None,
    ),
    ("b11 doubled without a tensor", lambda: doubled(NONE), True),
    ("b11 doubled over a tensor", lambda: doubled(tensor()), False),
    ("b11 doubled tuples as a key", lambda: wide_key(), None),
    ("b11 loops with dead ends", dead_ends, None),
    ("b14 2,000,000 DUPs", lambda: NONE + DUP * 2_000_000 + GOOD, True),
    ("b14 DUP and POP", lambda: NONE + (DUP + POP) * 1_000_000 + GOOD, True),
    ("b14 MARK and POP_MARK", lambda: (MARK + POP_MARK) * 500_000 + GOOD, True),
    ("b20 colliding ints as keys", lambda: EMPTY_DICT + MARK + COLLIDING + SETITEMS, True),
    (
        "b20 colliding ints as keys of an object",
        lambda: ORDERED + MARK + COLLIDING + SETITEMS,
        None,
    ),
    ("b20 colliding tuples as keys", colliding_tuples, True),
    ("b20 colliding tuples with a text", lambda: colliding_tuples(first=text("x")), True),
    ("b20 colliding tuples of an object", lambda: colliding_tuples(into=ORDERED), True),
    (
        "b20 many keys of one name",
        lambda: tensor() + put(9) + POP + EMPTY_DICT + MARK + SAME + SETITEMS,
        None,
    ),
    (
        "b20 one key many times",
        lambda: tensor() + put(9) + POP + ORDERED + MARK + AGAIN + SETITEMS,
        None,
    ),
    (
        "b20 names deeper than wide",
        lambda: (
            EMPTY_LIST * 900
            + MARK
            + tensor()
            + put(9)
            + POP
            + get(9) * 200_000
            + APPENDS
            + APPEND * 899
        ),
        None,
    ),
    (
        "b20 long names",
        lambda: (
            LONG
            + tensor()
            + put(10)
            + b"".join(
                POP + row((EMPTY_DICT + get(1) + get(9 + n) + SETITEM) * 2) + put(10 + n)
                for n in range(1, 12)
            )
        ),
        False,
    ),
    (
        "b21 one text encoded 4,000 times",
        lambda: LONG + LATIN + row((get(3) + get(1) + get(2) + TUPLE2 + REDUCE) * 4000),
        None,
    ),
    (
        "b21 one text 4,000 times in a path",
        lambda: LONG + call(glob("pathlib", "PosixPath"), get(1) * 4000),
        None,
    ),
    (
        "b22 one long class of many objects",
        lambda: CLASS + row((get(1) + EMPTY_TUPLE + REDUCE) * 4000),
        False,
    ),
    (
        "b22 a class as long as it may be, of very many objects",
        lambda: (
            glob("m", "C" * 990) + put(1) + POP + row((get(1) + EMPTY_TUPLE + REDUCE) * 200_000)
        ),
        True,
    ),
    (
        "b22 one long class as many keys",
        lambda: CLASS + row((EMPTY_DICT + get(1) + NONE + SETITEM) * 4000),
        False,
    ),
    (
        "b22 names without end",
        lambda: row(*(glob("m", f"{n:x}") for n in range(1_000_000))),
        None,
    ),
    (
        "b21 one text 4,000 times as a device",
        lambda: LONG + row(call(glob("torch", "device"), text("a"), get(1)) * 4000),
        None,
    ),
    (
        "b21 one tuple of very many arguments",
        lambda: (
            tup(NONE * 200_000)
            + put(1)
            + POP
            + row((glob("pathlib", "PosixPath") + get(1) + REDUCE) * 4000)
        ),
        None,
    ),
    (
        "b21 one list of objects in many arrays",
        lambda: row(NONE * 200_000) + put(5) + POP + row(objects(get(5)) * 4000),
        None,
    ),
    (
        "b21 one dict of attributes of many tensors",
        lambda: (
            table(*((f"a{n}", NONE) for n in range(50_000)))
            + put(5)
            + POP
            + row(
                call(
                    glob("torch._tensor", "_rebuild_from_type_v2"),
                    glob("torch._utils", "_rebuild_parameter_with_state"),
                    glob("m", "T"),
                    tup(tensor(), FALSE, ORDERED, get(5)),
                    NONE,
                )
                * 4000
            )
        ),
        None,
    ),
    (
        "b21 one list of scales of many tensors",
        lambda: (
            row(b"G" + bytes(8) + (b"G" + bytes(8)) * 99_999)
            + put(5)
            + POP
            + row(
                call(
                    glob("torch._utils", "_rebuild_qtensor"),
                    storage("QInt8Storage", "0", 100_000),
                    num(0),
                    ints(100_000),
                    ints(1),
                    tup(glob("torch", "per_channel_affine"), get(5), get(5), num(0)),
                    FALSE,
                    NONE,
                )
                * 4000
            )
        ),
        None,
    ),
    (
        "b21 a list of tensors in many places",
        lambda: (
            tensor()
            + put(0)
            + POP
            + row(get(0) * 60_000)
            + put(1)
            + POP
            + EMPTY_DICT
            + MARK
            + b"".join(num(n) + get(1) for n in range(60_000))
            + SETITEMS
        ),
        False,
    ),
    (
        "c06 600,000 dimensions",
        lambda: (
            num(2**31 - 1)
            + put(1)
            + POP
            + table(("w", tensor(MARK + get(1) * 600_000 + TUPLE, MARK + get(1) * 600_000 + TUPLE)))
        ),
        False,
    ),
    (
        "c20 an array of 600,000 dimensions",
        lambda: num(2**31 - 1) + put(1) + POP + array(MARK + get(1) * 600_000 + TUPLE, b"C\0"),
        False,
    ),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("make", "good"), [b[1:] for b in BOMBS], ids=[b[0] for b in BOMBS])
def test_bomb(make, good, tmp_path, run_python):
    (tmp_path / "good.pt").write_bytes(checkpoint())
    content = checkpoint(make())
    (tmp_path / "bomb.pt").write_bytes(content)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    result = run_python(
        OPEN, tmp_path / "good.pt", tmp_path / "bomb.pt", env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    told = json.loads(result.stdout)
    assert good is None or (told["error"] is None) == good, told
    assert told.get("length", 0) < 20_000, told
    assert told["grown"] < 64 + 100 * len(content) / 2**20, told


CODECS = """
import sys
import weighlock
from weighlock.errors import FormatError
with weighlock.open(sys.argv[1]) as catalog:
    catalog["w"].load()
before = set(sys.modules)
try:
    weighlock.open(sys.argv[2]).close()
except FormatError:
    pass
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("name", ["b23 an escape beyond Unicode", "d28 a name that is not UTF-8"])
def test_no_codec_is_imported_for_what_a_file_says(name, tmp_path, run_python):
    (case,) = [case for case in ROWS if case.name == name]
    (tmp_path / "good.pt").write_bytes(checkpoint())
    (tmp_path / "odd.pt").write_bytes(case.content)
    result = run_python(CODECS, tmp_path / "good.pt", tmp_path / "odd.pt")
    assert result.stdout.split() == []


def test_deflated_storage_is_not_unpacked_on_opening():
    body = table(("w", tensor((len(BOMB) // 4,), on=storage(count=len(BOMB) // 4))))
    found = [Member(m.name, m.data, deflate=True) for m in members(body, {"0": BOMB})]
    content = archive(found)
    assert len(content) < 100_000
    with weighlock.open(content) as catalog:
        assert catalog["w"].nbytes == len(BOMB)
        assert not catalog["w"][:10].any()


def test_what_claims_to_be_packed_into_more_than_it_is_is_not_read():
    """Behind a URL such a claim costs nothing, and in a file with holes next to nothing."""
    found = members()
    for member in found:
        if member.name.endswith("byteorder"):
            member.data, member.deflate = bytes(1 << 20), False
            told = {"method": 8, "size": 6, "stored": 1 << 20}
            member.local = member.central = told
    with pytest.raises(LayoutError, match="packs 6 bytes into 1,048,576"):
        weighlock.open(archive(found))


def test_a_deflated_storage_that_ends_early_is_an_error_of_ours():
    found = members(table(("w", tensor((10_000,), on=storage(count=10_000)))), {})
    short = {"size": 40_000, "crc": zlib.crc32(FLOATS)}
    found.append(Member("archive/data/0", FLOATS, deflate=True, local=short, central=short))
    with weighlock.open(archive(found)) as catalog, pytest.raises(FormatError, match="16 bytes"):
        catalog["w"].load()


def test_the_good_file_before_1_6_is_the_one_torch_reads():
    assert weighlock.open(legacy(OLD))["w"].load().tolist() == ONE_TO_FOUR["w"]
