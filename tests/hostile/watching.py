"""An audit hook that notices what reading must never do: import, execute, open, connect, write."""

import contextlib
import os
import sys
import time
import tracemalloc

import pytest

# Readers are imported when their format is first met; that is no finding.
import weighlock.formats.dcp
import weighlock.formats.deepspeed
import weighlock.formats.gguf
import weighlock.formats.npz  # noqa: F401

__all__ = ["bounded", "refusal", "watched"]

_FORBIDDEN = (
    *("import", "exec", "compile", "code.__new__", "marshal.loads", "pickle.find_class"),
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "os.putenv", "os.setxattr", "shutil.", "tempfile."),
    *("subprocess.Popen", "ctypes.", "socket.", "urllib.", "http.", "webbrowser.", "mmap."),
)
_LOOKING = ("open", "os.listdir", "os.scandir")

_FEW_BYTES = 2_000_000
_MOMENT_S = 10

_watch = None  # an audit hook cannot be taken away again, so it looks here


class _Watch:
    def __init__(self, allowed):
        self.allowed = tuple(os.path.abspath(path) for path in allowed)
        self.seen = []

    def __call__(self, event, arguments):
        if event in _LOOKING:
            place = arguments[0]
            if isinstance(place, int):
                return
            place = os.path.abspath(os.fsdecode(place))
            inside = any(place == path or place.startswith(path + "/") for path in self.allowed)
            if not inside or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                self.seen.append(f"{event} {place!r}")
        elif event.startswith(_FORBIDDEN):
            self.seen.append(f"{event} {arguments!r:.200}")


def _hook(event, arguments):
    if _watch is not None:
        _watch(event, arguments)


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched(*allowed):
    """Gives a list that fills with whatever happens in the block and should not.

    Args:
        allowed: files and directories that may be opened, for reading.
    """
    global _watch
    watch = _Watch(allowed)
    _watch = watch
    try:
        yield watch.seen
    finally:
        _watch = None


@contextlib.contextmanager
def bounded(content, *, most_loaded=0):
    """Whatever is done with so few bytes takes little memory, and no more than a moment.

    Seconds of this process, not of a clock: they are few on a busy machine too.

    Args:
        most_loaded: bytes of tensors that the block holds at once.
    """
    start = time.process_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= _FEW_BYTES + 200 * len(content) + most_loaded, f"{peak:,} bytes"
    assert time.process_time() - start <= _MOMENT_S


def refusal(open_catalog, path, kind):
    """The error of opening a file that is refused without a deed, and the memory it took."""
    tracemalloc.start()
    try:
        with watched(path) as seen, pytest.raises(kind) as caught:
            open_catalog(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == []
    return caught.value, peak
