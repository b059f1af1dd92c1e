"""What else is made of models element by element: differences, steps, medians, trimmed means."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from weighlock.combining.combination import Combination, Given, Options
from weighlock.combining.contributors import Combinable, Contributor, Shared, labelled, weighed
from weighlock.combining.integers import Agreed, IntegerPolicy, IntegerSum
from weighlock.combining.outcome import Out
from weighlock.combining.plan import Part
from weighlock.combining.rounding import is_averaged
from weighlock.combining.sorting import TrimmedMean
from weighlock.combining.sums import WeightedSum
from weighlock.errors import CombineError
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec

if TYPE_CHECKING:
    from weighlock.combining.desk import Combine
    from weighlock.tensors.dtypes import DTypeLike

__all__ = ["apply", "difference", "median", "trimmed_mean"]


def difference(
    a: Combinable,
    b: Combinable,
    out: Out = None,
    *,
    dtype: "DTypeLike | None" = None,
    finite: bool = True,
    **options: Unpack[Options],
) -> Catalog:
    """What to add to `b` to get `a`: a - b for every element.

    Integers are subtracted exactly, and refused if the result does not fit; bools become I8.

    Args:
        a: a catalog, state dict, path or URL.
        b: another, of the same names and shapes; dtypes may differ.
        out: the file to write, or a spool; the result is in memory if not given.
        dtype: of the floating-point tensors of the result, itself floating-point and not packed;
            those of `a` if not given. Complex and packed ones stay what they are.
        finite: refuse NaN and infinity.
        **options: as `mean` takes them. `missing="skip"` leaves out what only one of the two has.

    Raises:
        CombineError: shapes, names or numbers are refused; and as `mean` raises.
    """
    _check_both_are_needed(options)
    wanted = None if dtype is None else DType.of(dtype)
    if wanted is not None and (not wanted.is_float or wanted.is_packed):
        raise CombineError(
            f"dtype={dtype!r}: a difference is made in a floating-point dtype that is not packed, "
            "such as F32, F64 or BF16"
        )

    def part_of(shared: Shared, contributors: Sequence[Contributor]) -> Part | None:
        if shared.lacking:
            return None
        kind = shared.refs[0].dtype
        if kind.is_float and not kind.is_packed:
            kind = wanted or kind
        elif kind is DType.BOOL:
            kind = DType.I8
        return _step(shared, contributors, -1.0, kind, finite)

    given: Given = [(labelled("a", a), a, 1.0), (labelled("b", b), b, 1.0)]
    return Combination(out, options, same_dtype=False, keeps_groups=False).of(given, part_of)


def apply(
    base: Combinable,
    delta: Combinable,
    scale: float = 1.0,
    out: Out = None,
    *,
    finite: bool = True,
    **options: Unpack[Options],
) -> Catalog:
    """A step from a model: base + scale · delta for every element, in the dtypes of the base.

    Integers are added to the nearest integer; a sum that does not fit is refused.

    Args:
        base: a catalog, state dict, path or URL.
        delta: what to add, such as a `difference`; its dtypes may differ.
        scale: the length of the step; a server's learning rate.
        out: the file to write, or a spool; the result is in memory if not given.
        finite: refuse NaN and infinity.
        **options: as `mean` takes them. `missing="skip"` keeps what the delta lacks as it is, -0
            and NaN too.

    Raises:
        CombineError: shapes, names or numbers are refused; and as `mean` raises.
    """
    _check_both_are_needed(options)
    scale = _number("scale", scale)
    if not math.isfinite(scale):
        raise CombineError(f"scale={scale}: a step has a finite length")

    def part_of(shared: Shared, contributors: Sequence[Contributor]) -> Part:
        if 0 in shared.lacking:
            raise CombineError(
                f"{contributors[0].label}: lacks tensor {shared.name!r}, which the delta has",
                contributor=contributors[0].label,
                tensor=shared.name,
            )
        return _step(shared, contributors, scale, shared.refs[0].dtype, finite)

    given: Given = [(labelled("base", base), base, 1.0), (labelled("delta", delta), delta, 1.0)]
    return Combination(out, options, same_dtype=False).of(given, part_of)


def _number(name: str, value: object) -> float:
    """A number of Python's or numpy's. Text is none: it is more likely meant for `out`."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        pass
    raise CombineError(f"{name}={value!r}: it is a number; the file to write is out=")


def _check_both_are_needed(options: Options) -> None:
    if options.get("on_lost") == "exclude":
        raise CombineError('on_lost="exclude": of two models neither can be left out')


def _step(
    shared: Shared,
    contributors: Sequence[Contributor],
    scale: float,
    dtype: DType,
    finite: bool,
) -> Part:
    dtypes = tuple(ref.dtype for ref in shared.refs)
    factors = (1.0, scale)[: len(dtypes)]
    spec = TensorSpec(shared.name, dtype, shared.refs[0].shape)
    kinds = {is_averaged(kind) for kind in dtypes}
    packed = [kind for kind in (dtype, *dtypes) if kind.is_packed]
    if len(kinds) > 1 or (packed and len({dtype, *dtypes}) > 1) or _mixed_complex(dtype, *dtypes):
        label = contributors[shared.owners[-1]].label
        raise CombineError(
            f"{label}: tensor {shared.name!r} is {dtypes[-1]}, which does not go together with "
            f"{dtypes[0]}",
            contributor=label,
            tensor=shared.name,
        )
    how: Combine
    if len(dtypes) == 1:  # kept as it is: a sum of one has no negative zeros, and no NaN
        how = Agreed(dtype, factors, "first")
    elif is_averaged(dtype):
        how = WeightedSum(dtypes, factors, dtype, finite=finite)
    elif packed:
        how = Agreed(dtype, factors)
    else:
        how = IntegerSum(dtypes, factors, dtype)
    return Part(spec, shared.refs, shared.owners, how)


def _mixed_complex(*dtypes: DType) -> bool:
    return len({dtype.is_complex for dtype in dtypes}) > 1


def median(
    catalogs: "Mapping[str, Combinable] | Iterable[Combinable]",
    out: Out = None,
    *,
    integers: IntegerPolicy = "equal",
    finite: bool = True,
    **options: Unpack[Options],
) -> Catalog:
    """The median of every element; of an even number of models, the mean of the middle two.

    Args:
        catalogs: as for `mean`.
        out: the file to write, or a spool; the result is in memory if not given.
        integers: as for `mean`; "round" takes the integer nearest to the median.
        finite: refuse NaN and infinity.
        **options: as `mean` takes them.

    Raises:
        CombineError: shapes, names or numbers are refused; and as `mean` raises.
    """
    return _trimmed(catalogs, None, out, integers, finite, options)


def trimmed_mean(
    catalogs: "Mapping[str, Combinable] | Iterable[Combinable]",
    share: float,
    out: Out = None,
    *,
    integers: IntegerPolicy = "equal",
    finite: bool = True,
    **options: Unpack[Options],
) -> Catalog:
    """The mean of every element without its extremes.

    Of n values the k = ⌊share · n⌋ smallest and the k largest are left out.

    Args:
        catalogs: as for `mean`.
        share: from 0 to less than a half.
        out: the file to write, or a spool; the result is in memory if not given.
        integers: as for `mean`; "round" takes the integer nearest to the trimmed mean.
        finite: refuse NaN and infinity.
        **options: as `mean` takes them.

    Raises:
        CombineError: shapes, names or numbers are refused; and as `mean` raises.
    """
    share = _number("share", share)
    if not 0 <= share < 0.5:
        raise CombineError(
            f"share={share}: must be at least 0 and less than 0.5, as it is cut off at each end"
        )
    return _trimmed(catalogs, share, out, integers, finite, options)


def _trimmed(
    catalogs: "Mapping[str, Combinable] | Iterable[Combinable]",
    share: float | None,
    out: Out,
    integers: IntegerPolicy,
    finite: bool,
    options: Options,
) -> Catalog:
    def part_of(shared: Shared, contributors: Sequence[Contributor]) -> Part:
        count, dtype = len(shared.refs), shared.refs[0].dtype
        # Products such as 0.1 * 10 must not fall below the whole number they are meant to be.
        most = (count - 1) // 2
        cut = most if share is None else min(most, math.floor(share * count + 1e-9))
        if dtype.is_complex:
            raise CombineError(
                f"tensor {shared.name!r} is {dtype}: complex numbers have no order",
                tensor=shared.name,
            )
        how: Combine
        if is_averaged(dtype) or (integers == "round" and not dtype.is_packed):
            how = TrimmedMean((dtype,) * count, cut, finite)
        else:
            how = Agreed(dtype, (1 / count,) * count, integers)
        return Part(
            TensorSpec(shared.name, dtype, shared.refs[0].shape), shared.refs, shared.owners, how
        )

    asked = Combination(out, options, integers=integers)
    return asked.of(weighed(catalogs, None), part_of)
