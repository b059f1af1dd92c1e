"""Memory that the machine really holds, kept between runs: `python -m benchmarks.warm` keeps it.

A virtual machine may give free pages back to its host after a second or two, and to get one back
costs several times what using it does: whoever comes first pays for everybody. Touching free memory
before a run helps little where it is given back meanwhile. So a process of its own holds all of it,
touched, and lets go of what a contender needs right before its clock starts.

Knows memory; not who needs it.
"""

import contextlib
import mmap
import os
import subprocess
import sys

__all__ = ["Warm"]

_CHUNK_BYTES = 128 << 20
_LEFT_BYTES = 1 << 30
"""What is never held: for the runner itself, and for what else goes on."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python has no name for; Linux has it since 5.14."""


class Warm:
    """All free memory, in the hands of another process."""

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

    def give(self, nbytes):
        """Hold all free memory but so much of it, which was touched a moment ago."""
        try:
            self._keeper.stdin.write(f"{nbytes}\n")
            self._keeper.stdin.flush()
            is_done = self._keeper.stdout.readline()
        except BrokenPipeError:
            is_done = False
        if not is_done:
            raise RuntimeError(
                "there was too little memory for a run, and the system ended the process that"
                " held the rest"
            )


def _keep():
    """Read how much to leave, line by line, and answer when it is so."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory does not suffice, this is what nobody needs
    held = []
    for line in sys.stdin:
        while _free() > _LEFT_BYTES + _CHUNK_BYTES:
            held.append(_touched())
        for _ in range(min(len(held), -(-int(line) // _CHUNK_BYTES))):
            held.pop().close()
        print("done", flush=True)


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
