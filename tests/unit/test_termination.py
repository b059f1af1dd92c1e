"""Clean-up when a signal ends the process."""

import signal

import pytest

from weighlock.disk.termination import CleanupOnSignal

ENDED = """
import os, signal, sys, threading
from weighlock.disk.termination import CleanupOnSignal

case, number = sys.argv[1], int(sys.argv[2])


def said(text):
    return lambda: os.write(1, text.encode())


if case == "handler":
    signal.signal(number, lambda number, frame: os.write(1, b"own "))
if case == "ignored":
    signal.signal(number, signal.SIG_IGN)
first = CleanupOnSignal(said("first "))
second = CleanupOnSignal(said("second "))
if case == "cancelled":
    first.cancel()
if case == "both cancelled":
    first.cancel()
    second.cancel()
if case == "cancelled in a thread":
    thread = threading.Thread(target=second.cancel)
    thread.start()
    thread.join()
if case == "forked":
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        os.write(1, b"child %d" % os.WTERMSIG(status))
        os._exit(0)
os.kill(os.getpid(), number)
os.write(1, b"alive")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
@pytest.mark.parametrize(
    ("case", "said", "dies"),
    [
        ("plain", "second first ", True),
        ("cancelled", "second ", True),
        ("both cancelled", "", True),
        ("cancelled in a thread", "first ", True),
        ("handler", "own alive", False),
        ("ignored", "alive", False),
        ("forked", "child {}", False),
    ],
)
def test_a_signal_that_kills_cleans_up_first(run_python, number, case, said, dies):
    result = run_python(ENDED, case, int(number), check=False)
    assert result.stdout == said.format(int(number))
    assert result.returncode == (-number if dies else 0)
    assert result.stderr == ""


def test_cancelling_gives_the_signal_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for order in ((0, 1), (1, 0)):
        made = [CleanupOnSignal(lambda: None), CleanupOnSignal(lambda: None)]
        for index in order:
            made[index].cancel()
            made[index].cancel()
    CleanupOnSignal(lambda: None).cancel()
    assert {number: signal.getsignal(number) for number in before} == before
