"""What each route costs: `python -m benchmarks.calls [--megabytes N] [ROUTE …]`, as Markdown.

System calls are counted by strace over two sizes, and the difference is told, so that starting
Python and importing is no part of it. Threads and CPU are of runs without strace: the threads there
were at once beyond those before, the CPU of the process that is measured and of no other.
`futex` is apart: it is how threads wait for the interpreter, and strace makes them wait more often.
"""

import argparse
import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from statistics import median

from benchmarks.owners import bf16, make_arrays

__all__ = ["ROUTES"]

_TENSOR_MB = 32
_ALL = "every call"


def _arrays(megabytes):
    """Of 32 MiB each: megabytes here are MiB."""
    return make_arrays(megabytes // _TENSOR_MB, _TENSOR_MB << 20)


def _file(place, megabytes, name="source"):
    """A file of tensors, made before anything is counted."""
    import weighlock

    path = os.path.join(place, f"{name}-{megabytes}.safetensors")
    if not os.path.exists(path):
        weighlock.save(path, _arrays(megabytes), durable=False)
    return path


def _save(place, megabytes, _):
    import weighlock

    arrays = _arrays(megabytes)
    return lambda: weighlock.save(os.path.join(place, "out"), arrays, durable=False)


def _convert(place, megabytes, _):
    import weighlock

    catalog = weighlock.open(_file(place, megabytes))
    return lambda: weighlock.save(os.path.join(place, "out"), catalog, durable=False)


def _load(place, megabytes, _):
    import weighlock

    catalog = weighlock.open(_file(place, megabytes))
    return catalog.load


def _mean(place, megabytes, _):
    import weighlock

    paths = []
    for number in range(3):
        paths.append(os.path.join(place, f"contribution-{number}-{megabytes}.safetensors"))
        if not os.path.exists(paths[-1]):
            arrays = bf16(make_arrays(megabytes // _TENSOR_MB, _TENSOR_MB << 20))
            turned = dict(zip(arrays, _turned(arrays, number), strict=True))
            weighlock.save(paths[-1], turned, durable=False)
    return lambda: weighlock.mean(paths, [1, 2, 3], os.path.join(place, "out"), durable=False)


def _turned(arrays, number):
    """The values one place on for each contribution: all of the same kind, no two the same."""
    values = list(arrays.values())
    return values[number:] + values[:number]


def _to_memory(place, megabytes, url):
    import weighlock

    return lambda: weighlock.fetch(url)


def _to_file(place, megabytes, url):
    import weighlock

    return lambda: weighlock.fetch(url, into=os.path.join(place, "out"), durable=False)


def _push(place, megabytes, url):
    import weighlock

    arrays = _arrays(megabytes)
    return lambda: weighlock.push(url, arrays)


def _serving(tensors):
    """A server that works until it is told that this is enough."""

    def prepare(place, megabytes, _):
        import weighlock

        server = weighlock.Server()
        share = server.share(tensors(place, megabytes))
        print("url", share.url, flush=True)
        return sys.stdin.readline

    return prepare


def _receiving(place, megabytes, _):
    import weighlock

    inbox = weighlock.Server().inbox("a", into=os.path.join(place, "in"), durable=False)
    print("url", inbox.url_for("a"), flush=True)
    return sys.stdin.readline


def _opened(place, megabytes):
    import weighlock

    return weighlock.open(_file(place, megabytes))


_FROM_MEMORY = _serving(lambda place, megabytes: _arrays(megabytes))
_FROM_FILE = _serving(_opened)
_DIALS, _IS_DIALLED = 0, 1

# The side that dials (or is alone), the side that is dialled, and which of them is measured.
ROUTES = {
    "save of arrays": (_save, None, _DIALS),
    "save of refs into a file": (_convert, None, _DIALS),
    "load of a catalog": (_load, None, _DIALS),
    "fetch to memory": (_to_memory, _FROM_MEMORY, _DIALS),
    "fetch to a file": (_to_file, _FROM_MEMORY, _DIALS),
    "sending from memory": (_to_memory, _FROM_MEMORY, _IS_DIALLED),
    "sending from a file": (_to_memory, _FROM_FILE, _IS_DIALLED),
    "push from memory": (_push, _receiving, _DIALS),
    "receiving a push": (_push, _receiving, _IS_DIALLED),
    "mean of three files": (_mean, None, _DIALS),
}


class _Process:
    """One side of a route in a process of its own."""

    def __init__(self, route, side, place, megabytes, url="", counts=None):
        prefix = ["strace", "-f", "-c", "-o", counts] if counts else []
        self._process = subprocess.Popen(
            [
                *(*prefix, sys.executable, "-m", "benchmarks.calls", "--side", str(side)),
                *("--place", place, "--megabytes", str(megabytes), "--url", url, route),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self._hear("url") if side == _IS_DIALLED else ""
        self._pid = self._hear("ready")

    def _hear(self, word):
        line = self._process.stdout.readline().split()
        if line[:1] != [word]:
            raise RuntimeError(f"said {line} instead of {word!r}")
        return line[1]

    def go(self):
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    @property
    def threads(self):
        return len(os.listdir(f"/proc/{self._pid}/task"))

    @property
    def has_worked(self):
        return bool(select.select([self._process.stdout], [], [], 0.001)[0])

    def finish(self):
        """CPU seconds that the work took."""
        cpu = float(self._hear("worked"))
        self._process.stdin.close()
        self._process.wait()
        return cpu


def _run(route, place, megabytes, counts=None):
    """CPU seconds of the measured side, and the threads it had at once beyond those before."""
    _, server, measured = ROUTES[route]
    shutil.rmtree(os.path.join(place, "in"), ignore_errors=True)
    traced = {measured: counts}
    sides = {}
    if server is not None:
        sides[_IS_DIALLED] = _Process(
            route, _IS_DIALLED, place, megabytes, counts=traced.get(_IS_DIALLED)
        )
        sides[_IS_DIALLED].go()
    url = sides[_IS_DIALLED].url if server is not None else ""
    sides[_DIALS] = _Process(route, _DIALS, place, megabytes, url, traced.get(_DIALS))
    before = most = sides[measured].threads
    sides[_DIALS].go()
    while not sides[_DIALS].has_worked:
        most = max(most, sides[measured].threads)
    cpu = {_DIALS: sides[_DIALS].finish()}
    if server is not None:
        sides[_IS_DIALLED].go()
        cpu[_IS_DIALLED] = sides[_IS_DIALLED].finish()
    return cpu[measured], most - before


def _counted(path):
    """name → calls, of a summary by strace."""
    found = {}
    with open(path) as file:
        for line in file:
            words = line.split()
            if len(words) >= 5 and words[3].isdigit():
                found[_ALL if words[-1] == "total" else words[-1]] = int(words[3])
    return found


def _row(route, place, megabytes, repeats):
    runs = [_run(route, place, megabytes) for _ in range(repeats)]
    found = []
    for size in (megabytes // 4, megabytes):
        counts = os.path.join(place, "strace")
        _run(route, place, size, counts)
        found.append(_counted(counts))
    moved = (megabytes - megabytes // 4) * 1.048576
    more = {
        name: (count - found[0].get(name, 0)) / moved
        for name, count in found[1].items()
        if count > found[0].get(name, 0)
    }
    waits = more.pop("futex", 0.0)
    more.pop(_ALL, None)
    every = sum(more.values())
    often = sorted(more.items(), key=lambda each: -each[1])[:4]
    names = ", ".join(f"{count:.2f} {name}" for name, count in often if count >= 0.005)
    cpu = median(cpu for cpu, _ in runs) / (megabytes * 1.048576 / 1000)
    threads = max(threads for _, threads in runs)
    return f"| {route} | {every:.2f} | {names} | {waits:.1f} | {threads} | {cpu:.2f} |"


def _work(options):
    """One side, in this process."""
    import blake3  # noqa: F401
    import ml_dtypes  # noqa: F401

    import weighlock.combining.mean
    import weighlock.fetching.fetch
    import weighlock.fetching.push
    import weighlock.formats.save  # noqa: F401

    prepare = ROUTES[options.routes[0]][options.side]
    work = prepare(options.place, options.megabytes, options.url)
    print("ready", os.getpid(), flush=True)
    sys.stdin.readline()
    before = time.process_time()
    work()
    print("worked", time.process_time() - before, flush=True)
    sys.stdin.readline()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("routes", nargs="*", choices=[[], *ROUTES], metavar="ROUTE")
    parser.add_argument("--megabytes", type=int, default=1024, help="what each moves")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.megabytes < _TENSOR_MB or options.repeats < 1:
        parser.error(f"--megabytes is at least {_TENSOR_MB}, a tensor's; --repeats at least 1")
    if options.side is not None:
        _work(options)
    if shutil.which("strace") is None:
        parser.error("strace is not installed")
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="weighlock-calls-", dir=root) as place:
        for size in (options.megabytes // 4, options.megabytes):
            _file(place, size)
        print("| work | calls per MB | of these | futex per MB | threads started | CPU s per GB |")
        print("|---|---|---|---|---|---|")
        for route in options.routes or ROUTES:
            print(_row(route, place, options.megabytes, options.repeats), flush=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(place, "out"))


if __name__ == "__main__":
    main()
