"""One call that combines contributors: opened, aligned, made, and told about. Does; plans nothing.

What differs between a mean and a median is how the rows of a tensor become a part; that is given.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypedDict, get_args

from weighlock.abort import Abort
from weighlock.combining.contributors import (
    Combinable,
    Contributor,
    Lost,
    Missing,
    Opening,
    Shared,
    agreed_metadata,
    aligned,
    in_file_order,
    is_loss,
)
from weighlock.combining.engine import Setting, combine_blocks
from weighlock.combining.integers import IntegerPolicy
from weighlock.combining.outcome import (
    Out,
    Report,
    Target,
    agreed_aliases,
    agreed_groups,
    notes_on,
    target_for,
    unread_of,
)
from weighlock.combining.plan import CONNECTED, Part
from weighlock.disk.spool import Spool
from weighlock.errors import CombineError, WeighlockError
from weighlock.formats.grouping import written_groups
from weighlock.formats.safetensors import check_metadata
from weighlock.formats.save import check_texts
from weighlock.lifetimes import Lifetime
from weighlock.limits import Limits
from weighlock.sources.access import Access
from weighlock.sources.resting import descriptors_to_hold
from weighlock.tensors.catalog import Catalog

__all__ = [
    "Combination",
    "Given",
    "OnLost",
    "Options",
    "PartOf",
    "check_options",
    "opening_for",
]

OnLost: TypeAlias = Literal["error", "exclude"]

Given: TypeAlias = list[tuple[str, Combinable, float]]
"""Label, contributor and weight of each."""

PartOf: TypeAlias = Callable[[Shared, Sequence[Contributor]], "Part | None"]
"""How a tensor is made; None leaves it out."""


class Options(TypedDict, total=False):
    """What every call that combines models may be told; see `mean` for what each means."""

    missing: Missing
    on_lost: OnLost
    metadata: Mapping[str, str] | None
    durable: bool
    threads: int
    access: Access | None
    verify: bool
    abort: Abort | None
    progress: Callable[[int, int], None] | None
    report: Callable[[Report], None] | None
    limits: Limits | None


def check_options(options: Options, integers: IntegerPolicy = "equal") -> None:
    """Refuse what a call cannot mean: a misspelt policy must not become another one.

    Raises:
        TypeError: there is no such option.
        CombineError: it has no such value.
    """
    unknown = options.keys() - Options.__optional_keys__
    if unknown:
        there = ", ".join(sorted(Options.__optional_keys__))
        raise TypeError(f"there is no option {min(unknown)!r}; there are: {there}")
    policies = (
        ("integers", integers, get_args(IntegerPolicy)),
        ("missing", options.get("missing", "error"), get_args(Missing)),
        ("on_lost", options.get("on_lost", "error"), get_args(OnLost)),
    )
    for name, value, values in policies:
        if value not in values:
            raise CombineError(f"{name}={value!r}: must be one of {', '.join(map(repr, values))}")
    threads = options.get("threads", 0)
    if not isinstance(threads, int) or threads < 0:
        raise CombineError(
            f"threads={threads!r}: must be a whole number; 0 is one for each core, four at the most"
        )


def opening_for(options: Options) -> Opening:
    """How contributors are opened for a call that was told this."""
    return Opening(
        options.get("access"),
        options.get("verify", True),
        options.get("limits"),
        options.get("abort"),
        options.get("missing", "error"),
    )


@dataclass(frozen=True, slots=True)
class Combination:
    """How a call was asked to combine; `of` does it.

    Raises:
        TypeError: there is no such option, or nothing can be put where the result shall go.
        CombineError: an option has no such value.
    """

    out: Out
    options: Options
    same_dtype: bool = True
    integers: IntegerPolicy = "equal"
    keeps_groups: bool = True
    """What several entries are together they are in the result: not in differences of indices."""

    def __post_init__(self) -> None:
        check_options(self.options, self.integers)
        if not isinstance(self.out, (str, os.PathLike, Spool, type(None))):
            what = type(self.out).__name__
            raise TypeError(f"out is a {what}: the result goes to a path, a spool, or memory")

    def of(self, given: Given, part_of: PartOf) -> Catalog:
        """The result. On any exception nothing lies beside the destination, which is untouched.

        Only if the result cannot be synced with its directory, or not be opened, is it in place.

        A contributor that is lost either ends this, or is left out as if it had never been given:
        what was made with it is thrown away, and all begins anew.
        """
        target, report = self._made(given, part_of)
        try:
            catalog = target.catalog()
        except BaseException:
            target.discard()
            raise
        tell = self.options.get("report")
        if tell is not None:
            tell(report)
        for note in report.notes():
            catalog = catalog.noted(note)
        return catalog

    def put(self, given: Given, part_of: PartOf) -> None:
        """As `of`, for whoever only wants it in its place: nothing is opened, or told, after that.

        Raises:
            NotDurable: an fsync failed. Only if that was the directory's is the result in place.
        """
        self._made(given, part_of)

    def _made(self, given: Given, part_of: PartOf) -> tuple[Target, Report]:
        excluded: dict[str, str] = {}
        with _Opened(self.options, len(given)) as opened:
            while True:
                try:
                    return self._once(given, part_of, opened, excluded)
                except Lost as lost:
                    if self.options.get("on_lost", "error") == "error":
                        raise lost.error from lost.error.__cause__
                    label = given[lost.owner][0]
                    opened.close(label, lost.error)
                    excluded[label] = str(lost.error).removeprefix(f"{label}: ")
                    given = [entry for entry in given if entry[0] != label]
                    if not any(weight for *_, weight in given):
                        who = "every contributor" + (" that has a weight" if given else "")
                        raise CombineError(
                            f"{who} was lost; the last one: {lost.error}", contributor=label
                        ) from lost.error

    def _once(
        self, given: Given, part_of: PartOf, opened: "_Opened", excluded: Mapping[str, str]
    ) -> tuple[Target, Report]:
        options = self.options
        contributors = [
            Contributor(label, opened.catalog(number, value, label), weight)
            for number, (label, value, weight) in enumerate(given)
        ]
        catalogs = [contributor.catalog for contributor in contributors]
        given_texts = options.get("metadata")
        aliases = agreed_aliases(catalogs, given_texts or ())
        tensors = aligned(
            contributors,
            options.get("missing", "error"),
            same_dtype=self.same_dtype,
            besides=aliases,
        )
        made = {s.name: part_of(s, contributors) for s in in_file_order(tensors)}
        parts = [part for part in made.values() if part is not None]
        # Last: what the files of a sharded model say is read from them.
        texts = agreed_metadata(catalogs) if given_texts is None else given_texts
        texts = check_metadata(texts)
        check_texts(texts, [part.spec for part in parts])
        aliases = {alias: name for alias, name in aliases.items() if made[name] is not None}
        groups = agreed_groups(catalogs, parts) if self.keeps_groups else {}
        target = target_for(
            self.out,
            parts,
            order=[shared.name for shared in tensors if made[shared.name] is not None],
            metadata={**written_groups(groups), **texts},
            aliases=aliases,
            durable=options.get("durable", True),
            limits=options.get("limits") or Limits(),
        )
        try:
            combine_blocks(parts, target, self._setting(contributors, opened.abort))
            target.finish()
        except BaseException:
            target.discard()
            raise
        values = [value for _, value, _ in given]
        return target, _report(parts, aliases, tensors, contributors, values, excluded)

    def _setting(self, contributors: Sequence[Contributor], abort: Abort) -> Setting:
        return Setting(
            labels=tuple(contributor.label for contributor in contributors),
            threads=self.options.get("threads", 0),
            directory=_directory(self.out),
            abort=abort,
            progress=self.options.get("progress"),
        )


class _Opened(Lifetime):
    """Contributors that were opened for a call, each until it is lost or the call is over.

    A contributor stays open while others are lost: an owner that waits for its receiver would take
    one who opens anew for one who has failed before.
    """

    def __init__(self, options: Options, count: int) -> None:
        self.abort = Abort()
        """Of this call alone: Ctrl-C ends what its threads wait for, and nobody else's work."""
        self._opening = replace(
            opening_for(options),
            abort=self.abort,
            rests=count > CONNECTED,
            limits=_shared_out(options.get("limits") or Limits(), count),
        )
        self._catalogs: dict[str, Catalog] = {}
        self._uses: dict[str, ExitStack] = {}
        self._all = ExitStack()
        theirs = options.get("abort") or Abort()
        self._all.enter_context(theirs.waking(lambda: self.abort.set(theirs.reason)))

    def _leave(self, error: BaseException | None) -> None:
        _end(self._all, error)

    def catalog(self, number: int, value: Combinable, label: str) -> Catalog:
        """The catalog of one, opened if it was not yet.

        Raises:
            Lost: it cannot be had.
            WeighlockError: or not be opened.
        """
        if label not in self._catalogs:
            uses = self._uses[label] = self._all.enter_context(ExitStack())
            try:
                self._catalogs[label] = self._opening.open(value, label, uses)
            except WeighlockError as error:
                if is_loss(error):
                    raise Lost(number, error) from error
                raise
        return self._catalogs[label]

    def close(self, label: str, error: WeighlockError) -> None:
        """Let go of one that was lost; its owner is told, if it can be."""
        self._catalogs.pop(label, None)
        _end(self._uses.pop(label), error)


def _end(stack: ExitStack, error: BaseException | None) -> None:
    """Tell all that were entered how it ended."""
    stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _directory(out: Out) -> str | None:
    """Where there is room for a result there is room for what it takes to make it."""
    if isinstance(out, Spool):
        return out.path
    return None if out is None else os.path.dirname(os.path.abspath(out))


def _report(
    parts: Sequence[Part],
    aliases: Mapping[str, str],
    tensors: Sequence[Shared],
    contributors: Sequence[Contributor],
    values: Sequence[Combinable],
    excluded: Mapping[str, str],
) -> Report:
    total = sum(contributor.weight for contributor in contributors)
    return Report(
        tensors=len(parts) + len(aliases),
        nbytes=sum(part.spec.nbytes for part in parts),
        read_bytes=sum(part.read_bytes for part in parts),
        weights={c.label: c.weight / total for c in contributors},
        skipped={
            shared.name: tuple(contributors[number].label for number in shared.lacking)
            for shared in tensors
            if shared.lacking
        },
        excluded=dict(excluded),
        unread=unread_of(values, contributors),
        of_files=notes_on(values, contributors),
    )


def _shared_out(limits: Limits, count: int) -> Limits:
    """Limits under which so many models together hold no more files than they may: perhaps none."""
    each = descriptors_to_hold() // max(1, count)
    return replace(limits, open_files=min(limits.open_files, each))
