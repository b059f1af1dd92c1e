"""The weighted mean of models."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from weighlock.combining.combination import Combination, Options
from weighlock.combining.contributors import Combinable, Contributor, Shared, weighed
from weighlock.combining.integers import Agreed, IntegerPolicy
from weighlock.combining.outcome import Out
from weighlock.combining.plan import Part
from weighlock.combining.rounding import is_averaged
from weighlock.combining.sums import WeightedSum
from weighlock.errors import CombineError
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.naming import some_names
from weighlock.tensors.spec import TensorSpec

if TYPE_CHECKING:
    from weighlock.combining.desk import Combine
    from weighlock.tensors.dtypes import DTypeLike

__all__ = ["accumulated_in", "mean"]


def mean(
    catalogs: "Mapping[str, Combinable] | Iterable[Combinable]",
    weights: "Iterable[float] | Mapping[str, float] | None" = None,
    out: Out = None,
    accumulate: "DTypeLike | None" = None,
    *,
    integers: IntegerPolicy = "equal",
    finite: bool = True,
    **options: Unpack[Options],
) -> Catalog:
    """The weighted mean of models, block by block: Σ wᵢ xᵢ / Σ wᵢ for every element.

    Args:
        catalogs: catalogs, state dicts, paths or URLs, in the order in which they count; or a
            mapping of names to them, and errors and reports then use the names.
        weights: from 0 on; all the same if not given.
        out: the file to write, or a spool; the result is in memory if not given.
        accumulate: "f32" sums in float32 and leaves it at that, except for numbers of 64 bits.
            Otherwise every element is its float64 sum, rounded once.
        integers: what becomes of integers and bools that are not the same everywhere: "equal"
            refuses them, "first" takes the first contributor's, "max" the largest, "round" the
            nearest integer to the mean.
        missing: "skip" makes a tensor of those who have it, instead of refusing.
        finite: refuse NaN and infinity.
        on_lost: "exclude" leaves out who cannot be read to the end, entirely, and begins anew.
        metadata: for the result; what all contributors agree on if not given.
        durable: survive a power loss once this returns.
        threads: how many work; one a core, four at the most, if 0.
        access: credentials for URLs.
        verify: check what comes from shares against its digests.
        abort: `abort.set()` in any thread ends this with `Aborted`. For catalogs from URLs that are
            open already, `open` is given it as well.
        progress: called with bytes read and bytes to read, from any thread.
        report: called with what was done, once it is.
        limits: bounds of what files may ask for.

    Returns:
        The result, from where it now lies. Its notes say who was left out.

    Raises:
        CombineError: shapes, dtypes, names, numbers or weights are refused; names contributor and
            tensor.
        SourceError, TransferError, RemoteProtocolError: a contributor could not be read.
        FormatError, LimitExceeded: a contributor is broken, or asks for too much.
        TypeError: there is no such option, or a contributor is none, or `out` no place.
        DiskError: the result could not be written.
        Nothing is left behind then, and `out` is as it was.
    """
    single = accumulated_in(accumulate) is DType.F32

    def part_of(shared: Shared, contributors: Sequence[Contributor]) -> Part:
        counted = shared.only(lambda owner: contributors[owner].weight > 0)
        if not counted.refs:
            owners = some_names(contributors[owner].label for owner in shared.owners)
            raise CombineError(
                f"tensor {shared.name!r}: everybody who has it has the weight 0: {owners}; "
                "one of them must weigh more",
                tensor=shared.name,
            )
        total = sum(contributors[owner].weight for owner in counted.owners)
        shares = tuple(contributors[owner].weight / total for owner in counted.owners)
        dtype = counted.refs[0].dtype
        how: Combine
        if is_averaged(dtype):
            how = WeightedSum((dtype,) * len(shares), shares, dtype, single, finite, is_mean=True)
        else:
            how = Agreed(dtype, shares, integers)
        spec = TensorSpec(shared.name, dtype, counted.refs[0].shape)
        return Part(spec, counted.refs, counted.owners, how)

    asked = Combination(out, options, integers=integers)
    return asked.of(weighed(catalogs, weights), part_of)


def accumulated_in(accumulate: "DTypeLike | None") -> DType | None:
    """What sums were asked to be made in: F32, F64, or None if nobody asked.

    Raises:
        CombineError: it is neither.
    """
    if accumulate is None:
        return None
    dtype = DType.of(accumulate)
    if dtype not in (DType.F32, DType.F64):
        raise CombineError(f"accumulate={accumulate!r}: sums are made in F32 or F64")
    return dtype
