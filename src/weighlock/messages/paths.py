"""The way from an object to a place in it, as in `$.weights['layer.3'].hook`. Knows text only."""

from collections.abc import Iterable

__all__ = ["dotted", "path_of"]

_LONGEST = 60


def path_of(steps: Iterable[object]) -> str:
    """The path of keys and positions; None is a step that has no name."""
    return "$" + "".join(_shown(step) for step in steps if step is not None)


def _shown(step: object) -> str:
    if isinstance(step, str) and step.isidentifier() and len(step) <= _LONGEST:
        return f".{step}"
    text = repr(step)
    return f"[{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}]"


def dotted(steps: Iterable[object]) -> str:
    """The same as a name that a tensor may have."""
    return ".".join(_text(step) for step in steps if step is not None).replace("\0", "")


def _text(step: object) -> str:
    """The same text for equal keys: sets have no order of their own."""
    if isinstance(step, frozenset):
        return f"{{{', '.join(sorted(map(_text, step)))}}}"
    if isinstance(step, tuple):
        return f"({', '.join(map(_text, step))})"
    return str(step)
