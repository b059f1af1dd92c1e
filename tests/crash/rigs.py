"""What hurts: children that can be stopped and killed, strace, full disks, power loss.

Every rig says by a skip why it cannot work here, if it cannot. fixtures.py hands them to tests.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

PATIENCE_S = 60
"""Nothing here takes long; a child that says nothing for so long hangs."""

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = struct.pack("I", 2)


class Child:
    """A process that does one save (child.py). It waits wherever it says something."""

    def __init__(self, server, **job):
        self._server = server
        self._code = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        stdin, self._stdin = os.pipe()
        self._said, said = os.pipe()
        message = json.dumps(job, default=str).encode()
        socket.send_fds(server, [message], [stdin, said, self.errors.fileno()])
        os.close(stdin)
        os.close(said)
        self._lines = open(self._said, "rb", buffering=0)  # noqa: SIM115
        self.pid = self._told("started")

    def __enter__(self):
        said = self.line()
        if said != "ready":
            complaint = self.complaint()
            self.__exit__()
            raise AssertionError(f"the child said {said!r}\n{complaint}")
        return self

    def __exit__(self, *_):
        if self._code is None:
            self.signal(signal.SIGKILL)
            self.end()
        self._server.send(b".")  # from now on its number may be another's
        self._lines.close()
        os.close(self._stdin)
        self.errors.close()

    def line(self):
        """What it says next; nothing if it has ended."""
        said, _, _ = select.select([self._said], [], [], PATIENCE_S)
        assert said, f"the child hangs\n{self.complaint()}"
        return self._lines.readline().decode().rstrip("\n")

    def go(self):
        """Let it go on."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, b".")

    def next(self):
        """Let it go on to where it says something again."""
        self.go()
        return self.line()

    def step(self, count):
        """Let it go on so many times; False if it came to its end before."""
        return all(self.next() not in ("done", "") for _ in range(count))

    def signal(self, number):
        """Send it a signal."""
        os.kill(self.pid, number)

    def end(self):
        """Wait until it has ended; the exit code, or minus the signal that killed it."""
        if self._code is None:
            self._code = self._told("ended")
        return self._code

    def _told(self, word):
        said = self._server.recv(100).decode().split()
        assert said[:1] == [word], f"{said} instead of {word}"
        return int(said[1])

    def complaint(self):
        """What it wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()


# --- strace ---


def traced(child, log, calls, inject=None):
    """Let a child that is ready run to its end under strace, or skip where there is none.

    Args:
        child: ready.
        log: a file for what strace sees.
        calls: names of the system calls to see.
        inject: what to do to them, as in strace: "signal=KILL:when=2".

    Returns:
        What the child said at the end, and its exit code.
    """
    faults = ["-e", f"inject={calls}:{inject}"] if inject else []
    command = ["strace", "-p", str(child.pid), "-o", str(log), "-e", f"trace={calls}", *faults]
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        attached = tracer.stderr.readline()
        if "attached" not in attached:
            pytest.skip(f"strace cannot attach here: {attached}")
        said = child.next()
        child.go()
        code = child.end()
    return said, code


def calls_in(log):
    """Names of the system calls in a log, in order, with their arguments."""
    return re.findall(r"^(\w+)\((.*)", Path(log).read_text(), re.MULTILINE)


# --- mounts ---


class Mounted:
    """A small file system of our own. `remount` changes its options, `umount` ends it."""

    def __init__(self, path, *arguments):
        self.path = path
        path.mkdir(exist_ok=True)
        result = _system("mount", *arguments, path)
        if result.returncode:
            pytest.skip(f"cannot mount here: {result.stderr.strip()}")

    def remount(self, options):
        result = _system("mount", "-o", f"remount,{options}", self.path)
        assert result.returncode == 0, result.stderr

    def umount(self, *options):
        result = _system("umount", *options, self.path)
        assert result.returncode == 0, result.stderr

    def close(self):
        if os.path.ismount(self.path):
            self.umount("--lazy")  # a test that failed may have left files open


def _system(*command):
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S
    )


class PowerRig:
    """An ext4 file system whose power can be cut."""

    def __init__(self, directory):
        self.path = directory / "disk"
        self._image = directory / "image"
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("needs mkfs.ext4")
        with open(self._image, "wb") as image:
            image.truncate(16 * 1024 * 1024)
        made = _system("mkfs.ext4", "-q", "-F", self._image)
        assert made.returncode == 0, made.stderr
        self._mounted = self._mount()

    def _mount(self):
        # A long commit interval: nothing reaches the disk because time passes.
        return Mounted(self.path, "-o", "loop,commit=300", self._image)

    def cut_power(self):
        """From now on nothing reaches the disk, not even the journal."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH)
        except OSError as error:
            pytest.skip(f"cannot shut ext4 down here: {error}")
        finally:
            os.close(fd)

    def restore_power(self):
        """Mount again what is on the disk. Nobody may have a file open any more."""
        self._mounted.umount()
        self._mounted = self._mount()

    def close(self):
        self._mounted.close()


KILLED = -signal.SIGKILL
