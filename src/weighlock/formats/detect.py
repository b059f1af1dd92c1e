"""Which format bytes are in, decided by content, once. Knows first bytes and directory listings."""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from weighlock.errors import FormatError, SourceChanged, SourceError
from weighlock.formats import sharded
from weighlock.formats.impostors import NOT_READ, impostor_of
from weighlock.formats.nested import with_nested
from weighlock.formats.plain_pickle import is_pickle, open_pickle
from weighlock.formats.safetensors import open_safetensors
from weighlock.formats.tar_directory import is_tar
from weighlock.formats.torch_legacy import is_legacy, open_torch_legacy
from weighlock.formats.torch_tar import open_torch_tar
from weighlock.formats.torch_zip import open_torch_zip
from weighlock.formats.zip_directory import read_directory
from weighlock.limits import Limits
from weighlock.sources.base import Source
from weighlock.sources.local import BytesSource, FileSource, names_in

if TYPE_CHECKING:
    from weighlock.abort import Abort
    from weighlock.sources.access import Access
    from weighlock.tensors.catalog import Catalog

__all__ = ["Openable", "check_beginning", "open_catalog", "open_source"]

_ATTEMPTS = 8
"""How often a file is opened that is replaced meanwhile."""

Openable: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Source"


def open_catalog(
    target: "Openable",
    limits: Limits | None = None,
    *,
    access: "Access | None" = None,
    verify: bool = True,
    abort: "Abort | None" = None,
) -> "Catalog":
    """Open weights: headers are read, tensors are not.

    Args:
        target: a file, a directory or index of a sharded model, a distributed checkpoint, a ZeRO
            folder, an http(s) URL of any of these but a directory, bytes, or a `Source`.
        limits: what the input may ask for.
        access: credentials for URLs.
        verify: read remote tensors in whole blocks and check their digests, where the server has
            them; otherwise exactly the bytes that are needed, unchecked.
        abort: `abort.set()` in any thread ends whatever waits for the server of a URL, now or when
            tensors are read, with `Aborted`.

    Raises:
        FormatError: it is not in a format that can be read, or contradicts itself.
        LimitExceeded: it asks for more than `limits` allow.
        SourceError: it could not be read.
        TransferError, RemoteProtocolError: it is behind a URL, and could not be had.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(
            f"open: limits= takes a Limits, not {limits!r}; there is no mode, files are only read"
        )
    limits = limits or Limits()
    return with_nested(_open(target, limits, access, verify, abort), limits, open_source)


def _open(
    target: "Openable",
    limits: Limits,
    access: "Access | None",
    verify: bool,
    abort: "Abort | None",
) -> "Catalog":
    if isinstance(target, (bytes, bytearray, memoryview)):
        return open_source(BytesSource(target), limits)
    if isinstance(target, str) and target.lower().startswith(("http://", "https://")):
        # Imported for URLs only: who opens a file does not wait for HTTP and TLS.
        from weighlock.formats.remote import open_url

        return open_url(target, limits, open_source, access=access, verify=verify, abort=abort)
    if isinstance(target, (str, os.PathLike)):
        return _open_path(os.fspath(target), limits)
    if isinstance(target, Source):
        return open_source(target, limits)
    if isinstance(target, Mapping):
        raise TypeError(
            f"cannot open a {type(target).__name__}: weighlock.Catalog.of(tensors) makes a catalog "
            "of arrays and torch tensors"
        )
    raise TypeError(f"cannot open a {type(target).__name__}: pass a path, bytes or a Source")


def _open_path(path: str, limits: Limits) -> "Catalog":
    if not path:
        raise SourceError("the path is empty: name a file, a directory or a URL")
    if "://" in path:
        raise SourceError(f"{path}: only http:// and https:// URLs can be opened")
    if os.path.isdir(path):
        return _open_directory(path, limits)
    if sharded.is_index_name(path):
        return sharded.open_index(path, limits, open_source)
    if os.path.basename(path) == sharded.METADATA_NAME:
        from weighlock.formats.dcp import open_dcp

        return open_dcp(path, limits)
    return _open_file(path, limits)


def _open_file(path: str, limits: Limits) -> "Catalog":
    left = _ATTEMPTS
    while True:
        source = FileSource(path)
        left -= 1
        try:
            return open_source(source, limits)
        except BaseException as error:
            source.close()
            # Somebody may have put another file there: whoever opens it now wants that one.
            if not isinstance(error, SourceChanged) or not left:
                raise


# What a directory may hold its model as. Where it holds it in two formats, the first kind counts.
_MODELS: tuple[str | tuple[str, ...], ...] = (
    *(".safetensors.index.json", ".safetensors"),
    *(".bin.index.json", "pytorch_model.bin", "adapter_model.bin"),
    "latest",  # of a run with DeepSpeed: the name of the folder that it wrote last
    (".pt", ".pth", ".ckpt"),
    (".gguf", ".npz", ".npy"),
    ".bin",
)

# What trainers put beside a model to go on from: never the model.
_OF_TRAINING = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)"
    r"(?:[\d._-].*)?\.(?:pt|pth|bin|pkl)"
)

# The same weights in another precision, whole or in shards, beside those that are read by default.
_VARIANT = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model)"
    r"\.\w+(?:-\d{5}-of-\d{5})?(\.safetensors|\.bin)"
)
_VARIANT_INDEX = re.compile(r"(.+)(\.safetensors|\.bin)(?:\.index\.\w+|\.\w+\.index)\.json")


def _open_directory(path: str, limits: Limits) -> "Catalog":
    """The one model of a directory: its only index, or its only file of a kind."""
    names = names_in(path)
    spread = _open_spread(path, names, limits)
    if spread is not None:
        return spread
    names = [name for name in names if not name.startswith(".")]
    models = [name for name in names if not _OF_TRAINING.fullmatch(name)]
    known = set(models)
    for ending in _MODELS:
        if ending == "latest":
            tag = _tag_in(path, names)
            if tag is not None:
                return _open_directory(tag, limits)
            continue
        found = [
            name
            for name in models
            if _VARIANT_INDEX.sub(r"\1\2.index.json", name).endswith(ending)
            and not _is_variant(name, known)
        ]
        if len(found) == 1:
            return _open_path(os.path.join(path, found[0]), limits)
        if found:
            raise FormatError(
                f"holds {len(found)} candidates ({_listed(found)}): open one by name", source=path
            )
    raise FormatError(_no_model(names), source=path)


def _is_variant(name: str, names: set[str]) -> bool:
    """Whether the model of which this is a variant is there, too."""
    match = _VARIANT.fullmatch(name) or _VARIANT_INDEX.fullmatch(name)
    if match is None:
        return False
    whole = match[1] + match[2]
    return whole in names or f"{whole}.index.json" in names


def _tag_in(path: str, names: list[str]) -> str | None:
    """The folder that a run with DeepSpeed wrote last, if this is such a run's directory."""
    if "latest" not in names:
        return None
    from weighlock.formats.deepspeed import tag_in

    return tag_in(path, names)


def _no_model(names: list[str]) -> str:
    """What to say of a directory in which no model was found."""
    if "model_index.json" in names:
        return "holds a pipeline of several models: open one of its directories by name"
    found = list(filter(_OF_TRAINING.fullmatch, names))
    if found:
        return (
            f"holds no model, only what training goes on from ({_listed(found)}): open one by name"
        )
    return "holds no model: no *.safetensors, *.bin, *.pt, *.gguf, *.npz, *.index.json"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _open_spread(path: str, names: list[str], limits: Limits) -> "Catalog | None":
    """The checkpoint that many processes saved together; None if the directory holds none.

    What reads these is imported for them only: who opens a file does not wait for it.
    """
    if sharded.METADATA_NAME in names:
        from weighlock.formats.dcp import is_dcp

        if is_dcp(names):
            return _open_path(os.path.join(path, sharded.METADATA_NAME), limits)
    if any(name.endswith("_optim_states.pt") for name in names):
        from weighlock.formats.deepspeed import is_deepspeed, open_deepspeed

        if is_deepspeed(names):
            return open_deepspeed(path, names, limits, open_source)
    return None


def open_source(source: Source, limits: Limits) -> "Catalog":
    """The catalog in a source, in whatever format its first bytes show."""
    try:
        return _open_source(source, limits)
    except FormatError as error:
        if error.source is not None:
            raise
        raise type(error)(str(error), source=source.label, offset=error.offset) from error


def check_beginning(source: Source) -> None:
    """Raise `FormatError` if the first bytes show that this is no weights at all."""
    first = _first_of(source)
    others = (_is_zip, is_legacy, _is_tar, _is_gguf, _is_npy, _is_pickle)
    if not any(is_other(first) for is_other in others):
        _check_impostor(first, source)


def _first_of(source: Source) -> bytes:
    buffer = bytearray(min(source.size, 512))
    source.read_into(0, memoryview(buffer))
    return bytes(buffer)


def _check_impostor(first: bytes, source: Source) -> None:
    impostor = impostor_of(first)
    if impostor:
        raise FormatError(f"is {impostor}", source=source.label)


# A safetensors file has its `{` at byte 8, whatever the length of its header looks like.


def _is_zip(first: bytes) -> bool:
    return first.startswith(b"PK\x03\x04") and first[4:9] != b"\0\0\0\0{"


def _is_tar(first: bytes) -> bool:
    return is_tar(first) and first[8:9] != b"{"


def _is_gguf(first: bytes) -> bool:
    # Four zeros would be the length of a safetensors header that begins as GGUF does.
    return first[:4] == b"GGUF" and any(first[4:8])


def _is_npy(first: bytes) -> bool:
    return first.startswith(b"\x93NUMPY")


def _is_pickle(first: bytes) -> bool:
    return is_pickle(first) and first[8:9] != b"{"


def _open_source(source: Source, limits: Limits) -> "Catalog":
    first = _first_of(source)
    if _is_zip(first):
        return _open_zip(source, limits)
    if is_legacy(first):
        return open_torch_legacy(source, limits)
    if _is_tar(first):
        return open_torch_tar(source, limits)
    other = _open_other(source, limits, first)
    if other is not None:
        return other
    _check_impostor(first, source)
    return open_safetensors(source, limits)


def _open_zip(source: Source, limits: Limits) -> "Catalog":
    members = read_directory(source, limits, fold_case=False)
    if any(name.endswith(".npy") for name in members):
        from weighlock.formats.npz import is_npz, open_npz

        if is_npz(members):
            return open_npz(source, limits, members)
    if "config.json" in members and any(name.endswith(".weights.h5") for name in members):
        raise FormatError(f"is a Keras archive with HDF5 in it, {NOT_READ}", source=source.label)
    return open_torch_zip(source, limits, members)


def _open_other(source: Source, limits: Limits, first: bytes) -> "Catalog | None":
    """What is neither safetensors nor PyTorch's; None if it is none of these.

    What reads it is imported for it only.
    """
    if _is_gguf(first):
        from weighlock.formats.gguf import open_gguf

        return open_gguf(source, limits)
    if _is_npy(first):
        from weighlock.formats.npy import open_npy

        return open_npy(source, limits)
    if _is_pickle(first):
        try:
            return open_pickle(source, limits)
        except FormatError as error:
            if b"joblib.numpy_pickle" not in first:
                raise
            what = "is a joblib file, whose arrays lie between the parts of a pickle"
            how = "load it with joblib and save it with numpy"
            raise FormatError(f"{what}, which is not read: {how}", source=source.label) from error
    return None
