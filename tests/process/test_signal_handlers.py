"""A signal handler uses what its own thread is using: it may save, read or give up, and ends.

A scheduler that takes a machine away says so by a signal, and handlers save a checkpoint then. The
signal is raised at every line of the module that holds a lock, or goes through what a handler may
add to, in a process of its own that is ended if it waits for itself.
"""

import pytest

PROGRAM = """
import _weakrefset, faulthandler, os, signal, sys
import numpy as np
import weighlock
import threading
from weighlock import abort
from weighlock.cli import serve
from weighlock.disk import atomic, living, spool as spools
from weighlock.formats import sharded
from weighlock.sources import local

what, path = sys.argv[1:]
faulthandler.dump_traceback_later(30, exit=True)
modules = {
    "discard": [atomic],
    "read": [local],
    "open a shard": [sharded],
    "land": [spools],
    "close a spool": [spools],
    "abort a spool": [spools, living, _weakrefset],
    "abort": [abort, threading],
    "end a server": [serve, threading],
}[what]
files = {module.__file__ for module in modules}
tensors = {"a": np.ones(4), "b": np.ones(4)}
weighlock.save(path + "/one.safetensors", tensors)
weighlock.save(path + "/many", tensors, max_shard_bytes=32)


def at_line(number):
    seen = 0

    def trace(frame, event, arg):
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    return trace, lambda: seen


def discarded():
    new = path + "/new.safetensors"
    writer = weighlock.Writer(new, [("a", "F64", (4,))])
    signal.signal(signal.SIGUSR1, lambda *_: writer.discard())
    try:
        yield
        writer.write("a", tensors["a"])
        writer.finish()
    except weighlock.WeighlockError:
        assert not os.path.exists(new)
    else:
        assert weighlock.open(new)["a"].load().all()
        os.unlink(new)
    assert not [name for name in os.listdir(path) if ".part-" in name]


def read(name):
    with weighlock.open(path + name) as catalog:
        signal.signal(signal.SIGUSR1, lambda *_: catalog["b"].load())
        yield
        assert catalog["a"].load().all() and catalog["b"].load().all()
        yield


def landed():
    more = []
    with weighlock.Spool(path + "/spool") as spool:
        signal.signal(signal.SIGUSR1, lambda *_: more.append(weighlock.save(spool, tensors)))
        yield
        catalog = weighlock.save(spool, tensors)
        yield
        for found in (catalog, *more):
            assert found["a"].load().all()
            found.close()
        assert spool.used_bytes == 0


def closed():
    spool = weighlock.Spool(path + "/spool")
    signal.signal(signal.SIGUSR1, lambda *_: spool.close())
    yield
    try:
        weighlock.save(spool, tensors)["a"].load()
    except weighlock.errors.SpoolClosed:
        assert spool.closed
    yield
    spool.close()
    assert os.listdir(path + "/spool") == []
    assert not [fd for fd in os.listdir("/proc/self/fd") if "/spool/" in target_of(fd)]


def target_of(fd):
    try:
        return os.readlink("/proc/self/fd/" + fd)
    except OSError:
        return ""  # of the listing itself


def spool_aborted():
    with weighlock.Spool(path + "/spool") as spool:
        landings = [spool.file(10) for _ in range(5)]
        signal.signal(signal.SIGUSR1, lambda *_: landings.append(spool.file(10)))
        yield
        spool.abort()
        yield
        landings.clear()
        assert spool.used_bytes == 0


def aborted():
    stop = weighlock.Abort()
    woken = []
    signal.signal(signal.SIGUSR1, lambda *_: stop.set("now"))
    yield
    with stop.waking(lambda: woken.append(1)):
        stop.wait(0.001)
        is_set = stop.is_set
    yield
    assert len(woken) <= 1
    assert woken or not is_set


def ended():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop = serve._told_to_stop()
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))
    yield
    serve._wait(stop, 0.001)
    yield


lines = 0
while True:
    lines += 1
    steps = {
        "discard": discarded,
        "read": lambda: read("/one.safetensors"),
        "open a shard": lambda: read("/many"),
        "land": landed,
        "close a spool": closed,
        "abort a spool": spool_aborted,
        "abort": aborted,
        "end a server": ended,
    }[what]()
    next(steps)
    trace, seen = at_line(lines)
    sys.settrace(trace)
    next(steps, None)
    sys.settrace(None)
    next(steps, None)
    if seen() < lines:
        break
print(lines)
"""


@pytest.mark.parametrize(
    "what",
    [
        *("discard", "read", "open a shard", "land", "close a spool", "abort a spool"),
        *("abort", "end a server"),
    ],
)
def test_a_handler_never_waits_for_the_thread_it_interrupts(what, tmp_path, run_python):
    done = run_python(PROGRAM, what, tmp_path)
    # It was raised in the midst of things; of a server's end there is not much.
    assert int(done.stdout) > (3 if what == "end a server" else 20)
