"""Words of the other side, as errors and logs may show them. Knows text only."""

__all__ = ["printable"]


def printable(text: str, most: int = 100) -> str:
    """One short line that no terminal takes for a command: what cannot be printed is escaped."""
    found = text[: most + 1]
    if not found.isprintable():
        found = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in found
        )
    return found if len(found) <= most else f"{found[: most - 1]}…"
