"""D14: bytes in use against a bound: what waits, what is given back, and what never can be had."""

import threading

import pytest

from waiting import until
from weighlock.errors import LimitExceeded, TransferTimeout
from weighlock.limits import Budget


def test_what_is_held_is_counted_and_given_back():
    budget = Budget(100)
    with budget.hold(60, 0), budget.hold(40, 0):
        assert budget.used == 100
    assert budget.used == 0


def test_an_error_between_gives_it_back():
    budget = Budget(100)
    with pytest.raises(ZeroDivisionError), budget.hold(60, 0):
        raise ZeroDivisionError
    assert budget.used == 0


def test_a_generator_that_is_left_gives_it_back():
    budget = Budget(100)

    def pieces():
        with budget.hold(60, 0):
            yield 1
            yield 2

    left = pieces()
    next(left)
    assert budget.used == 60
    left.close()
    assert budget.used == 0


def test_who_waits_for_what_is_stuck_gives_up_and_holds_nothing():
    budget = Budget(100)
    with budget.hold(60, 0):
        with (
            pytest.raises(TransferTimeout, match=r"50 bytes .* 60 of 100 are in use"),
            budget.hold(50, 0.01),
        ):
            pass
        assert budget.used == 60
        with budget.hold(40, 0.01):
            pass


def test_who_waits_gets_what_becomes_free():
    budget = Budget(100)
    release, got = threading.Event(), []

    def hold():
        with budget.hold(80, 20):
            release.wait(20)

    def wait():
        with budget.hold(90, 20):
            got.append(budget.used)

    holding = threading.Thread(target=hold)
    holding.start()
    until(lambda: budget.used == 80)
    waiting = threading.Thread(target=wait)
    waiting.start()
    release.set()
    holding.join(20)
    waiting.join(20)
    assert got == [90]
    assert budget.used == 0


def test_more_than_there_is_fails_at_once_and_says_what_to_pass():
    with (
        pytest.raises(LimitExceeded, match=r"Limits\(budget_bytes=101\)"),
        Budget(100).hold(101, 100),
    ):
        pass


def test_less_is_asked_for_while_half_is_in_use():
    budget = Budget(100)
    assert budget.fitting(40, 5) == 40
    with budget.hold(20, 0):
        assert budget.fitting(40, 5) == 5
        assert budget.fitting(30, 5) == 30
        assert budget.fitting(3, 5) == 3


def test_many_threads_never_use_more_than_there_is():
    budget = Budget(100)
    most = []

    def work(size):
        for _ in range(200):
            with budget.hold(size, 20):
                most.append(budget.used)

    threads = [threading.Thread(target=work, args=(size,)) for size in (10, 30, 50, 70, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert max(most) <= 100
    assert budget.used == 0
