"""What an origin is shown, as options of the verbs that dial. Knows click and files of headers."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import click

from weighlock.cli.shared import is_url, tell
from weighlock.cli.text import escaped
from weighlock.errors import SourceError
from weighlock.sources.access import Access, Address, Credential
from weighlock.sources.retrying import RETRIES

__all__ = ["access_to", "credential_options"]

_FILE = click.Path(exists=True, dir_okay=False)

_OPTIONS = (
    click.option(
        "--header",
        "headers",
        multiple=True,
        metavar="'NAME: TEXT'",
        help="A header for the server, as in 'Authorization: Bearer …'; may be repeated.",
    ),
    click.option("--header-file", type=_FILE, help="A file with a header in each line."),
    click.option("--ca", type=_FILE, help="Certificates to trust instead of the system's."),
    click.option("--cert", type=_FILE, help="Client certificate, for a server that asks for one."),
    click.option("--key", type=_FILE, help="Its key, if it is not in the same file."),
)


def credential_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options, for a verb that dials; it is called with what they say as `credential`."""

    @wraps(command)
    def told(
        *arguments: Any,
        headers: Sequence[str],
        header_file: str | None,
        ca: str | None,
        cert: str | None,
        key: str | None,
        **options: Any,
    ) -> Any:
        credential = Credential(_headers(headers, header_file), ca, cert, key)
        with _retries_told():
            return command(*arguments, credential=credential, **options)

    for option in reversed(_OPTIONS):
        told = option(told)
    return told


@contextlib.contextmanager
def _retries_told() -> Iterator[None]:
    """While the block lasts, stderr tells that somebody does not answer and is asked again."""
    logger = logging.getLogger(RETRIES)
    lines = _Lines()
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


class _Lines(logging.Handler):
    """Asks for stderr each time: beside a progress bar it is another one."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(f"weighlock: {escaped(record.getMessage())}")


def access_to(credential: Credential, *places: str) -> Access:
    """The credential for the one origin that is among paths and URLs.

    Raises:
        UsageError: there is more than one, and which of them is meant nobody said.
    """
    origins = {Address.of(place).origin for place in places if is_url(place)}
    if len(origins) > 1 and credential != Credential():
        raise click.UsageError(
            f"credentials are for one server, and these are {len(origins)}: "
            f"{', '.join(sorted(origins))}"
        )
    return Access(origins=dict.fromkeys(origins, credential))


def _headers(given: Sequence[str], path: str | None) -> dict[str, str]:
    lines = list(given)
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                lines += [line.strip() for line in file if line.strip()]
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{path}: is not UTF-8: {error}") from error
    headers = {}
    for line in lines:
        name, colon, text = line.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter("a header is written 'Name: text'", param_hint="--header")
        headers[name.strip()] = text.strip()
    return headers
