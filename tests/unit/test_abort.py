"""Saying stop, from any thread."""

import threading

import pytest

from weighlock import Abort
from weighlock.errors import Aborted


def test_nothing_happens_until_somebody_says_stop():
    abort = Abort()
    abort.check()
    assert not abort.is_set
    assert abort.wait(0) is False
    assert repr(abort) == "<Abort not set>"


def test_stop_is_said_once_and_the_first_reason_counts():
    abort = Abort()
    abort.set("round over")
    abort.set("another")
    assert abort.is_set
    assert abort.wait(10) is True
    assert "round over" in repr(abort)
    with pytest.raises(Aborted, match="aborted: round over") as caught:
        abort.check()
    assert caught.value.reason == "round over"


def test_without_a_reason():
    abort = Abort()
    abort.set()
    with pytest.raises(Aborted, match=r"^aborted$"):
        abort.check()


def test_who_waits_is_woken_from_another_thread():
    abort = Abort()
    woken = threading.Event()
    with abort.waking(woken.set):
        thread = threading.Thread(target=abort.set)
        thread.start()
        assert woken.wait(5)
        thread.join()


def test_every_waker_is_called_once_and_only_while_its_block_runs():
    abort = Abort()
    calls = []
    with abort.waking(lambda: calls.append("over")):
        pass
    with abort.waking(lambda: calls.append("a")), abort.waking(lambda: calls.append("b")):
        abort.set()
        abort.set()
    assert sorted(calls) == ["a", "b"]


def test_who_comes_after_the_stop_is_woken_at_once():
    abort = Abort()
    abort.set()
    calls = []
    with abort.waking(lambda: calls.append("late")):
        assert calls == ["late"]
    assert calls == ["late"]


def test_the_same_waker_twice_is_two_wakers():
    abort = Abort()
    calls = []

    def wake():
        calls.append(1)

    with abort.waking(wake):
        with abort.waking(wake):
            pass
        abort.set()
    assert calls == [1]


def test_a_waker_is_called_once_however_often_stop_is_said():
    abort = Abort()
    calls = []
    forget = abort.on_set(lambda: (calls.append(1), abort.set("again")))
    abort.set("first")
    forget()
    forget()
    assert calls == [1]
    assert abort.reason == "first"


def test_a_waker_may_say_stop_itself():
    first, second = Abort(), Abort()
    with first.waking(lambda: second.set(first.reason)), second.waking(lambda: first.set("loop")):
        first.set("go")
    assert second.reason == "go"
