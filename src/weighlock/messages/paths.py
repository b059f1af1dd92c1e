"""The way from an object to a place in it, as in `$.weights['layer.3'].hook`. Knows text only."""

from collections.abc import Iterable

__all__ = ["dotted", "path_of", "shown"]

_LONGEST = 60
_LONG_BITS = 8192
"""Python writes longer ints in hexadecimal only."""


def path_of(steps: Iterable[object]) -> str:
    """The path of keys and positions; None is a step that has no name."""
    return "$" + "".join(_shown(step) for step in steps if step is not None)


def _shown(step: object) -> str:
    if isinstance(step, str) and step.isidentifier() and len(step) <= _LONGEST:
        return f".{step}"
    return f"[{shown(step, _LONGEST)}]"


def shown(value: object, longest: int) -> str:
    """What a value looks like, for an error: whatever it is, this gives a text."""
    try:
        text = repr(value)
    except Exception:  # Python writes no int of more than 4,300 digits, wherever it is held
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[: longest - 1] + "…"


def dotted(steps: Iterable[object]) -> str:
    """The same as a name that a tensor may have."""
    return ".".join(_text(step) for step in steps if step is not None).replace("\0", "")


def _text(step: object) -> str:
    """The same text for equal keys: sets have no order of their own."""
    if isinstance(step, frozenset):
        return f"{{{', '.join(sorted(map(_text, step)))}}}"
    if isinstance(step, tuple):
        return f"({', '.join(map(_text, step))})"
    if isinstance(step, int):
        return str(step) if step.bit_length() <= _LONG_BITS else hex(step)
    return str(step)
