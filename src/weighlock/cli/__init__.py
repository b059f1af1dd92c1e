"""The `weighlock` command. Knows verbs and exit codes; each verb is a module of its own.

Exit codes: 0 success; 1 a reported error (one line on stderr), or the answer no of a verb that was
asked a question (`verify --finite`, `scan`, `diff --exit-code`); 2 wrong usage, or no answer could
be found; 128 + n ended by signal n, but 0 for `serve`, which a signal tells to end.
"""

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, TypeGuard

import click

from weighlock import __version__
from weighlock.cli.shared import tell, tell_error
from weighlock.errors import DiskError, WeighlockError

__all__ = ["main"]

_VERBS = (
    *("ls", "info", "convert", "verify", "diff", "scan"),
    *("serve", "pull", "push", "mean", "sweep", "demo"),
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _ReaderGone(Exception):
    """Whoever read our output has gone, as `| head` does. No OSError: click would exit with 1."""


class _Verbs(click.Group):
    """Loads the module of a verb when it is called: `weighlock ls` does not import the demo."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:  # prints --help
        with _broken_pipes():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipes():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(f"weighlock.cli.{cmd_name}").command
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weighlock")
def _weighlock() -> None:
    """Look into model weights, check, convert and move them, holding a few megabytes."""


@contextlib.contextmanager
def _broken_pipes() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderGone from error


def main() -> NoReturn:
    """Run the command and exit."""
    _open_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` starts its command
            signal.signal(number, _end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one that cannot show → still shows the rest
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _weighlock.main(standalone_mode=False)
        with _broken_pipes():
            if sys.stdout is not None:  # None if the caller closed it: `>&-`
                sys.stdout.flush()
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt, SystemExit) as error:
        met = error.__cause__ if isinstance(error, click.Abort) else error  # click's own for Ctrl-C
        for note in getattr(met, "__notes__", ()):
            tell(f"weighlock: {note}")
        code = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
    except _ReaderGone:
        # What is still in the buffer goes nowhere: Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except (WeighlockError, OSError, MemoryError) as error:
        if _is_of_stdout(error):
            error = DiskError(f"cannot write to standard output: {error.strerror}")
        tell_error(error)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _is_of_stdout(error: BaseException) -> TypeGuard[OSError]:
    """Whether writing what is printed has failed: all else says itself what it is about."""
    if not isinstance(error, OSError) or isinstance(error, WeighlockError):
        return False
    return error.filename is None and error.errno in _FULL


def _open_streams() -> None:
    """Put nothing where a stream was closed: the next file opened would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind, so that context managers remove what they made, and exit as the signal would."""
    raise SystemExit(128 + number)
