"""The rigs as fixtures, for modules that say `pytest_plugins = ["crash.fixtures"]`."""

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from crash.rigs import PATIENCE_S, Child, Mounted, PowerRig

_TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def child():
    """Starts children, one at a time: `with child(save="planned", path=…) as child: …`."""
    ours, theirs = socket.socketpair()
    paths = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours.settimeout(PATIENCE_S)
    server = subprocess.Popen(
        [sys.executable, "-m", "crash.child", str(theirs.fileno())],
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    yield functools.partial(Child, ours)
    ours.close()
    server.wait(PATIENCE_S)


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory where there is such: hundreds of syncs of a real disk take minutes."""
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(dir=memory, prefix="weighlock-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def tmpfs(tmp_path):
    """Mounts file systems in memory: `tmpfs("size=1m")`."""
    _need_root()
    mounted = []

    def mount(options, name="disk"):
        disk = Mounted(tmp_path / name, "-t", "tmpfs", "-o", options, "tmpfs")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        disk.close()


@pytest.fixture
def power_rig(memory_path):
    """An ext4 file system whose power can be cut."""
    _need_root()
    rig = PowerRig(memory_path)
    yield rig
    rig.close()


def _need_root():
    if os.geteuid() != 0:
        pytest.skip("needs root, for mounts and loop devices")
