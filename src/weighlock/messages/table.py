"""The tensors of a message: rows of its table, as views of the body or refs into shares.

Everything a row says is checked before it is used: spans against the body and the sizes of shares,
shapes and dtypes as in any file. Opens nothing: who opens a URL is given.
"""

import itertools
from collections.abc import Callable

# Here, and not when a message holds a tensor of such a type: nothing it says imports anything.
import ml_dtypes  # noqa: F401
import numpy as np

from weighlock.errors import MessageInvalid
from weighlock.limits import Limits
from weighlock.messages.wire import ALIGNMENT, RAW_BYTES, RAW_NAME, Envelope
from weighlock.sources.local import BytesSource
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import Readable, StoredRef

__all__ = ["Tensors"]

_DTYPES = {dtype.value: dtype for dtype in DType}


class Tensors:
    """The tensors of a message, in the order in which the tree first names them.

    Args:
        body: the message.
        end: where its tree ends.
        envelope: what the tree says of tensors and owners.
        open_ticket: gives the source of a URL and a size. Opens nothing.
        limits: bounds of a tensor's rank.
    """

    def __init__(
        self,
        body: memoryview,
        end: int,
        envelope: Envelope,
        open_ticket: Callable[[str, int], Readable],
        limits: Limits,
    ) -> None:
        rows = len(envelope.names)
        columns = (envelope.dtypes, envelope.ranks, envelope.owners)
        stored = sum(owner is not None for owner in envelope.owners)
        if any(len(column) != rows for column in columns) or len(envelope.offsets) != stored:
            raise MessageInvalid("the columns of the table of tensors are not of one length")
        if len(envelope.urls) != len(envelope.sizes):
            raise MessageInvalid("the columns of the table of owners are not of one length")
        if len(set(envelope.urls)) < len(envelope.urls):
            raise MessageInvalid("the table names one owner twice")
        if not all(envelope.urls):
            raise MessageInvalid("the message was not sealed: a share has no URL")
        limits.check("tensors", rows, "tensors of a message")
        self._body = body
        self._envelope = envelope
        self._sources = [
            open_ticket(url, size) for url, size in zip(envelope.urls, envelope.sizes, strict=True)
        ]
        self._claims: list[list[tuple[int, int]]] = [[] for _ in envelope.urls]
        self._limits = limits
        self._end = end
        self._met: list[tuple[TensorSpec, Span, int | None]] = []
        self._dims = self._stored = 0
        self._arrays: dict[int, Array] = {}
        self._refs: dict[int, TensorRef] = {}

    def array(self, number: int, key: object) -> Array:
        """A tensor of this message, as a view of it."""
        spec, span, owner = self._row(number, key)
        if owner is not None:
            raise MessageInvalid(f"tensor {number} lies in a share, and was to be an array")
        array = self._arrays.get(number)
        if array is None:
            array = self._arrays[number] = self._view(spec, span)
        return array

    def raw(self, number: int) -> bytes:
        """A long bytes object."""
        spec, span, owner = self._row(number, None)
        if owner is not None or spec.dtype is not DType.U8 or len(spec.shape) != 1:
            raise MessageInvalid(f"tensor {number} was to be bytes, and is not")
        if spec.name != RAW_NAME or span.length < RAW_BYTES:
            raise MessageInvalid(
                f"tensor {number} was to be bytes: of {RAW_BYTES:,} and more, named {RAW_NAME!r}"
            )
        return bytes(self._body[span.offset : span.end])

    def ref(self, number: int, key: object) -> TensorRef:
        """A tensor of this message or of a share."""
        spec, span, owner = self._row(number, key)
        ref = self._refs.get(number)
        if ref is None:
            if owner is not None:
                ref = StoredRef(spec, self._sources[owner], span)
            elif spec.dtype.is_packed:
                ref = StoredRef(spec, self._packed(span), Span(0, span.length))
            else:
                ref = ArrayRef(spec, self.array(number, key))
            self._refs[number] = ref
        return ref

    def finish(self) -> None:
        """Check that everything was used, and that nothing is claimed twice or left over.

        Raises:
            MessageInvalid: it is not so.
        """
        if len(self._met) != len(self._envelope.names) or self._dims != len(self._envelope.dims):
            raise MessageInvalid(
                f"the table has {len(self._envelope.names)} tensors, the object {len(self._met)}"
            )
        if self._end != len(self._body):
            raise MessageInvalid(
                f"the message ends at byte {self._end:,}, {len(self._body):,} are there"
            )
        for number, claims in enumerate(self._claims):
            if not claims:
                raise MessageInvalid(f"share {number} of the message holds none of its tensors")
            claims.sort()
            for (_, before), (after, _) in itertools.pairwise(claims):
                if after < before:
                    raise MessageInvalid(f"two tensors claim byte {after:,} of share {number}")

    def _row(self, number: int, key: object) -> tuple[TensorSpec, Span, int | None]:
        if number > len(self._met) or number >= len(self._envelope.names):
            raise MessageInvalid(
                f"tensor {number} is named after {len(self._met)} of "
                f"{len(self._envelope.names)}: they come in order"
            )
        if number == len(self._met):
            self._met.append(self._next(number, key))
        return self._met[number]

    def _next(self, number: int, key: object) -> tuple[TensorSpec, Span, int | None]:
        table = self._envelope
        name = table.names[number]
        if name is not None and name == key:
            raise MessageInvalid(f"tensor {number} is named after its key, which goes unsaid")
        rank, owner = table.ranks[number], table.owners[number]
        self._limits.check("rank", rank, f"dimensions of tensor {number}")
        shape = table.dims[self._dims : self._dims + rank] if rank >= 0 else []
        if len(shape) != rank:
            raise MessageInvalid(f"tensor {number} has {rank} dimensions, {len(shape)} are there")
        self._dims += rank
        dtype = _DTYPES.get(table.dtypes[number])
        if dtype is None:
            raise MessageInvalid(f"tensor {number} has the dtype {table.dtypes[number]!r:.60}")
        spec = TensorSpec(key if name is None else name, dtype, tuple(shape))  # type: ignore[arg-type]
        if owner is None:
            return spec, self._segment(spec), None
        if not 0 <= owner < len(table.urls):
            raise MessageInvalid(f"tensor {spec.name!r} lies in share {owner}, which is not there")
        span = Span(table.offsets[self._stored], spec.nbytes)
        self._stored += 1
        if span.end > table.sizes[owner]:
            raise MessageInvalid(
                f"tensor {spec.name!r} ends at byte {span.end:,} of a share of "
                f"{table.sizes[owner]:,}"
            )
        self._claims[owner].append((span.offset, span.end))
        return spec, span, owner

    def _segment(self, spec: TensorSpec) -> Span:
        start = self._end + -self._end % ALIGNMENT
        span = Span(start, spec.nbytes)
        if span.end > len(self._body):
            raise MessageInvalid(
                f"tensor {spec.name!r} ends at byte {span.end:,} of a message of "
                f"{len(self._body):,}"
            )
        if any(self._body[self._end : start]):
            raise MessageInvalid(f"there is something in the gap before tensor {spec.name!r}")
        self._end = span.end
        return span

    def _view(self, spec: TensorSpec, span: Span) -> Array:
        if spec.dtype.is_packed:
            return StoredRef(spec, self._packed(span), Span(0, span.length)).load()
        if not span.length:
            return np.empty(spec.shape, spec.dtype.numpy)
        return np.ndarray(spec.shape, spec.dtype.numpy, self._body, span.offset)

    def _packed(self, span: Span) -> BytesSource:
        return BytesSource(self._body[span.offset : span.end], "a message")
