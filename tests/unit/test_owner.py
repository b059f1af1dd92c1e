"""Names of temporaries: hidden, unique, and telling whose they are."""

import os
import re

import pytest

from weighlock.disk.owner import MARK, start_time, temporary_name


def test_a_name_is_hidden_marked_and_says_whose_it_is():
    name = temporary_name("model.safetensors")
    assert name.startswith(".model.safetensors")
    pattern = rf"{re.escape(MARK)}(\d+)-(\d+)-([0-9a-f]+)-([0-9a-f]{{16}})$"
    pid, start, _, _ = re.search(pattern, name).groups()
    assert int(pid) == os.getpid()
    with open("/proc/self/stat") as status:
        assert status.read().rpartition(")")[2].split()[19] == start


def test_a_process_that_nobody_waited_for_is_dead():
    gate, opened = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(opened)
        os.read(gate, 1)
        os._exit(0)
    assert start_time(pid) != "0"
    os.close(opened)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its number is still taken
    assert start_time(pid) == "0"
    os.waitpid(pid, 0)
    assert start_time(pid) == "0"
    os.close(gate)


GOES_ON = """
import ctypes, os, threading
from weighlock.disk.owner import start_time


def go_on():
    state = b""
    while state != b"Z":  # until the main thread is gone
        with open(f"/proc/{os.getpid()}/stat", "rb") as status:
            state = status.read().rpartition(b")")[2].split()[0]
    os.write(1, start_time(os.getpid()).encode())
    os._exit(0)


os.write(1, start_time(os.getpid()).encode() + b" ")
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_ended_before_others_is_alive(run_python):
    before, after = run_python(GOES_ON).stdout.split()
    assert before == after != "0"


def test_no_two_are_the_same():
    assert len({temporary_name("a") for _ in range(1000)}) == 1000


@pytest.mark.parametrize("name", ["a", "a" * 255, "ü" * 127, "😀" * 63, "\udcff" * 255])
def test_a_name_is_never_too_long_for_a_file(name):
    made = temporary_name(name)
    assert len(os.fsencode(made)) <= 255
    assert "/" not in made
