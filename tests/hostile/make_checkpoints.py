"""Builders of hostile checkpoints: pickles from opcodes, archives that lie, old streams.

A recipe says only what is wrong with its file; everything it leaves out is right. Nothing made here
is ever run.
"""

import struct
import zlib
from dataclasses import dataclass, field

MAGIC = 0x1950A86A20F9469CFC6C
FLOATS = struct.pack("<4f", 1, 2, 3, 4)
"""The storage every recipe has unless it says otherwise."""

# Opcodes by the names pickletools gives them.
MARK, STOP, POP, POP_MARK, DUP = b"(", b".", b"0", b"1", b"2"
TUPLE, TUPLE1, TUPLE2, TUPLE3, EMPTY_TUPLE = b"t", b"\x85", b"\x86", b"\x87", b")"
LIST, EMPTY_LIST, APPEND, APPENDS = b"l", b"]", b"a", b"e"
DICT, EMPTY_DICT, SETITEM, SETITEMS = b"d", b"}", b"s", b"u"
EMPTY_SET, ADDITEMS, FROZENSET = b"\x8f", b"\x90", b"\x91"
REDUCE, BUILD, NEWOBJ, NEWOBJ_EX, OBJ = b"R", b"b", b"\x81", b"\x92", b"o"
STACK_GLOBAL, BINPERSID, MEMOIZE = b"\x93", b"Q", b"\x94"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"


def glob(module, name):
    """GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def text(value):
    """BINUNICODE; a lone surrogate passes."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def num(value):
    """An int in the shortest binary form."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + len(raw).to_bytes(4, "little") + raw


def put(index):
    """LONG_BINPUT."""
    return b"r" + index.to_bytes(4, "little")


def get(index):
    """LONG_BINGET."""
    return b"j" + index.to_bytes(4, "little")


def tup(*parts):
    return MARK + b"".join(parts) + TUPLE


def ints(*values):
    return tup(*map(num, values))


def call(func, *args):
    """REDUCE of a function given as opcodes."""
    return func + tup(*args) + REDUCE


def table(*pairs):
    """A dict of text keys (or keys as opcodes) to values as opcodes."""
    raw = [(text(key) if isinstance(key, str) else key) + value for key, value in pairs]
    return EMPTY_DICT + MARK + b"".join(raw) + SETITEMS


def row(*values):
    return EMPTY_LIST + MARK + b"".join(values) + APPENDS


def pickled(body, protocol=2):
    """A whole pickle; without PROTO for protocol None."""
    return (b"" if protocol is None else b"\x80" + bytes([protocol])) + body + STOP


def storage(kind="FloatStorage", key="0", count=4, *more, module="torch"):
    """A persistent id as torch writes it. `key` and `count` may be opcodes."""
    key = text(key) if isinstance(key, str) else key
    count = num(count) if isinstance(count, int) else count
    return tup(text("storage"), glob(module, kind), key, text("cpu"), count, *more) + BINPERSID


ORDERED = glob("collections", "OrderedDict") + EMPTY_TUPLE + REDUCE
REBUILD = glob("torch._utils", "_rebuild_tensor_v2")


def tensor(size=(4,), stride=(1,), offset=0, on=None, *more, hooks=ORDERED):
    """`_rebuild_tensor_v2`. Sizes, strides and offset may be opcodes."""
    size = ints(*size) if isinstance(size, tuple) else size
    stride = ints(*stride) if isinstance(stride, tuple) else stride
    offset = num(offset) if isinstance(offset, int) else offset
    return call(REBUILD, on or storage(), offset, size, stride, FALSE, hooks, *more)


def array(shape, data, code="f4", order="<"):
    """A numpy array with its bytes in the pickle. Shape and data as opcodes."""
    made = call(
        glob("numpy._core.multiarray", "_reconstruct"),
        glob("numpy", "ndarray"),
        ints(0),
        b"C\x01b",
    )
    dtype = call(glob("numpy", "dtype"), text(code), FALSE, TRUE)
    dtype += tup(num(3), text(order), NONE, NONE, NONE, num(-1), num(-1), num(0)) + BUILD
    return made + tup(num(1), shape, dtype, FALSE, data) + BUILD


GOOD = table(("w", tensor()))
"""A state dict of one tensor of four floats."""


def beside(extra, key="x"):
    """A good tensor `w`, and something else in the same dict."""
    return table(("w", tensor()), (key, extra))


@dataclass
class Member:
    """A member of an archive; `local` and `central` change what either header says of it."""

    name: str
    data: bytes = b""
    deflate: bool = False
    local: dict = field(default_factory=dict)
    central: dict = field(default_factory=dict)

    def body(self):
        if not self.deflate:
            return self.data
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return packer.compress(self.data) + packer.flush()

    def facts(self, changes):
        known = {
            "name": self.name.encode(),
            "flags": 0x800,
            "method": 8 if self.deflate else 0,
            "crc": zlib.crc32(self.data),
            "stored": len(self.body()),
            "size": len(self.data),
            "extra": b"",
        }
        return known | changes


def _local(member):
    f = member.facts(member.local)
    numbers = (20, f["flags"], f["method"], 0, 0, f["crc"], f["stored"], f["size"])
    names = (len(f["name"]), len(f["extra"]))
    return struct.pack("<4s5H3I2H", b"PK\3\4", *numbers, *names) + f["name"] + f["extra"]


def _central(member, header):
    f = member.facts({"header": header, "disk": 0} | member.central)
    numbers = (20, 20, f["flags"], f["method"], 0, 0, f["crc"], f["stored"], f["size"])
    names = (len(f["name"]), len(f["extra"]), 0, f["disk"], 0, 0, f["header"])
    return struct.pack("<4s6H3I5H2I", b"PK\1\2", *numbers, *names) + f["name"] + f["extra"]


def archive(members, *, prefix=b"", suffix=b"", comment=b"", wide=None, **end):
    """A ZIP archive. `end` changes its end record, `wide` that of 64 bits, which it then has."""
    out = bytearray(prefix)
    entries = []
    for member in members:
        entries.append(_central(member, len(out)))
        out += _local(member) + member.body()
    directory = b"".join(entries)
    count = len(members)
    known = {"disk": 0, "here": count, "count": count, "size": len(directory), "offset": len(out)}
    start = len(out)
    out += directory
    if wide is not None:
        w = {**known, "size": len(directory), "offset": start, "place": len(out), "disks": 1}
        w = {**w, "signature": b"PK\6\6"} | wide
        numbers = (44, 45, 45, w["disk"], w["disk"], w["here"], w["count"], w["size"], w["offset"])
        out += struct.pack("<4sQHHIIQQQQ", w["signature"], *numbers)
        out += struct.pack("<4sIQI", b"PK\6\7", 0, w["place"], w["disks"])
    narrow = {key: min(known[key], 0xFFFF) for key in ("here", "count")}
    e = known | narrow | end
    numbers = (e["disk"], 0, e["here"], e["count"], e["size"], e["offset"], len(comment))
    return bytes(out) + struct.pack("<4s4H2IH", b"PK\5\6", *numbers) + comment + suffix


def members(body=GOOD, storages=None, protocol=2):
    """The members of a checkpoint, in the order torch writes them."""
    storages = {"0": FLOATS} if storages is None else storages
    return [
        Member("archive/data.pkl", pickled(body, protocol)),
        Member("archive/byteorder", b"little"),
        *(Member(f"archive/data/{key}", raw) for key, raw in storages.items()),
        Member("archive/version", b"3\n"),
    ]


def checkpoint(body=GOOD, storages=None, protocol=2, **options):
    """A ZIP checkpoint."""
    return archive(members(body, storages, protocol), **options)


def changed(name, **changes):
    """A good checkpoint whose member of that name has other fields."""
    found = members()
    for member in found:
        if member.name == f"archive/{name}":
            for key, value in changes.items():
                setattr(member, key, value)
    return archive(found)


OLD = table(("w", tensor(on=storage("FloatStorage", "0", 4, NONE))))
"""The same in a file from before 1.6, whose ids have one item more."""


def legacy(
    body=OLD,
    storages=(("0", 4, FLOATS),),
    *,
    keys=None,
    magic=None,
    version=None,
    system=None,
    protocol=2,
):
    """A checkpoint from before 1.6; storages as (key, count, bytes)."""
    keys = [key for key, _, _ in storages] if keys is None else keys
    listed = row(*map(text, keys)) if isinstance(keys, list) else keys
    out = pickled(num(MAGIC), protocol) if magic is None else magic
    out += pickled(num(1001), protocol) if version is None else version
    out += pickled(table(("little_endian", TRUE)), protocol) if system is None else system
    out += pickled(body, protocol) + pickled(listed, protocol)
    for _, count, raw in storages:
        out += count.to_bytes(8, "little") + raw
    return out
