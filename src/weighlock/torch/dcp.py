"""A `StorageReader`: `torch.distributed.checkpoint.load` from whatever Weighlock can open.

    dcp.load(state_dict, storage_reader=CatalogReader("http://…/model.safetensors"))

Each rank reads the parts of tensors that it holds, and no more. Imports torch inside functions, as
`tensors/torch.py` does; knows torch's plans, and nothing of files.
"""

import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weighlock.errors import LayoutError
from weighlock.formats.detect import Openable, open_catalog
from weighlock.limits import Limits
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import loaded_shape
from weighlock.tensors.slicing import row_blocks
from weighlock.tensors.stored import StoredRef
from weighlock.tensors.torch import dtype_named

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.futures import Future

    from weighlock.sources.access import Access
    from weighlock.tensors.ref import TensorRef

__all__ = ["CatalogReader"]

_BLOCK_BYTES = 16 * 1024 * 1024
"""Most of a tensor that is held aside on its way to a device, another dtype or scattered memory."""


class CatalogReader:
    """Reads from a catalog, or from anything that can be opened as one.

    What a checkpoint holds beside tensors is handed over as plain values; no object of it is made.

    Args:
        target: a catalog, which stays the caller's to close; or what `weighlock.open` takes, which
            is opened when it is first read, in each process for itself.
        limits: what the input may ask for.
        access: credentials for URLs.
        verify: check remote tensors against their digests, where the server has them.
    """

    def __init__(
        self,
        target: "Catalog | Openable",
        *,
        limits: Limits | None = None,
        access: "Access | None" = None,
        verify: bool = True,
    ) -> None:
        from torch.distributed.checkpoint import StorageReader

        StorageReader.register(type(self))  # `isinstance` holds, and importing this needs no torch
        self._target = target
        self._limits = limits
        self._access = access
        self._verify = verify
        self._opened: Catalog | None = None

    def __enter__(self) -> "CatalogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened here. Idempotent; the next read opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    @property
    def catalog(self) -> Catalog:
        """The catalog that is read from."""
        if isinstance(self._target, Catalog):
            return self._target
        if self._opened is None:
            self._opened = open_catalog(
                self._target, self._limits, access=self._access, verify=self._verify
            )
        return self._opened

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin anew; with an id, read from there from now on."""
        if checkpoint_id is not None:
            self.close()
            self._target = checkpoint_id

    def read_metadata(self) -> "Metadata":
        """Names, dtypes and shapes: every tensor is one chunk, any part of which can be read."""
        from torch import Size
        from torch.distributed.checkpoint import metadata as torch_metadata

        described: dict[str, Any] = {}
        for name, ref in self.catalog.readable().items():
            size = Size(_torch_shape(ref))
            described[name] = torch_metadata.TensorStorageMetadata(
                torch_metadata.TensorProperties(dtype=dtype_named(ref.dtype.torch_name)),
                size,
                [torch_metadata.ChunkStorageMetadata(Size([0] * len(size)), size)],
            )
        for name in _flat(self.catalog.extras):
            described.setdefault(name, torch_metadata.BytesStorageMetadata())
        return torch_metadata.Metadata(described)

    def set_up_storage_reader(
        self, metadata: "Metadata", is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Nothing: the catalog knows where everything lies."""

    def prepare_local_plan(self, plan: "LoadPlan") -> "LoadPlan":
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: "list[LoadPlan]") -> "list[LoadPlan]":
        """The plans as they are."""
        return plans

    def read_data(self, plan: "LoadPlan", planner: "LoadPlanner") -> "Future[None]":
        """Read what is planned, in the order in which it lies in its files."""
        import torch
        from torch.distributed.checkpoint.planner import LoadItemType

        catalog = self.catalog
        objects: dict[str, object] | None = None
        for item in sorted(plan.items, key=lambda item: _position(catalog, item)):
            if item.type == LoadItemType.BYTE_IO:
                objects = dict(_flat(catalog.extras)) if objects is None else objects
                buffer = io.BytesIO()
                torch.save(objects[item.storage_index.fqn], buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            target = planner.resolve_tensor(item).detach()
            _fill(catalog[item.storage_index.fqn], item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether this could be opened: any path or URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def _position(catalog: Catalog, item: "ReadItem") -> tuple[str, int]:
    ref = catalog.get(item.storage_index.fqn)
    if not isinstance(ref, StoredRef):
        return "", 0
    return str(getattr(ref.source, "label", "")), ref.span.offset


def _torch_shape(ref: "TensorRef") -> tuple[int, ...]:
    """The shape torch gives the tensor: it counts pairs of 4-bit numbers; 6-bit ones are bytes."""
    if ref.dtype is DType.F4:
        return (*ref.shape[:-1], ref.shape[-1] // 2)
    return loaded_shape(ref.spec)


def _fill(ref: "TensorRef", item: "ReadItem", target: "Tensor") -> None:
    """Read the part of a tensor that is wanted into its place."""
    lengths, offsets = tuple(item.lengths), tuple(item.storage_offsets)
    if tuple(target.shape) != lengths:
        raise LayoutError(
            f"tensor {ref.name!r}: {list(lengths)} were planned, the target is {list(target.shape)}"
        )
    is_whole = lengths == _torch_shape(ref)
    wanted = dtype_named(ref.dtype.torch_name)
    if is_whole and target.device.type == "cpu" and target.dtype == wanted:
        ref.load(out=target)
        return
    if ref.dtype.is_packed:
        if not is_whole:
            raise LayoutError(f"tensor {ref.name!r} of {ref.dtype} can only be loaded whole")
        target.copy_(ref.torch())
        return
    for block in row_blocks(lengths, _BLOCK_BYTES * 8 // ref.dtype.bits):
        inside = tuple(_shifted(key, first) for key, first in _keys(block, lengths, offsets))
        target[block].copy_(ref[inside].to())


def _keys(
    block: tuple[Any, ...], lengths: tuple[int, ...], offsets: tuple[int, ...]
) -> Iterator[tuple[Any, int]]:
    """A key for every dimension of a block, with where the part begins in it."""
    rest = (slice(0, size) for size in lengths[len(block) :])
    yield from zip((*block, *rest), offsets, strict=True)


def _shifted(key: Any, first: int) -> Any:
    return slice(key.start + first, key.stop + first) if isinstance(key, slice) else key + first


def _flat(extras: Mapping[Any, Any]) -> dict[str, object]:
    """What is not a tensor, by names as torch joins them; a dict by its own name as well."""
    found: dict[str, object] = {}
    stack: list[tuple[str, Any]] = [("", extras)]
    while stack:
        name, value = stack.pop()
        if name:
            found.setdefault(name, value)
        if isinstance(value, Mapping):
            prefix = f"{name}." if name else ""
            stack += [(f"{prefix}{key}", item) for key, item in reversed(list(value.items()))]
    return found
