"""Recipes for hostile files: each row is bytes, the error it must raise, and what the error says.

Nothing here is downloaded, and nothing in it would do anything even if it were run. Row names start
with the number of the scenario in the reliability notes (B1 …) or of the format notes (g01 …).
"""

import gzip
import json
from dataclasses import dataclass

from weighlock.errors import (
    FormatError,
    HeaderError,
    LayoutError,
    LimitExceeded,
    TruncatedFile,
    UnsupportedDType,
)

__all__ = ["ROWS", "Row", "entry", "file_bytes", "four_floats"]


def file_bytes(header, data=b""):
    """A file with that header (text, bytes, or something JSON can say) and a right length."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    raw = header if isinstance(header, bytes) else header.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    """What a header says about one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def four_floats(name="t"):
    """A small valid file."""
    return file_bytes({name: entry(shape=(4,), offsets=(0, 16))}, bytes(range(16)))


@dataclass(frozen=True)
class Row:
    name: str
    content: bytes
    error: type[Exception] | tuple[type[Exception], ...]
    says: tuple[str, ...]
    """Fragments of the message: the tensor and the numbers."""


def _length(claimed, rest=b"{}"):
    return claimed.to_bytes(8, "little") + rest


HEADER_LENGTHS = [
    Row("B1 a file of 1 byte", b"\x08", TruncatedFile, ("1 bytes",)),
    Row("B1 a file of 7 bytes", b"\x02" + b"\0" * 6, TruncatedFile, ("7 bytes",)),
    Row("B1 length 0", _length(0), HeaderError, ("0 bytes",)),
    Row("B1 length 0 and nothing else", _length(0, b""), HeaderError, ("0 bytes",)),
    Row("B1 length 1", _length(1), HeaderError, ("1 bytes",)),
    Row("g02 length beyond the end", _length(3), HeaderError, ("3 bytes", "has 2")),
    Row("g02 length and no header", _length(2, b""), HeaderError, ("2 bytes", "has 0")),
    Row(
        "g01 length beyond the limit",
        _length(100_000_001),
        HeaderError,
        ("100,000,001", "100,000,000"),
    ),
    Row(
        "B1 length at the limit, beyond the end",
        _length(100_000_000),
        HeaderError,
        ("100,000,000", "has 2"),
    ),
    Row("B1 length 2**63", _length(2**63), HeaderError, (f"{2**63:,}",)),
    Row("B1 length 2**64 - 1", _length(2**64 - 1), HeaderError, (f"{2**64 - 1:,}",)),
    Row("B1 length 2**64 - 8 wraps to 0", _length(2**64 - 8), HeaderError, (f"{2**64 - 8:,}",)),
]


def _one(text, data=b"\0\0\0\0"):
    """A file whose only tensor is described by this JSON."""
    return file_bytes('{"t":' + text + "}", data)


def _shape(text, offsets="[0,4]", data=b"\0\0\0\0"):
    return _one(f'{{"dtype":"F32","shape":{text},"data_offsets":{offsets}}}', data)


_A = entry(offsets=(0, 4))

LAYOUTS = [
    Row(
        "g03 hole",
        file_bytes({"a": _A, "b": entry(offsets=(8, 12))}, bytes(12)),
        LayoutError,
        ("'b'", "starts at 8", "hole", "'a'", "ends at 4"),
    ),
    Row(
        "g03 hole at the start",
        file_bytes({"a": entry(offsets=(4, 8))}, bytes(8)),
        LayoutError,
        ("'a'", "starts at 4", "hole"),
    ),
    Row(
        "g04 overlap",
        file_bytes({"a": _A, "b": entry(offsets=(2, 6))}, bytes(6)),
        LayoutError,
        ("'b'", "starts at 2", "overlaps", "'a'", "ends at 4"),
    ),
    Row(
        "g04 overlap with a tensor that is not its neighbour in the header",
        file_bytes({"b": entry(offsets=(6, 10)), "c": _A, "a": entry(offsets=(4, 8))}, bytes(10)),
        LayoutError,
        ("'b'", "starts at 6", "overlaps", "'a'", "ends at 8"),
    ),
    Row(
        "g05 shared bytes",
        file_bytes({"a": _A, "b": _A}, bytes(4)),
        LayoutError,
        ("'b'", "starts at 0", "overlaps", "'a'", "ends at 4"),
    ),
    Row(
        "B2 an empty tensor inside another",
        file_bytes({"a": _A, "b": entry(shape=(0,), offsets=(2, 2))}, bytes(4)),
        LayoutError,
        ("'b'", "starts at 2", "overlaps", "'a'", "ends at 4"),
    ),
    Row(
        "g06 trailing bytes",
        file_bytes({"a": _A}, bytes(5)),
        LayoutError,
        ("end at byte 4", "has 5"),
    ),
    Row("g06 trailing bytes and no tensor", file_bytes("{}", b"\0"), LayoutError, ("has 1",)),
    Row(
        "g07 short",
        file_bytes({"a": _A}, bytes(3)),
        (LayoutError, TruncatedFile),
        ("'a'", "0 to 4", "3 bytes"),
    ),
    Row(
        "g07 data missing altogether",
        file_bytes({"a": _A}),
        (LayoutError, TruncatedFile),
        ("'a'", "0 to 4", "0 bytes"),
    ),
    Row(
        "g09 shape larger than the span",
        file_bytes({"a": entry(shape=(2,))}, bytes(4)),
        LayoutError,
        ("'a'", "F32", "[2]", "8 bytes", "has 4"),
    ),
    Row(
        "g09 shape smaller than the span",
        file_bytes({"a": entry("U8", (3,))}, bytes(4)),
        LayoutError,
        ("'a'", "U8", "[3]", "3 bytes", "has 4"),
    ),
    Row(
        "g09 empty shape on bytes",
        file_bytes({"a": entry(shape=(0,))}, bytes(4)),
        LayoutError,
        ("'a'", "0 bytes", "has 4"),
    ),
    Row(
        "g10 product beyond 64 bits",
        file_bytes({"a": entry(shape=(2**32, 2**32))}, bytes(4)),
        LayoutError,
        ("'a'", str(2**32)),
    ),
    Row(
        "g10 product that wraps to 0",
        file_bytes({"a": entry(shape=(2**62, 4), offsets=(0, 0))}),
        LayoutError,
        ("'a'", str(2**62)),
    ),
    Row(
        "g10 product that wraps to the span",
        file_bytes({"a": entry(shape=(2**62 + 1,))}, bytes(4)),
        LayoutError,
        ("'a'", str(2**62 + 1)),
    ),
    Row(
        "g10 product beyond 64 bits, times 0",  # numpy cannot make such an array either
        file_bytes({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}),
        LayoutError,
        ("'a'", str(2**40)),
    ),
    Row(
        "g10 0 times a product beyond 64 bits",
        file_bytes({"a": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}),
        LayoutError,
        ("'a'", str(2**40)),
    ),
    Row(
        "B2 a size beyond 64 bits",
        _shape(f"[{2**64}]"),
        LayoutError,
        ("'t'", str(2**64)),
    ),
    Row(
        "B2 an offset beyond 64 bits",
        _shape("[1]", f"[{2**64},{2**64 + 4}]"),
        LayoutError,
        ("'t'", f"{2**64:,}", "4 bytes"),
    ),
    Row("g11 negative size", _shape("[-1]"), LayoutError, ("'t'", "negative", "-1")),
    Row("g11 two negative sizes", _shape("[-1,-1]"), LayoutError, ("'t'", "negative", "-1")),
    Row("g11 minus zero", _shape("[-0]", "[0,0]", b""), (LayoutError, HeaderError), ()),
    Row("g11 minus zero as offset", _shape("[1]", "[-0,4]"), (LayoutError, HeaderError), ()),
    Row("g11 negative offset", _shape("[1]", "[-4,0]"), LayoutError, ("'t'", "-4 to 0")),
    Row("B2 end before begin", _shape("[1]", "[4,0]"), LayoutError, ("'t'", "4 to 0", "4 bytes")),
    Row("g15 true as size", _shape("[true]"), LayoutError, ("'t'", "shape")),
    Row("g15 true as offset", _shape("[1]", "[false,4]"), LayoutError, ("'t'", "data_offsets")),
    Row("g16 float as size", _shape("[1.0]"), LayoutError, ("'t'", "shape")),
    Row("g16 float as offset", _shape("[1]", "[0.0,4]"), LayoutError, ("'t'", "data_offsets")),
    Row("B2 exponent as size", _shape("[1e0]"), LayoutError, ("'t'", "shape")),
    Row("B2 exponent as offset", _shape("[1]", "[0,4e0]"), LayoutError, ("'t'", "data_offsets")),
    Row("B2 text as size", _shape('["1"]'), LayoutError, ("'t'", "shape")),
    Row("B2 null as size", _shape("[null]"), LayoutError, ("'t'", "shape")),
    Row("B2 list as size", _shape("[[1]]"), LayoutError, ("'t'", "shape")),
    Row("B2 shape is a number", _shape("1"), LayoutError, ("'t'", "shape")),
    Row("B2 shape is null", _shape("null"), LayoutError, ("'t'", "shape")),
    Row("B2 shape is an object", _shape("{}"), LayoutError, ("'t'", "shape")),
    Row("B2 one offset", _shape("[1]", "[0]"), LayoutError, ("'t'", "1 numbers")),
    Row("B2 three offsets", _shape("[1]", "[0,4,4]"), LayoutError, ("'t'", "3 numbers")),
    Row("B2 no offsets", _shape("[1]", "[]"), LayoutError, ("'t'", "0 numbers")),
    Row("B2 offsets are null", _shape("[1]", "null"), LayoutError, ("'t'", "data_offsets")),
    Row("B2 65 dimensions", _shape(str([1] * 65)), (LayoutError, LimitExceeded), ("'t'", "65")),
    Row(
        "B2 a thousand dimensions",
        _shape(str([1] * 1000)),
        (LayoutError, LimitExceeded),
        ("'t'", "1000"),
    ),
    Row(
        "B2 a thousand dimensions, the last one negative",
        _shape(str([1] * 1000 + [-1])),
        (LayoutError, LimitExceeded),
        ("'t'",),
    ),
]


def _ignored(value, key="x"):
    """A valid file with one more field, which readers must ignore."""
    text = f'{{"dtype":"F32","shape":[1],"data_offsets":[0,4],"{key}":'
    return file_bytes(
        b'{"t":' + text.encode() + (value if isinstance(value, bytes) else value.encode()) + b"}}",
        bytes(4),
    )


def _metadata(value):
    return file_bytes(
        '{"__metadata__":' + value + ',"t":' + json.dumps(_A) + "}",
        bytes(4),
    )


_T = '"t":' + json.dumps(_A)

JSON_TEXT = [
    Row(
        "g08 duplicate tensor",
        file_bytes("{" + _T + "," + _T + "}", bytes(4)),
        HeaderError,
        ("'t'", "twice"),
    ),
    Row(
        "g08 duplicate tensor, once in escapes",
        file_bytes("{" + _T + "," + _T.replace('"t"', '"\\u0074"') + "}", bytes(4)),
        HeaderError,
        ("'t'", "twice"),
    ),
    Row(
        "g08 duplicate tensor, apart",
        file_bytes(
            "{" + _T + ',"u":' + json.dumps(entry(offsets=(4, 8))) + "," + _T + "}", bytes(8)
        ),
        HeaderError,
        ("'t'", "twice"),
    ),
    Row(
        "B3 duplicate field",
        _one('{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}'),
        HeaderError,
        ("'dtype'", "twice"),
    ),
    Row(
        "B3 duplicate field, the first one wrong",
        _one('{"dtype":"F32","shape":[9],"shape":[1],"data_offsets":[0,4]}'),
        HeaderError,
        ("'shape'", "twice"),
    ),
    Row("B3 duplicate ignored key", _ignored('1,"x":2'), HeaderError, ("'x'", "twice")),
    Row("B3 duplicate key, deeper", _ignored('{"y":1,"y":1}'), HeaderError, ("'y'", "twice")),
    Row("B3 duplicate metadata", _metadata('{"a":"1","a":"1"}'), HeaderError, ("'a'", "twice")),
    Row(
        "B3 metadata twice",
        _metadata('{},"__metadata__":{}'),
        HeaderError,
        ("'__metadata__'", "twice"),
    ),
    Row(
        "B3 metadata twice, once null",
        _metadata('null,"__metadata__":null'),
        HeaderError,
        ("'__metadata__'", "twice"),
    ),
    Row("g12 metadata is a number", _metadata("1"), HeaderError, ("__metadata__",)),
    Row("g12 metadata is a list", _metadata("[]"), HeaderError, ("__metadata__",)),
    Row("g12 metadata is false", _metadata("false"), HeaderError, ("__metadata__",)),
    Row("g12 metadata holds a number", _metadata('{"a":1}'), HeaderError, ("__metadata__",)),
    Row("g12 metadata holds null", _metadata('{"a":null}'), HeaderError, ("__metadata__",)),
    Row("g12 metadata holds an object", _metadata('{"a":{}}'), HeaderError, ("__metadata__",)),
    Row(
        "g12 metadata is a tensor",
        file_bytes({"__metadata__": _A}, bytes(4)),
        HeaderError,
        ("__metadata__",),
    ),
    Row("g13 100,000 lists deep", _ignored("[" * 10**5 + "]" * 10**5), HeaderError, ()),
    Row("g13 30,000 lists deep", _ignored("[" * 30_000 + "]" * 30_000), HeaderError, ("deep",)),
    Row("g13 30,000 objects deep", _ignored('{"x":' * 30_000 + "}" * 30_000), HeaderError, ()),
    Row("g13 60,000 lists never closed", _ignored("[" * 60_000), HeaderError, ()),
    Row("g13 deeper than others read", _ignored("[" * 200 + "]" * 200), HeaderError, ("deep",)),
    Row("g13 deep metadata", _metadata("[" * 30_000 + "]" * 30_000), HeaderError, ()),
    Row("g14 NaN", _ignored("NaN"), HeaderError, ("NaN",)),
    Row("g14 Infinity", _ignored("Infinity"), HeaderError, ("Infinity",)),
    Row("g14 -Infinity", _ignored("-Infinity"), HeaderError, ("-Infinity",)),
    Row("g14 NaN as size", _shape("[NaN]"), HeaderError, ("NaN",)),
    Row("B3 a float beyond any double", _ignored("1e999"), HeaderError, ()),
    Row("B3 an integer beyond any double", _ignored("9" * 400), HeaderError, ()),
    Row("B3 5,000 digits", _ignored("9" * 5000), HeaderError, ()),
    Row("B3 5,000 digits as size", _shape("[" + "9" * 5000 + "]"), (HeaderError, LayoutError), ()),
    Row("B3 4,000 digits as size", _shape("[" + "9" * 4000 + "]"), (HeaderError, LayoutError), ()),
    Row(
        "B3 5,000 digits as offset",
        _shape("[1]", "[0," + "9" * 5000 + "]"),
        (HeaderError, LayoutError),
        (),
    ),
    Row("g17 byte order mark", file_bytes("\ufeff{" + _T + "}", bytes(4)), HeaderError, ("xef",)),
    Row("B3 leading space", file_bytes(" {" + _T + "}", bytes(4)), HeaderError, ("b' '", "b'{'")),
    Row("B3 leading newline", file_bytes("\n{" + _T + "}", bytes(4)), HeaderError, ("b'{'",)),
    Row("B3 a list", file_bytes("[" + _T[4:] + "]", bytes(4)), HeaderError, ("b'['", "b'{'")),
    Row("B3 a number", file_bytes("12", b""), HeaderError, ("b'{'",)),
    Row("B3 null", file_bytes("null", b""), HeaderError, ("b'{'",)),
    Row("B3 padded with NUL", file_bytes("{" + _T + "}\0\0", bytes(4)), HeaderError, ("JSON",)),
    Row("B3 a second document", file_bytes("{" + _T + "}{}", bytes(4)), HeaderError, ("JSON",)),
    Row("B3 trailing comma", file_bytes("{" + _T + ",}", bytes(4)), HeaderError, ("JSON",)),
    Row("B3 comment", file_bytes("{" + _T + "/**/}", bytes(4)), HeaderError, ("JSON",)),
    Row("B3 single quotes", file_bytes("{'t':{}}"), HeaderError, ("JSON",)),
    Row("B3 bare key", file_bytes("{t:{}}"), HeaderError, ("JSON",)),
    Row("B3 cut off", file_bytes("{" + _T, bytes(4)), HeaderError, ("JSON",)),
    Row("B3 only a brace and spaces", file_bytes("{       "), HeaderError, ("JSON",)),
    Row("B3 leading zero", _shape("[01]"), HeaderError, ("JSON",)),
    Row("B3 plus sign", _shape("[+1]"), HeaderError, ("JSON",)),
    Row("B3 hexadecimal", _shape("[0x1]"), HeaderError, ("JSON",)),
    Row("B3 digits of another script", _shape("[\u0661]"), HeaderError, ("JSON",)),
    Row("B3 underscore in a number", _shape("[1_0]"), HeaderError, ("JSON",)),
    Row("B3 a space that JSON has not", file_bytes("{\u00a0" + _T + "}"), HeaderError, ("JSON",)),
    Row("B3 raw newline in a name", file_bytes('{"a\nb":{}}'), HeaderError, ("JSON",)),
    Row("B3 raw NUL in a name", file_bytes('{"a\0b":{}}'), HeaderError, ("JSON",)),
    Row("B3 unknown escape", file_bytes('{"a\\xb":{}}'), HeaderError, ("JSON",)),
    Row("B3 half an escape", file_bytes('{"a\\u12"}'), HeaderError, ("JSON",)),
    Row("B3 bad UTF-8 in a name", file_bytes(b'{"\xff":{}}'), HeaderError, ("UTF-8", "byte 2")),
    Row("B3 overlong UTF-8", file_bytes(b'{"\xc0\x80":{}}'), HeaderError, ("UTF-8", "byte 2")),
    Row("B3 surrogate in UTF-8", file_bytes(b'{"\xed\xa0\x80":{}}'), HeaderError, ("UTF-8",)),
    Row("B3 UTF-8 cut off", file_bytes(b'{"\xe2\x82":{}}'), HeaderError, ("UTF-8",)),
    Row("B3 bad UTF-8 in an ignored field", _ignored(b'"\xff"'), HeaderError, ("UTF-8",)),
    Row(
        "B3 bad UTF-8 in metadata",
        file_bytes(b'{"__metadata__":{"a":"\xff"}}'),
        HeaderError,
        ("UTF-8",),
    ),
    Row(
        "B3 UTF-16",
        file_bytes(("{" + _T + "}").encode("utf-16-le"), bytes(4)),
        HeaderError,
        ("JSON",),
    ),
    Row(
        "B3 lone surrogate in a name",
        file_bytes({"\ud800": _A}, bytes(4)),
        (HeaderError, LayoutError),
        ("surrogate",),
    ),
    Row("B3 lone surrogate in metadata", _metadata('{"a":"\\ud800"}'), HeaderError, ("surrogate",)),
    Row(
        "B3 lone surrogate as metadata key",
        _metadata('{"\\udfff":"a"}'),
        HeaderError,
        ("surrogate",),
    ),
    Row(
        "B3 lone surrogate in an ignored field", _ignored('"\\ud800"'), HeaderError, ("surrogate",)
    ),
    Row(
        "B3 lone surrogate as ignored key",
        _ignored("1", key="\\ud800"),
        HeaderError,
        ("surrogate",),
    ),
    Row(
        "B3 surrogates in the wrong order",
        _metadata('{"a":"\\ude00\\ud83d"}'),
        HeaderError,
        ("surrogate",),
    ),
    Row("B3 no dtype", _one('{"shape":[1],"data_offsets":[0,4]}'), HeaderError, ("'t'", "dtype")),
    Row("B3 no shape", _one('{"dtype":"F32","data_offsets":[0,4]}'), HeaderError, ("'t'", "shape")),
    Row("B3 no offsets", _one('{"dtype":"F32","shape":[1]}'), HeaderError, ("'t'", "data_offsets")),
    Row("B3 an empty entry", _one("{}"), HeaderError, ("'t'",)),
    Row("B3 entry is null", _one("null"), HeaderError, ("'t'",)),
    Row("B3 entry is a number", _one("4"), HeaderError, ("'t'",)),
    Row("B3 entry is a list", _one('["F32",[1],[0,4]]'), HeaderError, ("'t'", "list")),
    Row("B3 entry is text", _one('"F32"'), HeaderError, ("'t'", "str")),
    Row(
        "B3 keys in capitals",
        _one('{"DTYPE":"F32","Shape":[1],"data_offsets":[0,4]}'),
        HeaderError,
        ("'t'", "dtype"),
    ),
]


def _named(name):
    return file_bytes({name: _A}, bytes(4))


NAMES = [
    Row("B5 empty name", _named(""), LayoutError, ("''", "empty")),
    Row("B5 NUL in a name", _named("a\0b"), LayoutError, (r"'a\x00b'", "NUL")),
    Row("B5 name of 1 MB", _named("n" * 1_000_000), (LayoutError, LimitExceeded), ("1,000,000",)),
    Row(
        "B5 name one byte too long",
        _named("é" * 2048 + "n"),
        (LayoutError, LimitExceeded),
        ("4,097", "4,096"),
    ),
]

DTYPES = [
    Row(
        "g19 unknown dtype",
        file_bytes({"t": entry("F31")}, bytes(4)),
        UnsupportedDType,
        ("'t'", "'F31'"),
    ),
    Row(
        "B16 dtype in lower case",
        file_bytes({"t": entry("f32")}, bytes(4)),
        UnsupportedDType,
        ("'t'", "'f32'"),
    ),
    Row(
        "B16 torch's name",
        file_bytes({"t": entry("float32")}, bytes(4)),
        UnsupportedDType,
        ("'t'", "'float32'"),
    ),
    Row(
        "B16 dtype with a space",
        file_bytes({"t": entry("F32 ")}, bytes(4)),
        UnsupportedDType,
        ("'t'", "'F32 '"),
    ),
    Row(
        "B16 empty dtype",
        file_bytes({"t": entry("")}, bytes(4)),
        (UnsupportedDType, HeaderError),
        ("'t'",),
    ),
    Row(
        "B16 dtype of 100,000 letters",
        file_bytes({"t": entry("F" * 10**5)}, bytes(4)),
        UnsupportedDType,
        ("'t'", "FFF"),
    ),
    Row(
        "B16 dtype is a number", file_bytes({"t": entry(32)}, bytes(4)), HeaderError, ("'t'", "32")
    ),
    Row("B16 dtype is null", file_bytes({"t": entry(None)}, bytes(4)), HeaderError, ("'t'",)),
    Row(
        "B16 dtype is an object",
        file_bytes({"t": entry({"F32": None})}, bytes(4)),
        HeaderError,
        ("'t'",),
    ),
    Row(
        "g18 odd number of F4",
        file_bytes({"t": entry("F4", (3,), (0, 2))}, bytes(2)),
        LayoutError,
        ("'t'", "12 bits"),
    ),
    Row(
        "g18 one F4",
        file_bytes({"t": entry("F4", (), (0, 1))}, b"\0"),
        LayoutError,
        ("'t'", "4 bits"),
    ),
    Row(
        "B16 two F6",
        file_bytes({"t": entry("F6_E2M3", (2,), (0, 2))}, bytes(2)),
        LayoutError,
        ("'t'", "12 bits"),
    ),
    Row(
        "B16 F4 counted as bytes",
        file_bytes({"t": entry("F4", (4,), (0, 4))}, bytes(4)),
        LayoutError,
        ("'t'", "2 bytes", "has 4"),
    ),
]

IMPOSTORS = [
    Row("g20 a web page", b"<!DOCTYPE html><html><body>Sign in</body>", FormatError, ("HTML",)),
    Row("g20 a web page after white space", b"\n\n  <html>" + b" " * 600, FormatError, ("HTML",)),
    Row(
        "g20 an XML error of object storage",
        b'<?xml version="1.0"?><Error/>',
        FormatError,
        ("XML",),
    ),
    Row(
        "g21 a Git LFS pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        FormatError,
        ("LFS", "git lfs pull"),
    ),
    Row("g22 an empty file", b"", FormatError, ("empty",)),
    Row("g23 zeros", bytes(4096), FormatError, ("zeros",)),
    Row("g24 gzip", gzip.compress(four_floats(), mtime=0), FormatError, ("gzip",)),
    Row("B10 a ZIP without a directory", b"PK\x03\x04" + bytes(60), FormatError, ()),
    Row("B10 a pickle", b"\x80\x02}q\x00.", FormatError, ("pickle",)),
    Row("B10 a numpy array", b"\x93NUMPY\x01\x00" + bytes(60), FormatError, ("numpy",)),
    Row("B10 GGUF", b"GGUF\x09\0\0\0" + bytes(60), FormatError, ("GGUF",)),
    Row("B10 HDF5", b"\x89HDF\r\n\x1a\n" + bytes(60), FormatError, ("HDF5",)),
    Row("B10 zstd", b"\x28\xb5\x2f\xfd" + bytes(60), FormatError, ("zstd",)),
    Row("B10 bzip2", b"BZh91AY&SY" + bytes(60), FormatError, ("bzip2",)),
    Row("B10 xz", b"\xfd7zXZ\0\0\4" + bytes(60), FormatError, ("xz",)),
    Row("B10 tar", b"name".ljust(257, b"\0") + b"ustar\0" + bytes(249), FormatError, ("tar",)),
]

ROWS = [*HEADER_LENGTHS, *LAYOUTS, *JSON_TEXT, *NAMES, *DTYPES, *IMPOSTORS]
