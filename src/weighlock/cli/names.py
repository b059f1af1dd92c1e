"""Which tensors are meant: each pattern and each rename must match something, or is misspelt."""

import fnmatch
import re
from collections.abc import Sequence

import click

from weighlock.errors import LayoutError
from weighlock.tensors.catalog import Catalog, matching, unmatched

__all__ = ["chosen_by", "renamed", "without_match"]


def chosen_by(catalog: Catalog, patterns: Sequence[str]) -> Catalog:
    """The tensors whose names match a glob pattern; all that are read if there is none.

    Raises:
        LayoutError: one of the patterns matches nothing.
    """
    if not patterns:
        return catalog.readable()
    missing = without_match(catalog, patterns)
    if missing:
        raise unmatched(missing)
    return matching(catalog, patterns)


def without_match(catalog: Catalog, patterns: Sequence[str]) -> list[str]:
    """The patterns that match no name: neither of a tensor nor of one that cannot be read."""
    missing = _unmatched(list(catalog), patterns)
    if missing:  # only now: what a sharded model leaves out, its files have to tell
        without_data = [name for name, group in catalog.groups.items() if not group.parts]
        missing = _unmatched([*catalog.unreadable, *without_data], missing)
    return missing


def _unmatched(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [
        pattern
        for pattern in patterns
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]


def renamed(catalog: Catalog, rename: str) -> Catalog:
    """The tensors under the names that a REGEX=TEXT makes of theirs.

    Raises:
        LayoutError: it matches no name, or two tensors would have one.
        BadParameter: it is none.
    """
    pattern, equals, text = rename.rpartition("=")  # the last: (?<=…) and (?=…) hold one too
    if not equals or not pattern:
        raise click.BadParameter(
            f"{rename!r} has no '=', or nothing before it", param_hint="--rename"
        )
    try:
        if not any(re.search(pattern, name) for name in catalog):
            raise LayoutError(f"--rename {rename!r}: no name of a tensor matches {pattern!r}")
        return catalog.rename(lambda name: re.sub(pattern, text, name))
    except re.error as error:
        raise click.BadParameter(f"{rename!r}: {error}", param_hint="--rename") from error
