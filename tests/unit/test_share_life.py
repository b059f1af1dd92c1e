"""The life of a share and what is remembered of it, with a clock that is told to move."""

import pytest

from weighlock.sharing.share import Life, Tombstones

REASONS = ["revoked", "expired", "settled", "changed"]


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_without_a_bound_it_lasts(clock):
    life = Life(clock)
    clock.now += 10**9
    assert life.ended is None
    assert life.remaining_s is None


def test_it_expires_at_its_time_and_stays_expired(clock):
    life = Life(clock, expires_s=10)
    clock.now += 9.5
    assert life.ended is None
    assert life.remaining_s == pytest.approx(0.5)
    clock.now += 0.5
    assert life.ended == "expired"
    assert life.remaining_s == 0
    clock.now -= 5  # not even a clock that goes wrong brings it back
    assert life.ended == "expired"


@pytest.mark.parametrize("reason", REASONS)
def test_it_ends_once_and_keeps_the_first_reason(reason, clock):
    life = Life(clock, expires_s=10)
    assert life.end(reason) is True
    assert life.end("settled") is False
    clock.now += 100
    assert life.ended == reason
    assert life.remaining_s == 0


def test_what_has_expired_can_no_longer_be_revoked(clock):
    life = Life(clock, expires_s=10)
    clock.now += 11
    assert life.end("revoked") is False
    assert life.ended == "expired"


def test_a_life_of_no_time_is_over_at_once(clock):
    assert Life(clock, expires_s=0).ended == "expired"


def test_tombstones_are_bounded_and_the_oldest_are_forgotten():
    stones = Tombstones(3)
    for number in range(5):
        stones.put(bytes([number]), REASONS[number % 4])
    found = [stones.get(bytes([number])) for number in range(5)]
    assert found == [None, None, "settled", "changed", "revoked"]


def test_nobody_is_remembered_who_never_was():
    assert Tombstones(3).get(b"x") is None
