"""nginx and curl: a file from one to the other, which is what a transfer is without tensors."""

import os
import subprocess

from benchmarks.contender import Contender

__all__ = ["curl_contenders", "run_curl"]

_RANGES = 4
_QUIETLY = ("--silent", "--show-error", "--fail", "--noproxy", "*")
"""For each of its transfers."""


def curl(prepared, *options):
    """The whole file, over one connection."""
    import weighlock

    run_curl(*options, "--output", prepared.path, prepared.owner.address["url"])
    return weighlock.open(prepared.path)


def _in_ranges(prepared):
    """Four parts at once, each into a file of its own: curl does not write into one."""
    url, size = (prepared.owner.address[key] for key in ("url", "size"))
    arguments, paths = ["--parallel", "--parallel-immediate"], []
    for number in range(_RANGES):
        first, end = (size * edge // _RANGES for edge in (number, number + 1))
        paths.append(f"{prepared.path}.{number}")
        arguments += ["--next", *_QUIETLY] if number else []
        arguments += ["--range", f"{first}-{end - 1}", "--output", paths[-1], url]
    run_curl(*arguments)
    return paths


def run_curl(*arguments):
    """One run of it, without progress and past any proxy."""
    subprocess.run(["curl", *_QUIETLY, *arguments], check=True)


def _checking_joined(check):
    def check_joined(job, prepared, paths):
        import weighlock

        with open(prepared.path, "wb") as whole:
            for path in paths:
                with open(path, "rb") as part:
                    os.sendfile(whole.fileno(), part.fileno(), 0, os.path.getsize(path))
        check(job, prepared, weighlock.open(prepared.path))

    return check_joined


def curl_contenders(prepare, check):
    """Over one connection, and over four."""
    programs = ("nginx", "curl")
    return (
        Contender("nginx + curl", curl, prepare, check, programs=programs),
        Contender(
            "nginx + curl, 4 ranges into 4 files",
            _in_ranges,
            prepare,
            _checking_joined(check),
            programs=programs,
        ),
    )
