"""A process to be hurt: does one save, and waits for leave where it is told to.

It talks to its parent in lines: it says where it is, then waits for one byte. Nothing here depends
on time. It says "ready" first. With "steps" it then says the name of each system call that
`weighlock.disk` is about to make, seen by a profile function, so that the code under test is the
real one. At the end it says "done", or which error was raised.

Such processes are forked from one that has everything imported, because hundreds are needed:
`python -m crash.child <socket>` takes jobs with descriptors for stdin, stdout and stderr, and
answers with the process number and then the exit code. What is forked lives and dies as any
interpreter: `main` is the last thing it does.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys

import weighlock.cli.convert
from crash.disks import NamedDisk, PlainDisk
from crash.saves import NEW, WAYS, specs_of
from weighlock.disk import directory, effects

EVERYTHING = [getattr(weighlock, name) for name in weighlock.__all__]
"""Imported now: what is counted later is saving, not importing."""

DISKS = {"posix": None, "named": NamedDisk(), "plain": PlainDisk()}
_EFFECTS = {effects.__file__, directory.__file__}
_PR_SET_PTRACER = 0x59616D61
_NO_EFFECT = {"getpid", "fspath", "lstat", "stat"}


def say(text):
    os.write(said, f"{text}\n".encode())


def say_and_wait(text):
    """Wait for leave. A signal ends the waiting too, even if it comes just before it begins.

    Without the second descriptor, a signal between the last look of the interpreter for signals
    and the call that waits would be found only after that call, which is never.
    """
    say(text)
    while 0 not in select.select([0, woken], [], [])[0]:
        os.read(woken, 1)  # on the way back the interpreter runs the handler
    os.read(0, 1)


def at_each_step(frame, event, function):
    """Called by the interpreter before each call of a function written in C."""
    if (
        event == "c_call"
        and frame.f_code.co_filename in _EFFECTS
        and getattr(function, "__module__", None) == "posix"
        and function.__name__ not in _NO_EFFECT
    ):
        say_and_wait(function.__name__)


def slowly(fails_at=None):
    """The new model, one tensor each time the parent says so."""
    for number, item in enumerate(NEW.items()):
        say_and_wait(f"tensor {number}")
        if number == fails_at:
            raise ValueError(f"tensor {number} cannot be made")
        yield item


def generate(path, *, specs=False, max_shard_bytes=None, fails_at=None, disk="posix"):
    """What a program does that makes its tensors one after the other."""
    announced = specs_of(NEW) if specs else None
    if DISKS[disk] is None:
        weighlock.save(path, slowly(fails_at), announced, max_shard_bytes=max_shard_bytes)
        return
    with weighlock.Writer(path, announced, disk=DISKS[disk]) as writer:
        for name, array in slowly(fails_at):
            writer.write(name, array)


def run(job):
    match job:
        case {"convert": arguments}:
            sys.argv = ["weighlock", "convert", *arguments]
            weighlock.cli.main()
        case {"generate": path, **options}:
            generate(path, **options)
        case {"save": way, "path": path, **options}:
            disk = DISKS[options.pop("disk", "posix")]
            WAYS[way](path, disk, **options)


def main(job):
    steps = job.pop("steps", False)
    handler = job.pop("handler", None)
    if handler == "exit":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    elif handler == "go on":
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    for name, value in job.pop("limits", {}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    # Some systems let a process be traced by its parents only; strace is not one.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
    if "user" in job:
        os.setuid(job.pop("user"))
    say_and_wait("ready")
    if steps:
        sys.setprofile(at_each_step)
    try:
        run(job)
    except weighlock.WeighlockError as error:
        sys.setprofile(None)
        number = getattr(error, "errno", None)
        facts = {"raised": type(error).__name__, "says": str(error), "errno": number}
        say(json.dumps(facts | {k: v for k, v in vars(error).items() if isinstance(v, int)}))
        sys.exit(1)
    sys.setprofile(None)
    say_and_wait("done")


def serve(channel):
    """Fork for each job; returns in the forked process, with where to say something."""
    gc.freeze()  # what is imported is not looked through at each of a thousand ends
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 65536, 3)
        if not message:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            channel.close()
            stdin, said, errors = descriptors
            os.dup2(stdin, 0)
            os.dup2(errors, 2)
            os.close(stdin)
            os.close(errors)
            return json.loads(message), said
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(f"started {pid}".encode())
        # Not taken leave of before the parent says so: nobody else can get its number until then.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        channel.send(f"ended {code}".encode())
        channel.recv(1)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    received, said = serve(socket.socket(fileno=int(sys.argv[1])))
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    main(received)
