"""A bound on bytes a second, with a clock that is only told to move."""

import pytest

from weighlock.errors import LocalProtocolError
from weighlock.transfer.rate import Rate


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("rate", [0, -1, -0.5, float("nan")])
def test_a_rate_that_moves_nothing_is_refused(rate, clock):
    with pytest.raises(LocalProtocolError, match="moves nothing"):
        Rate(rate, clock)


def test_bytes_are_paid_for_with_time(clock):
    rate = Rate(1000, clock)
    assert rate.pause_for(500) == pytest.approx(0.5)
    assert rate.pause_for(500) == pytest.approx(1.0)
    clock.now += 1
    assert rate.pause_for(0) == pytest.approx(0)


@pytest.mark.parametrize("step", [1, 100, 10_000])
def test_obedient_transfer_keeps_the_rate(step, clock):
    rate = Rate(1000, clock)
    sent = 0
    while sent < 100_000:
        sent += step
        clock.now += rate.pause_for(step)
    assert sent / (clock.now - 100) == pytest.approx(1000, rel=0.01)


def test_time_in_which_nothing_moved_is_not_saved_up(clock):
    rate = Rate(1000, clock)
    clock.now += 3600
    pause = sum([rate.pause_for(1000) for _ in range(3)][-1:])
    assert pause >= 2.5  # a quarter of a second may come at once, not an hour


def test_connections_share_one_rate(clock):
    rate = Rate(1000, clock)
    pauses = [rate.pause_for(250) for _ in range(4)]
    assert pauses == pytest.approx([0.25, 0.5, 0.75, 1.0])
