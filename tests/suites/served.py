"""Bytes behind URLs, served by another process: this one has no sockets but the client's."""

import os
import subprocess
import sys

__all__ = ["start"]

_SCRIPT = """
import sys
from blake3 import blake3
from process.plain_server import PlainServer, Reply, ranged

directory = sys.argv[1]


def behave(request, _):
    kind, name, *rest = request.path.strip("/").split("/")
    try:
        with open(f"{directory}/{name}", "rb") as file:
            content = file.read()
    except OSError:
        return Reply(404)
    if rest[0] == "digests":
        page = int(rest[1]) * 1024
        blocks = range(0, len(content), 1 << 20)[page : page + 1024]
        digests = [blake3(content[first : first + (1 << 20)]).digest() for first in blocks]
        return Reply(200, {}, b"".join(digests))
    reply = ranged(request, content, etag=f'"{name}"')
    if kind == "s":
        reply.headers["Weighlock"] = "1"
    return reply


with PlainServer(behave=behave) as server:
    print(server.origin, flush=True)
    sys.stdin.read()
"""


def start(directory):
    """Serves the files of a directory.

    Gives the process, which ends when its stdin is closed, and its origin. A file `x` is at
    `/s/x/model.safetensors` as a share would be, with digests, and at `/plain/x/file` without.
    """
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(directory)],
        env={**os.environ, "PYTHONPATH": tests},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()
