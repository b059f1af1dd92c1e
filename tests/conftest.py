"""What every test gets: hypothesis profiles, a check for leaked descriptors, real processes."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,  # machines are noisy
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("default")


# Started in the background of a shell, or by nohup: programs that tests end would be deaf as well.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def open_descriptors():
    """What each descriptor of this process points to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed the directory
    return found


@pytest.fixture
def no_leaks(tmp_path):
    """Fails a test that leaves descriptors, threads or temporary names behind."""
    import gc

    before, threads = open_descriptors(), set(threading.enumerate())
    yield
    gc.collect()
    after = open_descriptors()
    assert {fd: to for fd, to in after.items() if fd not in before} == {}
    assert set(threading.enumerate()) - threads == set()
    left = [name for _, _, names in os.walk(tmp_path) for name in names if ".part-" in name]
    assert left == []


@pytest.fixture
def let_others_in():
    """Lets other users look into a directory of the tests: pytest keeps its own to itself."""

    def let_in(path):
        for parent in (path, *path.parents):
            if parent.stat().st_uid != os.getuid() or parent == parent.parent:
                return
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o055)

    return let_in


@pytest.fixture
def run_python():
    """Runs a script in a fresh interpreter; returns the finished process."""

    def run(script, *arguments, check=True, **options):
        result = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            **options,
        )
        if check and result.returncode:
            raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return run


@pytest.fixture
def weighlock_command():
    """Runs the command as a user would; returns the finished process."""

    def run(*arguments, **options):
        return subprocess.run(
            [sys.executable, "-m", "weighlock", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            **options,
        )

    return run


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts and loop devices")
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
