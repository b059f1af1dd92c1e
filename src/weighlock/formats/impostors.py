"""What people hand over instead of weights, by its first bytes: errors should say what it is.

Knows beginnings and advice. Asked only about what begins as no format that is read.
"""

import codecs
import re
import zlib

__all__ = ["NOT_READ", "impostor_of", "packing_of"]

NOT_READ = "which is not read: save the weights as safetensors where they were made"
_JOBLIB = "decompress it first, or load it with joblib, if that wrote it, and save it with numpy"
_GGML = "an old GGML file, which is not read: convert it to GGUF, with llama.cpp if that reads it"

_BZIP2, _LZMA = b"BZh", b"\x5d\0\0"
_PACKED = (
    (b"\x1f\x8b\x08", "compressed with gzip", ""),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", ""),
    (_BZIP2, "compressed with bzip2", ""),
    (b"\xfd7zXZ", "compressed with xz", ""),
    (_LZMA, "compressed with lzma", _JOBLIB),
    (b"\x04\x22\x4d\x18", "compressed with lz4", ""),
    *((bytes([0x78, level]), "compressed with zlib", _JOBLIB) for level in (1, 0x5E, 0x9C, 0xDA)),
    (b"ZF0x", "compressed by an old joblib", _JOBLIB),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it first"),
)
"""Beginnings, what they show, and what to do if that is more than decompressing it."""

_MAGICS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the weights: run `git lfs pull`"),
    (b"PK\5\6", "a ZIP archive with nothing in it"),
    (b"GGUF", "the beginning of a GGUF file"),
    (b"\x89HDF", f"an HDF5 file, as Keras writes them, {NOT_READ}"),
    # A number of four bytes, mostly the low one first. What replaced them is GGUF.
    *((magic, _GGML) for magic in (b"tjgg", b"fmgg", b"lmgg", b"algg")),
    *((magic, _GGML) for magic in (b"ggjt", b"ggmf", b"ggml", b"ggla")),
)

# What has no magic number, but a beginning of its own all the same.
_SHAPES = (
    # A map whose first key is a text; an array in it is (shape, name of its type, bytes).
    (
        re.compile(
            rb"(?:[\x81-\x8f]|\xde..)[\xa1-\xbf][ -~].*[\xa5-\xa8]b?(?:float|u?int)\d", re.S
        ),
        f"a Flax checkpoint (msgpack), {NOT_READ}",
    ),
    # The version of the format, and the name of the program that wrote it.
    (
        re.compile(rb"\x08[\x03-\x1f]\x12[\x01-\x40][ -~]+[\x1a\x22\x3a]"),
        f"an ONNX file, {NOT_READ}",
    ),
    # An empty key: the number of files, and the version of the format.
    (
        re.compile(rb"\0\0[\x06-\x10]\x08.{1,3}\x1a\x02\x08\x01", re.S),
        f"the index of a TensorFlow checkpoint, {NOT_READ}",
    ),
)


def impostor_of(first: bytes) -> str | None:
    """What a file that begins so is, and what to do with it; None if nobody knows.

    Args:
        first: the first 512 bytes, or all.
    """
    # A safetensors file has its `{` at byte 8: it is never taken for anything else.
    if first[8:9] == b"{":
        return None
    if not first:
        return "empty"
    packing = _packing(first)
    if packing is not None:
        return f"{packing[0]}: {packing[1] or 'decompress it first'}"
    for magic, what in _MAGICS:
        if first.startswith(magic):
            return what
    for shape, what in _SHAPES:
        if shape.match(first):
            return what
    if first[257:262] == b"ustar":
        return "a tar archive whose first header is damaged"
    if not any(first) and len(first) == 512:
        return "all zeros at its start: a download or copy that was cut off?"
    text = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if text[:1] == b"<":
        return "an HTML or XML page, not weights: was a login page downloaded?"
    # Eight bytes of text are no length of a header: it would be longer than any.
    begins = _text(first)
    if begins is not None:
        many = f" of {len(first)} bytes" if len(first) < 8 else ""
        return f"a text{many}, not weights: an error message? It begins {begins[:40]!r}"
    return None


def packing_of(first: bytes) -> str | None:
    """How a file that begins so is packed, if it is: what is in it cannot be told from outside.

    Args:
        first: the first 512 bytes, or all.
    """
    packing = _packing(first)
    return packing and packing[0]


def _packing(first: bytes) -> tuple[str, str] | None:
    for magic, what, advice in _PACKED:
        if first.startswith(magic) and _goes_on(first, magic):
            return what, advice
    return None


def _goes_on(first: bytes, magic: bytes) -> bool:
    """Whether a file goes on as it begins, where two or three bytes say little."""
    if magic[:1] == b"\x78":
        try:
            zlib.decompressobj().decompress(first, 64 * 1024)
        except zlib.error:
            return False
    if magic == _LZMA:  # its length is not known, or not beyond belief
        return first[5:13] == b"\xff" * 8 or first[10:13] == b"\0\0\0"
    return magic != _BZIP2 or first[3:4] in b"123456789"


def _text(first: bytes) -> str | None:
    """The text that a file begins with; None if it is none."""
    try:  # the last character may be cut
        text = codecs.getincrementaldecoder("utf-8")().decode(first.removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError:
        return None
    is_text = text != "" and re.sub(r"[\t\n\r]", "", text).isprintable()
    return text if is_text else None
