"""The thread that looks after lives: whom it looks at, when, and what it survives."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from threads import no_more_threads
from waiting import until
from weighlock.sharing.watch import Watch

pytestmark = pytest.mark.usefixtures("no_leaks")


class Life:
    """Counts looks; answers each with the next of what it was given."""

    def __init__(self, *again, on_look=lambda: None):
        self.again = list(again)
        self.on_look = on_look
        self.looks = 0
        self.forgiven = 0.0

    def look(self):
        self.looks += 1
        self.on_look()
        return self.again.pop(0) if self.again else None

    def forgive(self, seconds):
        self.forgiven += seconds


@pytest.fixture
def watch():
    watch = Watch()
    yield watch
    watch.close()


def test_looks_at_once_and_again_when_told(watch):
    life = Life(0.01, 0.01)
    watch.note(life, 0)
    until(lambda: life.looks == 3)


def test_what_has_nothing_due_is_not_looked_at(watch):
    idle, busy = Life(), Life(*[0.0] * 5)
    watch.note(idle, 1000)
    watch.note(busy, 0)
    until(lambda: busy.looks == 6)
    assert idle.looks == 0


def test_sooner_counts_and_later_does_not(watch):
    life = Life()
    watch.note(life, 1000)
    watch.note(life, 0.01)
    watch.note(life, 1000)
    until(lambda: life.looks == 1)


def test_what_was_dropped_is_not_looked_at(watch):
    dropped, other = Life(), Life(0.05)
    watch.note(dropped, 0.05)
    watch.drop(dropped)
    watch.note(other, 0.05)
    until(lambda: other.looks == 2)
    assert dropped.looks == 0


def test_a_look_that_fails_harms_no_other(watch, caplog):
    def fail():
        raise ZeroDivisionError

    failing, other = Life(on_look=fail), Life(0.05, 0.05)
    watch.note(failing, 0)
    watch.note(other, 0.01)
    until(lambda: other.looks == 3)
    assert "ZeroDivisionError" in caplog.text


def test_it_can_be_closed_by_what_it_looks_at():
    watch = Watch()
    life = Life(on_look=watch.close)
    watch.note(life, 0)
    until(lambda: life.looks == 1)
    watch.close()


def test_it_can_be_closed_while_a_look_takes_long(watch):
    hold, inside = threading.Event(), threading.Event()

    def look():
        inside.set()
        hold.wait(20)

    watch.note(Life(on_look=look), 0)
    assert inside.wait(20)
    closing = threading.Thread(target=watch.close)
    closing.start()
    hold.set()
    closing.join(20)
    assert not closing.is_alive()


def test_where_there_are_no_more_threads_it_begins_when_there_are(watch, caplog):
    life, other = Life(), Life()
    with no_more_threads():
        watch.note(life, 0)
    assert "nobody looks after shares" in caplog.text
    watch.note(other, 1000)
    until(lambda: life.looks == 1)
    never = Watch()
    with no_more_threads():
        never.note(life, 0)
    never.close()


def test_after_its_end_nothing_is_looked_at(watch):
    watch.close()
    life = Life()
    watch.note(life, 0)
    assert life.looks == 0
    watch.close()


STOPPED = """
import sys, time
from weighlock.sharing.watch import Watch

class Life:
    def look(self):
        return 1000
    def forgive(self, seconds):
        print(seconds, flush=True)

watch = Watch()
watch.note(Life(), 0)
print("ready", flush=True)
sys.stdin.read()
watch.close()
"""


def test_own_sleep_is_noticed_and_forgiven():
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        wakes_at = time.monotonic() + 2.5
        until(lambda: time.monotonic() > wakes_at)  # the time it is stopped is what is tested
        os.kill(child.pid, signal.SIGCONT)
        forgiven = float(child.stdout.readline())
        child.stdin.close()
    assert 1 < forgiven < 60
