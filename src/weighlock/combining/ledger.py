"""What an accumulator remembers beside its sums: who is in it, and what was put in. Values only.

It travels as one text in the metadata of the accumulator's file, so that both are replaced by the
same rename.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from weighlock.errors import CombineError, HeaderError
from weighlock.tensors.beside import Beside
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import TensorSpec
from weighlock.tensors.stored import StoredRef

__all__ = ["LEDGER_KEY", "Ledger"]

LEDGER_KEY = "weighlock.mean"
_VERSION = 1

_MOST_NOTES = 8
"""Notes on one contribution that are kept: a file may have many, and all are written each time."""

_OF_PAIRS = {DType.F32: DType.C64, DType.F64: DType.C128}


@dataclass(frozen=True, slots=True)
class Ledger:
    """Contributions so far."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Who was counted, in order, and with what weight."""
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    """The dtype of each tensor in the contributions, and of the result. Where it is complex, the
    accumulator has pairs."""
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that not everybody had, and who did not."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What all contributions say about themselves."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What readers of a contribution's file should know, by contribution."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tensors of contributions that are of a kind that is not read, and why."""
    total: float = field(init=False, compare=False, default=0.0)
    """All weights together: asked for once for each tensor, and there are many."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.weights.values()))

    def weight_of(self, tensor: str) -> float:
        """The weight that is in a tensor's mean."""
        if tensor not in self.lacking:
            return self.total
        absent = set(self.lacking[tensor])
        return sum(weight for name, weight in self.weights.items() if name not in absent)

    def shares(self) -> dict[str, float]:
        """The weights, as parts of the whole."""
        return {name: weight / self.total for name, weight in self.weights.items()}

    def left_out(self) -> dict[str, str]:
        """Tensors that are in no mean, as nobody has them but as what is not read, and why."""
        return {name: why for name, why in self.unread.items() if name not in self.dtypes}

    def counting(
        self,
        name: str,
        weight: float,
        dtypes: Mapping[str, DType],
        metadata: Mapping[str, str],
        *,
        notes: Sequence[str] = (),
        unread: Mapping[str, str] = MappingProxyType({}),
    ) -> "Ledger":
        """The ledger with one more contribution.

        Args:
            name: whose it is.
            weight: what it weighs.
            dtypes: of its tensors.
            metadata: what it says about itself.
            notes: what readers of its file should know.
            unread: tensors of its file that are not read, and why.

        Raises:
            CombineError: it was counted already, or weighs too much together with the others.
        """
        if name in self.weights:
            raise CombineError(f"{name}: was counted already", contributor=name)
        if not math.isfinite(self.total + weight):
            raise CombineError(
                f"{name}: weighs {weight:g}, too much to be added to {self.total:g}",
                contributor=name,
            )
        lacking = {tensor: list(who) for tensor, who in self.lacking.items()}
        for tensor in self.dtypes:
            if tensor not in dtypes:
                lacking.setdefault(tensor, []).append(name)
        for tensor in dtypes:
            if tensor not in self.dtypes and self.weights:
                lacking[tensor] = list(self.weights)
        agreed = metadata
        if self.weights:
            agreed = {k: text for k, text in self.metadata.items() if metadata.get(k) == text}
        return replace(
            self,
            weights={**self.weights, name: weight},
            dtypes={**dtypes, **self.dtypes},
            lacking={tensor: tuple(who) for tensor, who in lacking.items()},
            metadata=agreed,
            notes={**self.notes, name: _first(notes)} if notes else self.notes,
            unread={**unread, **self.unread},
        )

    def with_complex(self, accumulator: Catalog) -> Catalog:
        """The accumulator, with the complex numbers that it holds as pairs.

        Raises:
            HeaderError: what should be pairs is something else.
        """
        paired = {name for name, dtype in self.dtypes.items() if dtype.is_complex}
        if not paired:
            return accumulator
        refs = {
            name: _as_complex(ref) if name in paired else ref for name, ref in accumulator.items()
        }
        return Catalog(
            refs,
            accumulator.metadata,
            beside=Beside(accumulator.aliases, groups=accumulator.groups),
        )

    def text(self) -> str:
        """For the metadata of a file."""
        return json.dumps(
            {
                "version": _VERSION,
                "weights": self.weights,
                "dtypes": self.dtypes,
                "lacking": self.lacking,
                "metadata": self.metadata,
                "notes": self.notes,
                "unread": self.unread,
            }
        )

    @classmethod
    def of(cls, text: str | None, source: str) -> "Ledger":
        """From the metadata of a file.

        Raises:
            HeaderError: it is not the file of an accumulator.
        """
        try:
            found = json.loads(text or "")
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']}")
            return cls(
                {str(name): float(weight) for name, weight in found["weights"].items()},
                {str(name): DType(dtype) for name, dtype in found["dtypes"].items()},
                {str(name): tuple(map(str, who)) for name, who in found["lacking"].items()},
                {str(key): str(value) for key, value in found["metadata"].items()},
                # Ledgers did not always have these.
                {str(name): tuple(map(str, n)) for name, n in found.get("notes", {}).items()},
                {str(name): str(why) for name, why in found.get("unread", {}).items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HeaderError(
                f"is not the accumulator of a mean: {error!r}", source=source
            ) from error


def _first(notes: Sequence[str]) -> tuple[str, ...]:
    """The first few notes, and how many more there are."""
    if len(notes) <= _MOST_NOTES:
        return tuple(notes)
    return (*notes[: _MOST_NOTES - 1], f"{len(notes) - _MOST_NOTES + 1} more notes")


def _as_complex(ref: TensorRef) -> TensorRef:
    if ref.dtype.is_complex:  # as accumulators held them once
        return ref
    dtype = _OF_PAIRS.get(ref.dtype)
    if dtype is None or ref.shape[-1:] != (2,) or not isinstance(ref, StoredRef):
        raise HeaderError(
            f"is not the accumulator of a mean: tensor {ref.name!r} is {ref.dtype} "
            f"{list(ref.shape)}, not pairs"
        )
    return StoredRef(TensorSpec(ref.name, dtype, ref.shape[:-1]), ref.source, ref.span)
