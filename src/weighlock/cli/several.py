"""A verb that looks at several paths, one after the other."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from weighlock.cli.shared import print_json, tell_error
from weighlock.errors import WeighlockError

__all__ = ["for_each", "print_each"]

T = TypeVar("T")


def for_each(
    paths: Sequence[str], look: Callable[[str], T], failed: Callable[[str, WeighlockError], T]
) -> tuple[list[T], bool]:
    """What looking at each gave, and whether all went well.

    What is wrong with one of several is told, and the others are looked at all the same.

    Args:
        paths: what to look at.
        look: looks at one.
        failed: what there is of one that could not be looked at.

    Raises:
        WeighlockError: there is only one, and it could not be looked at.
    """
    if len(paths) == 1:
        return [look(paths[0])], True
    found, is_well = [], True
    for path in paths:
        try:
            found.append(look(path))
        except WeighlockError as error:
            sys.stdout.flush()  # what was said of others comes first
            tell_error(error)
            found.append(failed(path, error))
            is_well = False
    return found, is_well


def print_each(facts: Sequence[object]) -> None:
    """Print the facts as JSON: of one path as they are, of several as a list."""
    print_json(facts[0] if len(facts) == 1 else list(facts))
