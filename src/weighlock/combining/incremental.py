"""A mean of contributions that come over time: its accumulator lies on disk.

The accumulator is a safetensors file of the mean so far, in float32 or float64, with a ledger in
its metadata; complex numbers are pairs in it, with a last dimension of two. Adding writes the next
one beside it and puts that in its place by one rename. So, whenever the process dies, a
contribution is in it entirely, ledger and all, or not at all.
"""

import errno
import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from weighlock.abort import Abort
from weighlock.combining.accumulator import Accumulator, InDirectory, InSpool
from weighlock.combining.combination import Combination, Given, Options, check_options, opening_for
from weighlock.combining.contributors import (
    Combinable,
    Contributor,
    Shared,
    agreed_metadata,
    checked_weight,
    named,
)
from weighlock.combining.integers import Agreed, IntegerPolicy
from weighlock.combining.ledger import LEDGER_KEY, Ledger
from weighlock.combining.mean import accumulated_in
from weighlock.combining.outcome import Out, Report
from weighlock.combining.plan import Part
from weighlock.combining.rounding import is_averaged, unit_dtype
from weighlock.combining.rows import heeding, is_near
from weighlock.combining.sums import WeightedSum
from weighlock.disk.scratch import Scratch
from weighlock.disk.spool import Spool
from weighlock.errors import (
    Aborted,
    CombineError,
    DiskError,
    LocalProtocolError,
    SourceError,
    WeighlockError,
)
from weighlock.lifetimes import Lifetime
from weighlock.tensors.beside import Beside
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    import os

    from weighlock.combining.desk import Combine
    from weighlock.tensors.dtypes import DTypeLike
    from weighlock.tensors.ref import TensorRef

__all__ = ["Mean"]

_ACCUMULATOR = "what was added before"


class Mean(Lifetime):
    """The weighted mean of contributions that come one by one, from any thread.

    Args:
        directory: where the accumulator lies; made if it is not there. What a process that died
            left in it is taken up: `weights` tells who is in. In a spool the accumulator is this
            object's alone, counts against the quota, and goes with it or with the spool.
        accumulate: "f32" or "f64", the precision of the mean so far, which is float64 for numbers
            of 64 bits. If not given, float32 for results of 16 bits and less, float64 for others.
        integers: as for `mean`.
        finite: refuse NaN and infinity.
        **options: as `mean` takes them.

    Memory does not grow with the model or with what is added. The accumulator takes the disk space
    of the model in its precision, and as much again while something is added. Several processes may
    add in one directory, one after the other; not from several machines, which see no locks of each
    other.

    A `with` block removes the accumulator if the mean of all that is in it was made, and keeps it
    otherwise, for whoever goes on.

    Raises:
        DiskError: the directory cannot be made.
        FormatError: what lies in it is no accumulator.
        SpoolClosed: the spool was closed.
        CombineError, TypeError: an option is none, or has no such value.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str] | Spool",
        accumulate: "DTypeLike | None" = None,
        *,
        integers: IntegerPolicy = "equal",
        finite: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._accumulate = accumulated_in(accumulate)
        check_options(options, integers)
        self._integers = integers
        self._finite = finite
        self._options = options
        self._lock = threading.Lock()
        self._closed = False
        self._finished: Hashable = None
        """What tells the accumulator of which the mean has been made; None if there is none."""
        self._place: Accumulator
        if isinstance(directory, Spool):
            self._place = InSpool(directory)
        else:
            self._place = InDirectory(directory)
        self._ledger = Ledger()
        with ExitStack() as closing:
            self._read(closing)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None or self._finished is None:
            return
        with self._lock, self._place.alone():
            # Another process may have added to it since: of that no mean was made.
            if not self._closed and self._place.mark() == self._finished:
                self._remove()

    def __len__(self) -> int:
        return len(self._ledger.weights)

    @property
    def weights(self) -> Mapping[str, float]:
        """Who was added so far, in order, and with what weight."""
        return dict(self._ledger.weights)

    def add(self, catalog: Combinable, weight: float = 1.0, name: str | None = None) -> None:
        """Count a contribution. It counts entirely or not at all.

        On any exception it does not count, except that Ctrl-C, or the last sync of a disk that
        fails, may come when it does already: then the error says so, and `weights` names it.

        What has to come over the network is brought here first, while others may be counted.

        Args:
            catalog: a catalog, state dict, path or URL.
            weight: more than 0.
            name: whose it is. Nobody is counted twice; without a name, it is another one.

        Raises:
            CombineError: shapes, dtypes, names, numbers or the weight are refused.
            SourceError, TransferError: it could not be read.
            Aborted: somebody said stop.
            SpoolClosed: the spool was closed, and the accumulator is gone.
            DiskError: the accumulator could not be written; it is as it was.
            NotDurable: or it was written, and might not survive a power loss; the error tells.
        """
        has_name = name is not None and name != ""  # a number is one, 0 too
        label = str(name) if has_name else self._free_name()
        if not checked_weight(weight, label):
            raise CombineError(f"{label}: has the weight 0", contributor=label)
        opening = opening_for(self._options)
        with ExitStack() as closing:
            opened = opening.open(catalog, label, closing)
            landed = self._landed(opened, label, closing)
            with self._lock, self._place.alone(self._options.get("abort")):
                self._check_open()
                before = self._read(closing)
                if not has_name:
                    label = self._free_name()
                # Who gives a catalog has seen what is to be known of it.
                seen = None if isinstance(catalog, Mapping) else opened
                self._count(Contributor(label, landed, float(weight)), seen, before)

    def finish(self, out: Out = None, **options: Unpack[Options]) -> Catalog:
        """The mean of all that was added; the accumulator stays until `close`.

        Args:
            out: the file to write, or a spool; the result is in memory if not given.
            **options: instead of those given to the constructor.

        Raises:
            CombineError: nothing was added.
            DiskError: the result could not be written.
        """
        abort = options.get("abort", self._options.get("abort"))
        with self._lock, self._place.alone(abort), ExitStack() as closing:
            self._check_open()
            mark = self._place.mark()
            before = self._read(closing)
            if before is None:
                raise CombineError("there is nothing to combine: nobody was added")
            ledger = self._ledger

            def part_of(shared: Shared, contributors: Sequence[Contributor]) -> Part:
                (ref,), dtype = shared.refs, ledger.dtypes[shared.name]
                how: Combine = Agreed(dtype, (1.0,))
                if ref.dtype is not dtype or is_averaged(dtype):
                    how = WeightedSum((ref.dtype,), (1.0,), dtype, finite=False)
                return Part(TensorSpec(shared.name, dtype, ref.shape), shared.refs, (0,), how)

            asked: Options = {**self._options, **options}
            if asked.get("metadata") is None:
                asked["metadata"] = ledger.metadata
            tell = asked.pop("report", None)
            reports: list[Report] = []
            given: Given = [(_ACCUMULATOR, before, 1.0)]
            asked["report"] = reports.append
            result = Combination(out, asked).of(given, part_of)
            self._finished = mark
        report = replace(
            reports[0],
            weights=ledger.shares(),
            skipped=ledger.lacking,
            unread=ledger.left_out(),
            of_files=ledger.notes,
        )
        if tell is not None:
            tell(report)
        for note in report.notes():
            result = result.noted(note)
        return result

    def close(self) -> None:
        """Remove the accumulator, whatever is in it. Idempotent.

        Raises:
            DiskError: it cannot be removed. NotDurable: a power loss may bring it back.
        """
        with self._lock:
            if self._closed:
                return
            try:
                # Whoever adds there would put back what it has read, with all that is in it.
                with self._place.alone():
                    self._remove()
            except DiskError as error:
                if error.errno != errno.ENOENT:
                    raise
                self._closed = True  # its directory is gone

    def _remove(self) -> None:
        self._closed = True
        self._place.remove(durable=self._options.get("durable", True))

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"{self._place.directory}: its mean was closed")

    def _free_name(self) -> str:
        """What to call a contribution without a name: others may have taken a number for theirs."""
        number = len(self) + 1
        while f"contribution {number}" in self._ledger.weights:
            number += 1
        return f"contribution {number}"

    def _landed(self, catalog: Catalog, label: str, closing: ExitStack) -> Catalog:
        """The catalog with everything of it on this machine, ready to be read."""
        refs = dict(catalog)
        far: dict[Hashable, list[TensorRef]] = {}  # of one that goes by several names, all together
        for ref in refs.values():
            if not is_near(ref):
                far.setdefault(ref.identity(), []).append(ref)
        if not far:
            return catalog
        closing.enter_context(self._place.room(sum(ref.nbytes for ref, *_ in far.values())))
        scratch = Scratch(self._place.directory)
        closing.callback(scratch.close)
        abort = self._options.get("abort") or Abort()
        for same in far.values():
            ref = same[0]
            try:
                span = scratch.append(heeding(ref.pieces(), abort), ref.nbytes)
            except Aborted:
                raise
            except WeighlockError as error:
                named(error, f"{label}: tensor {ref.name!r}")
                raise
            refs.update({each.name: StoredRef(each.spec, scratch, span) for each in same})
        return Catalog(
            refs, catalog.metadata, beside=Beside(catalog.aliases, groups=catalog.groups)
        )

    def _read(self, closing: ExitStack) -> Catalog | None:
        """The accumulator, if somebody was added, and its ledger.

        The file knows best: another process may have added to it, and whoever was interrupted after
        the rename may not have noted it.
        """
        found = self._place.opened(self._options.get("limits"), closing)
        if found is None:
            if not self._ledger.weights:
                return None
            raise SourceError(
                f"{self._place.label}: is gone, and with it what {len(self)} contributed: another "
                "process may have closed the mean; begin it anew"
            )
        self._ledger = Ledger.of(found.metadata.get(LEDGER_KEY), self._place.label)
        return self._ledger.with_complex(found)

    def _count(self, added: Contributor, file: Catalog | None, before: Catalog | None) -> None:
        """Put the next accumulator in the place of the one before.

        Args:
            added: who is added, with everything on this machine.
            file: what was opened for it, if this did.
            before: the accumulator, if anybody was added.
        """
        label, landed, weight = added.label, added.catalog, added.weight
        given: Given = [(label, landed, weight)]
        if before is not None:
            given.insert(0, (_ACCUMULATOR, before, 1.0))
        dtypes = {name: ref.dtype for name, ref in landed.items()}
        self._check_dtypes(label, dtypes, before or {})
        ledger = self._ledger
        after = ledger.counting(
            label,
            weight,
            dtypes,
            agreed_metadata([landed]),
            notes=() if file is None else file.notes,
            unread={} if file is None else file.unreadable,
        )

        def part_of(shared: Shared, contributors: Sequence[Contributor]) -> Part:
            # Who is added comes last; before it, if anybody was added before, the mean so far.
            weights = [ledger.weight_of(shared.name), weight][-len(contributors) :]
            return self._part(shared, [weights[owner] for owner in shared.owners], after)

        options: Options = {**self._options, "metadata": {LEDGER_KEY: after.text()}}
        options["on_lost"] = "error"  # without it there would be nothing to count
        options["report"] = None
        try:
            self._place.renew(given, part_of, options)
            self._ledger = after
        except BaseException as error:
            self._see_counted(label, error)
            raise

    def _see_counted(self, label: str, error: BaseException) -> None:
        """Have an error that came when a contribution counted already say so."""
        try:
            with ExitStack() as closing:
                self._read(closing)
        except WeighlockError:
            return  # whoever adds next will see
        if label not in self._ledger.weights:
            return
        if isinstance(error, WeighlockError):
            named(error, f"{label}: is counted")
        else:
            error.add_note(f"{label} is counted")

    def _check_dtypes(
        self, label: str, dtypes: Mapping[str, DType], before: "Mapping[str, TensorRef]"
    ) -> None:
        for name, dtype in dtypes.items():
            is_rounded = name in before and not is_averaged(dtype) and before[name].dtype != dtype
            if is_rounded and self._kept_dtype(dtype) is dtype:
                raise CombineError(
                    f"{label}: tensor {name!r} is {dtype}, of which a mean was begun with "
                    f'integers="round": it cannot go on with {self._integers!r}',
                    contributor=label,
                    tensor=name,
                )
            known = self._ledger.dtypes.get(name, dtype)
            if dtype is not known or dtype is DType.F4:
                others = f"but {known} before" if dtype is not known else "which is not accumulated"
                raise CombineError(
                    f"{label}: tensor {name!r} is {dtype}, {others}", contributor=label, tensor=name
                )

    def _part(self, shared: Shared, weights: Sequence[float], after: Ledger) -> Part:
        dtype = after.dtypes[shared.name]
        kept = self._kept_dtype(dtype)
        total = after.weight_of(shared.name)
        shares = tuple(weight / total for weight in weights)
        dtypes = tuple(ref.dtype for ref in shared.refs)
        how: Combine = Agreed(dtype, shares, self._integers)
        if kept is not dtype or is_averaged(dtype):
            how = WeightedSum(dtypes, shares, kept, finite=self._finite, is_mean=True)
        shape = shared.refs[0].shape
        spec = TensorSpec(shared.name, kept, (*shape, 2) if dtype.is_complex else shape)
        return Part(spec, shared.refs, shared.owners, how)

    def _kept_dtype(self, dtype: DType) -> DType:
        """In what the mean so far of such a tensor, or of the parts of complex numbers, is kept."""
        if not is_averaged(dtype):
            return DType.F64 if self._integers == "round" and not dtype.is_packed else dtype
        bits = unit_dtype(dtype).bits
        if bits > 32:  # float32 would not even hold what all agree on
            return DType.F64
        return self._accumulate or (DType.F32 if bits <= 16 else DType.F64)
