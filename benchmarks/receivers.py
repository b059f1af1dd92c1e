"""Receivers in processes of their own: `python -m benchmarks.receivers URL PATH CONNECTIONS RATE`.

Each waits for a line, fetches to a file, says so, and waits for the next. Instead of a URL,
`raw:HOST:PORT:COUNT:BYTES` is fetched from an owner that knows bare sockets only.
"""

import os
import queue
import subprocess
import sys
import threading
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
            assert line.strip() == "ready", line


def main():
    import blake3  # noqa: F401

    import weighlock.fetching.fetch  # noqa: F401 - what is imported when first used is not measured

    url, path, connections, rate = sys.argv[1:]
    fetch = _fetch
    if url.startswith("raw:"):
        import benchmarks.workloads.transfer  # noqa: F401

        fetch = _fetch_raw
    lines = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    while True:
        print("ready", flush=True)
        lines.get()
        fetch(url, path, int(connections), float(rate) or None)
        os.unlink(path)


def _fetch(url, path, connections, rate):
    import weighlock

    weighlock.fetch(url, into=path, connections=connections, limit_rate=rate, durable=False).close()


def _fetch_raw(url, path, connections, rate):
    """Over four connections, as fast as it comes."""
    from benchmarks.workloads.transfer import Sizes, raw_to_disk

    _, host, port, count, nbytes = url.split(":")
    owner = SimpleNamespace(address={"host": host, "port": int(port)})
    sizes = Sizes(int(count), int(nbytes))
    os.close(raw_to_disk(SimpleNamespace(owner=owner, sizes=sizes, path=path)).fd)


def _listen(lines):
    """Pass lines on; a slow one that nobody waits for ends with who started it."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
