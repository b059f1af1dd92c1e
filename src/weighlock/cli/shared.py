"""What several verbs need: parameters, JSON output, words on stderr. Knows click."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from weighlock.cli.text import escaped, parse_size
from weighlock.errors import DiskError
from weighlock.limits import Limits
from weighlock.sources.access import shown

__all__ = [
    "SIZE",
    "check_directory",
    "check_target",
    "connections_option",
    "is_url",
    "json_option",
    "label",
    "note_other_name",
    "patience_option",
    "print_json",
    "print_json_line",
    "print_notes",
    "tell",
    "tell_error",
    "weights",
]


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()

_OTHER_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".gguf", ".npz", ".npy")
"""Names that other formats go by."""

connections_option = click.option(
    "--connections",
    default=4,
    type=click.IntRange(1, 64),
    show_default=True,
    help="Requests under way at once.",
)
patience_option = click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=0),
    default=Limits().patience_s,
    show_default=True,
    metavar="SECONDS",
    help="How long to try again while nothing arrives.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")


def weights(name: str) -> Callable[[Any], Any]:
    """The argument for weights to read."""
    return click.argument(name, type=click.Path())


def is_url(path: str) -> bool:
    """Whether weights are to be read from a server."""
    return path.lower().startswith(("http://", "https://"))


def check_target(path: str, *, force: bool, is_directory: bool = False) -> None:
    """Refuse to write to what is there, unless told to replace it.

    Raises:
        DiskError: something is there. Whether a directory of shards is empty, who writes it sees.
        UsageError: it would be a file called "-", which nobody means.
    """
    if path == "-":
        raise click.UsageError("weights are not written to standard output; name a file")
    if is_directory:
        return
    if os.path.isdir(path):
        raise DiskError(f"{path}: is a directory; name a file in it")
    check_directory(path)
    if os.path.lexists(path) and not force:
        raise DiskError(f"{path}: exists; --force replaces it")


def check_directory(path: str) -> None:
    """Raise `DiskError` if a path to write to ends as a directory does, and there is none."""
    if path.endswith(os.sep) and not os.path.isdir(path):
        raise DiskError(f"{path}: there is no such directory; make it first, or name a file")


def note_other_name(target: str) -> None:
    """Say that what was written is safetensors, if its name says something else."""
    ending = os.path.splitext(target)[1]
    if ending.lower() in _OTHER_ENDINGS:
        tell(f"note: {escaped(target)} is a safetensors file, though its name ends with {ending}")


def label(path: str) -> str:
    """What to call a path or URL in output: the id of a share is not shown. Not escaped."""
    return shown(path) if is_url(path) else path


def tell(text: str) -> None:
    """Say something on stderr. What was done is done, also if nobody can be told."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def tell_error(error: BaseException) -> None:
    """Say what went wrong, in one line, with what was noted of it on the way."""
    notes = getattr(error, "__notes__", ())
    text = "; ".join([str(error) or type(error).__name__, *notes])
    tell(f"weighlock: {escaped(text)}")


def print_notes(notes: Iterable[str], unreadable: Mapping[str, str]) -> None:
    """Tell on stderr what a reader of a catalog should know, and what is not in it."""
    for note in notes:
        tell(f"note: {escaped(note)}")
    for name, reason in unreadable.items():
        tell(f"note: {escaped(name)} is left out: {escaped(reason)}")


def _jsonable(value: object) -> object:
    """The value with "NaN", "Infinity" or "-Infinity" for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_json(value: object) -> None:
    """Print a value as indented JSON; text from files is escaped by the format itself."""
    # Not msgspec: paths that are not UTF-8 hold lone surrogates, which it refuses.
    value = _jsonable(value)
    if isinstance(value, list):  # one line for each, as grep likes it
        lines = ",\n".join(f"  {_dumped(item)}" for item in value)
        text = f"[\n{lines}\n]" if value else "[]"
    else:
        text = _dumped(value, indent=2)
    _echo_json(text)


def print_json_line(value: object) -> None:
    """Print a value as one line of JSON, for programs that read a line and go on."""
    _echo_json(_dumped(_jsonable(value)))


def _dumped(value: object, indent: int | None = None) -> str:
    # Where the output is not UTF-8, every other letter is escaped as JSON does it.
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    return json.dumps(value, ensure_ascii=not is_utf8, indent=indent)


def _echo_json(text: str) -> None:
    # JSON leaves DEL and the C1 controls as they are; terminals do not.
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))
