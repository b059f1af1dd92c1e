"""Peak memory of fresh processes, read from the kernel."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

MB = 1_000_000

_PRELUDE = """
import contextlib, json, os, sys
import numpy as np
import weighlock
from weighlock.tensors.dtypes import DType

DType.BF16.numpy  # what is imported on first use is not what is measured
weighlock.open(b'\\x02\\0\\0\\0\\0\\0\\0\\0{}')


def field(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


@contextlib.contextmanager
def measured():
    # Writing 5 makes the peak what is held now; without the right to, it is what it was.
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = field("VmHWM")
    yield
    print(json.dumps(field("VmHWM") - before))


directory = sys.argv[1]
"""


def added_by(script, directory):
    """The bytes by which each part of a script in `with measured():` raised its peak."""
    result = subprocess.run(
        [sys.executable, "-c", _PRELUDE + script, str(directory)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def _anonymous(pid):
    """Anonymous memory of a process now; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def peak_of_command(*arguments):
    """The most anonymous memory the command had, sampled from outside every few milliseconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "weighlock", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = 0
    while True:
        peak = max(peak, _anonymous(process.pid))
        try:
            code = process.wait(timeout=0.003)
            break
        except subprocess.TimeoutExpired:
            continue
    assert code == 0
    return peak


def sparse(path, dtype, shape, nbytes, name="weight"):
    """A safetensors file of one tensor of zeros that takes no room on the disk."""
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + nbytes)
    return path


def in_memory(nbytes):
    """A new directory on tmpfs if that many bytes easily fit there, or None.

    What is measured does not depend on where the file lies; how long it takes does.
    """
    try:
        with open("/proc/meminfo") as memory:
            available = next(int(x.split()[1]) * 1024 for x in memory if "MemAvailable" in x)
        if os.path.ismount("/dev/shm") and min(available, _free("/dev/shm")) > 3 * nbytes:
            return tempfile.mkdtemp(prefix="weighlock-", dir="/dev/shm")
    except OSError:
        pass
    return None


def _free(directory):
    return shutil.disk_usage(directory).free


def needs_room(directory, nbytes):
    """Skip a test that would fill the disk."""
    free = _free(directory)
    if free < nbytes + 2_000 * MB:
        pytest.skip(f"needs {nbytes / MB:,.0f} MB of disk and some more, {free / MB:,.0f} are free")
