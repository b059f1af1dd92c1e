"""Memory that the machine really holds, kept between runs: `python -m benchmarks.warm` keeps it.

A virtual machine may give free pages back to its host every other second, and to get one back costs
several times what using it does: whoever comes first pays for everybody. Touching free memory
before a run helps little where it is given back meanwhile, and giving it back takes time by itself.
So a process of its own holds all of it, touched, and lets go of a piece whenever little is free:
what somebody takes was let go of a moment ago.

What is given back to a host is free blocks as large as a huge page; pages that lie between others
in use stay. So the process holds memory in two kinds: whole blocks, to become the huge pages of
arrays, of which few are free at a time; and pages, to become those of files on tmpfs, of which it
keeps one in each block when it lets go of the others.

Linux looks for what it can give back two seconds after something became free. What many runs of
half a second were given had been looked at in the midst of every third, which then took up to twice
as long. So who asks for it is given free memory right after such a look, and has two seconds.

Knows memory; not who needs it.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import select
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Ended", "Warm"]

_CHUNK_BYTES = 64 << 20
_BLOCK_BYTES = 2 << 20
_BLOCK_ORDER = (_BLOCK_BYTES // mmap.PAGESIZE).bit_length() - 1
"""A huge page, and the column of `/proc/buddyinfo` that counts such: of so many twos, pages."""

_WHOLE_FREE = 640 << 20
_BROKEN_FREE = 640 << 20
"""What is free at least, in whole blocks and in parts of some. Two threads that fill new arrays
take 10 MB a millisecond, and a message of 200 MB is joined before much can be let go of."""

_POLL_S = 0.002

_LOOK_S = 2.1
"""What became free is looked at within this time (PAGE_REPORTING_DELAY), and then given away."""

_LOOKS = "/sys/module/page_reporting"
"""Is there where Linux may give memory back."""

_GROUP = "/sys/fs/cgroup"
"""Where a container finds its own bounds."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python has no name for; Linux has it since 5.14."""


class Ended(Exception):
    """Nobody holds free memory any more: what is measured from now on is not like before."""


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

    def hold(self, *, unseen=False):
        """Take what has become free since; returns when that is done.

        Args:
            unseen: what is free afterwards is not given to the host for two seconds.
        """
        try:
            self._keeper.stdin.write("unseen\n" if unseen else "hold\n")
            self._keeper.stdin.flush()
            is_done = self._keeper.stdout.readline()
        except BrokenPipeError:
            is_done = False
        if not is_done:
            raise Ended("the process that held free memory has ended")


class _Held:
    """Chunks of both kinds, and the pages that were kept of what was let go of."""

    def __init__(self):
        self._whole = deque()
        self._paged = deque()
        self._kept = []

    def take(self):
        """Take whole blocks, for both kinds alike, almost to the last.

        The host may have those that were free, also those that shall be free next. To get them
        back takes a second for each GB, so all processors do it.
        """
        self._kept.clear()
        with ThreadPoolExecutor(os.cpu_count()) as several:
            while (free := _free()[0] - max(2 * _CHUNK_BYTES, _reserved())) >= _CHUNK_BYTES:
                whole = _lacking(free // _CHUNK_BYTES, len(self._whole), len(self._paged))
                paged = free // _CHUNK_BYTES - whole
                kinds = [mmap.MADV_HUGEPAGE] * whole + [mmap.MADV_NOHUGEPAGE] * paged
                chunks = list(several.map(_touched, kinds))
                self._whole.extend(chunks[:whole])
                self._paged.extend(chunks[whole:])

    def let_go(self):
        """Make free what is lacking; what was taken first goes first."""
        reserved = _reserved()
        while self._whole or self._paged:
            whole, broken = _free()
            whole -= reserved
            if whole < _WHOLE_FREE and self._whole:
                self._whole.popleft().close()
            elif broken < _BROKEN_FREE and self._paged:
                self._let_go_between(self._paged.popleft())
            elif whole + broken < _WHOLE_FREE + _BROKEN_FREE:  # of the kind that lacks none is left
                (self._whole or self._paged).popleft().close()
            else:
                return

    def _let_go_between(self, chunk):
        for start in range(0, _CHUNK_BYTES, _BLOCK_BYTES):
            rest = start + mmap.PAGESIZE
            chunk.madvise(mmap.MADV_DONTNEED, rest, _BLOCK_BYTES - mmap.PAGESIZE)
        self._kept.append(chunk)


def _lacking(count, whole, paged):
    """Of so many chunks, how many become whole ones, so that there are as many of either kind.

    Whoever fills arrays takes whole ones only: if half of what is left behind by each became pages,
    none were whole after ten of them.
    """
    return min(count, max(0, (count + paged - whole + 1) // 2))


def _keep():
    """Hold when told to, and answer; let go whenever there is little left."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory does not suffice, this is what nobody needs
    held = _Held()
    while True:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            asked = sys.stdin.readline()
            if not asked:
                return
            held.take()
            if asked == "unseen\n" and os.path.isdir(_LOOKS):
                time.sleep(_LOOK_S)  # the look finds next to nothing
                held.take()
            held.let_go()
            try:
                print("done", flush=True)
            except BrokenPipeError:  # who asked was ended
                os._exit(0)  # at an exit, Python would try to say it again
        held.let_go()


def _free():
    """Bytes free in whole blocks, and in parts of blocks."""
    whole = broken = 0
    try:
        with open("/proc/buddyinfo") as file:
            zones = file.readlines()
    except OSError:  # kept from us, as in some containers: as if all of it were whole
        zones = []
    allowed = _allowed()
    if not zones or allowed is not None:
        free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
        return free if allowed is None else min(free, allowed), _BROKEN_FREE
    for zone in zones:
        for order, count in enumerate(map(int, zone.split()[4:])):
            free = count * mmap.PAGESIZE << order
            if order < _BLOCK_ORDER:
                broken += free
            else:
                whole += free
    return whole, broken


@functools.cache
def _reserved():
    """Bytes that stay free whatever is asked for: the larger the machine, the more."""
    pages = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/zoneinfo") as zones:
        for line in zones:
            name, _, rest = line.strip().partition(" ")
            if name == "high":
                pages += int(rest)
            elif name == "protection:":
                pages += max(map(int, rest.strip(" ()").split(",")))
    return pages * mmap.PAGESIZE


def _allowed():
    """What a container may still take; None if it is not bounded."""
    try:
        with open(f"{_GROUP}/memory.max") as most, open(f"{_GROUP}/memory.current") as now:
            return max(0, int(most.read()) - int(now.read()))
    except (OSError, ValueError):  # none, or "max"
        return None


def _touched(advice):
    # Private, so that huge pages are used: it is huge ones that arrays get.
    chunk = mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        chunk.madvise(advice)
    # Not by the mmap's own madvise, which lets no other thread run meanwhile.
    place = ctypes.c_char.from_buffer(chunk)
    length = ctypes.c_size_t(_CHUNK_BYTES)
    if ctypes.CDLL(None).madvise(ctypes.byref(place), length, _POPULATE_WRITE) != 0:
        for offset in range(0, _CHUNK_BYTES, mmap.PAGESIZE):
            chunk[offset] = 1
    return chunk


if __name__ == "__main__":
    _keep()
