"""Receivers in processes of their own: `python -m benchmarks.receivers URL PATH CONNECTIONS RATE`.

Each waits for a line, fetches to a file, says so, and waits for the next. Instead of a URL,
`raw:HOST:PORT:COUNT:BYTES` is fetched from an owner that knows bare sockets only, `curl:URL` by
curl, and `nvflare:REF:URL` by NVFlare.
"""

import os
import queue
import shutil
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

__all__ = ["Receivers"]


class Receivers:
    """So many receivers of one URL, ready to begin."""

    def __init__(self, url, directory, count, *, connections=4, rate=0):
        self._children = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.receivers", url),
                    *(os.path.join(directory, f"{rate}-{number}.safetensors"),),
                    *(str(connections), str(rate)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]
        self.pids = [child.pid for child in self._children]
        self.wait()

    def begin(self):
        """Let all of them fetch."""
        for child in self._children:
            child.stdin.write("go\n")
            child.stdin.flush()

    def wait(self):
        """Until each has said that it is ready, or has what it fetched."""
        for child in self._children:
            line = child.stdout.readline()
            while line and line.strip() != "ready":  # some peers talk on stdout
                line = child.stdout.readline()
            assert line, "a receiver has ended"


def main():
    import blake3  # noqa: F401

    import weighlock.fetching.fetch  # noqa: F401 - what is imported when first used is not measured

    place, path, connections, rate = sys.argv[1:]
    kind, _, rest = place.partition(":")
    fetch = _WAYS[kind](rest) if kind in _WAYS else partial(_fetch, place)
    lines = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    while True:
        print("ready", flush=True)
        lines.get()
        fetch(path, int(connections), float(rate) or None)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _fetch(url, path, connections, rate):
    import weighlock

    weighlock.fetch(url, into=path, connections=connections, limit_rate=rate, durable=False).close()


def _raw(place):
    """Over four connections, as fast as it comes."""
    from benchmarks.workloads.transfer import Sizes, raw_to_disk

    host, port, count, nbytes = place.split(":")
    owner = SimpleNamespace(address={"host": host, "port": int(port)})
    sizes = Sizes(int(count), int(nbytes))

    def fetch(path, connections, rate):
        os.close(raw_to_disk(SimpleNamespace(owner=owner, sizes=sizes, path=path)).fd)

    return fetch


def _curl(url):
    """Over one connection."""
    from benchmarks.curl import run_curl

    def fetch(path, connections, rate):
        run_curl("--output", path, url)

    return fetch


def _nvflare(place):
    """Connected before it is asked to fetch."""
    from benchmarks.workloads.transfer import connected, nvflare

    ref, _, url = place.partition(":")
    cell = connected(url, f"site-{os.getpid()}")

    def fetch(path, connections, rate):
        os.makedirs(path)
        owner, job = SimpleNamespace(address={"ref": ref}), SimpleNamespace(directory=path)
        nvflare(SimpleNamespace(owner=owner, cell=cell, job=job), to_disk=True)

    return fetch


_WAYS = {"raw": _raw, "curl": _curl, "nvflare": _nvflare}


def _listen(lines):
    """Pass lines on; a slow one that nobody waits for ends with who started it."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
