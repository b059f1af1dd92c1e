"""Memory that the machine really holds, kept between runs: `python -m benchmarks.warm` keeps it.

A virtual machine may give free pages back to its host after a second or two, and to get one back
costs several times what using it does: whoever comes first pays for everybody. Touching free memory
before a run helps little where it is given back meanwhile, and giving it back takes time by itself.
So a process of its own holds all of it, touched, and lets go of a piece whenever little is free:
what somebody takes was let go of a moment ago.

Knows memory; not who needs it.
"""

import contextlib
import mmap
import os
import select
import subprocess
import sys
from collections import deque

__all__ = ["Warm"]

_CHUNK_BYTES = 64 << 20
_MOST_FREE, _LEAST_FREE = 896 << 20, 640 << 20
"""Free memory is kept between these. Two threads that fill new arrays take 10 MB a millisecond."""

_FRAGMENTS_FREE = 384 << 20
"""How far free memory is taken before some is let go of again. What is left by who takes huge pages
as long as there are any is odds and ends: the next one to ask for a huge page would wait for the
kernel to make one of them, which on a machine with memory to spare nobody does. For the same reason
what was taken first is let go of first: it was taken while there were huge pages."""

_POLL_S = 0.002

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python has no name for; Linux has it since 5.14."""


class Warm:
    """All free memory, in the hands of another process, which lets go of it as others need it."""

    def __enter__(self):
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError), self._keeper:
            self._keeper.stdin.close()

    def hold(self):
        """Take what has become free since; returns when that is done."""
        try:
            self._keeper.stdin.write("hold\n")
            self._keeper.stdin.flush()
            is_done = self._keeper.stdout.readline()
        except BrokenPipeError:
            is_done = False
        if not is_done:
            raise RuntimeError("the process that held free memory has ended")


def _keep():
    """Hold when told to, and answer; let go whenever there is little left."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory does not suffice, this is what nobody needs
    held = deque()
    while True:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            if not sys.stdin.readline():
                return
            while _free() > _FRAGMENTS_FREE + _CHUNK_BYTES:
                held.append(_touched())
            while held and _free() < _MOST_FREE:
                held.popleft().close()
            print("done", flush=True)
        while held and _free() < _LEAST_FREE:
            held.popleft().close()


def _free():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def _touched():
    # Private, so that huge pages are used: it is huge ones that arrays get.
    chunk = mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        chunk.madvise(mmap.MADV_HUGEPAGE)
    try:
        chunk.madvise(_POPULATE_WRITE)
    except OSError:
        for offset in range(0, _CHUNK_BYTES, mmap.PAGESIZE):
            chunk[offset] = 1
    return chunk


if __name__ == "__main__":
    _keep()
