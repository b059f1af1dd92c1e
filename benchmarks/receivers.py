"""Receivers in processes of their own: `python -m benchmarks.receivers URL PATH CONNECTIONS RATE`.

Each waits for a line, fetches to a file, says so, and waits for the next.
"""

import os
import queue
import subprocess
import sys
import threading

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

    import weighlock
    import weighlock.fetching.fetch  # what is imported when it is first used is not measured

    url, path, connections, rate = sys.argv[1:]
    lines = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    while True:
        print("ready", flush=True)
        lines.get()
        weighlock.fetch(
            url,
            into=path,
            connections=int(connections),
            limit_rate=float(rate) or None,
            durable=False,
        ).close()
        os.unlink(path)


def _listen(lines):
    """Pass lines on; a slow one that nobody waits for ends with who started it."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
