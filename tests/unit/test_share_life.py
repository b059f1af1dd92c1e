"""The life of a share and what is remembered of it, with a clock that is told to move."""

import pytest

from weighlock.sharing.share import Event, Life, State, Tombstones

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


def test_a_first_word_that_is_the_last_one_says_how_long_it_took():
    now = [100.0]
    life = Life(lambda: now[0])
    now[0] = 110.0
    life.report("a", Event.LANDED, "1", 3_000, seconds=1.5)
    assert (life.receiver("a").seconds, life.receiver("a").rate) == (1.5, 2_000)
    life.report("b", Event.LANDED, "1", seconds=1e9)  # longer than there is anything to receive
    assert life.receiver("b").seconds == 10.0
    life.report("c", Event.STARTED, "1", seconds=0.5)
    now[0] = 114.0
    life.report("c", Event.LANDED, "1", seconds=4.0)  # what it says first counts, and this clock
    assert life.receiver("c").seconds == 4.5


def test_tombstones_are_bounded_and_the_oldest_are_forgotten():
    stones = Tombstones(3)
    for number in range(5):
        stones.put(bytes([number]), REASONS[number % 4])
    found = [stones.get(bytes([number])) for number in range(5)]
    assert found == [None, None, "settled", "changed", "revoked"]


def test_nobody_is_remembered_who_never_was():
    assert Tombstones(3).get(b"x") is None


def started(clock, **options):
    life = Life(clock, receivers=("a", "b"), idle_s=10, **options)
    life.report("a", Event.STARTED, "1")
    return life


def test_own_sleep_is_no_silence_of_others_and_no_credit_for_the_time_after(clock):
    life = started(clock)
    clock.now += 100
    life.report("a", Event.ALIVE, "1")  # heard before the sleep was noticed
    life.forgive(100)
    assert life.tick() == 10
    clock.now += 10
    life.tick()
    assert life.outcome["a"] is State.LOST
    assert life.outcome["b"] is State.WAITING


def test_who_never_came_is_waited_for_until_something_else_ends_it(clock):
    life = started(clock, expires_s=1000)
    clock.now += 999
    life.tick()
    assert life.outcome["a"] is State.LOST
    assert life.outcome["b"] is State.WAITING
    clock.now += 1
    assert life.ended == "expired"
    assert life.outcome["b"] is State.LOST


def test_a_landing_that_is_told_late_keeps_when_its_receiver_began(clock):
    life = started(clock)
    clock.now += 5
    life.report("a", Event.STARTED, "2")
    clock.now += 5
    life.report("a", Event.LANDED, "1", 7)
    assert life.outcome.receivers["a"].state is State.LANDED
    assert life.outcome.receivers["a"].seconds == 5
    assert life.outcome.receivers["a"].bytes_here == 7


def test_those_who_came_are_remembered_up_to_a_bound(clock):
    life = Life(clock)
    for number in range(300):
        life.report(f"visitor-{number}", Event.LANDED, "1")
    assert len(life.outcome.receivers) == 256
    assert "visitor-299" in life.outcome.receivers
    assert life.ended is None


def test_a_share_that_is_being_read_is_not_idle_and_is_looked_at_again(clock):
    life = Life(clock, idle_s=10)
    life.enter()
    clock.now += 50
    assert life.tick() == 10
    assert life.ended is None
    life.leave()
    clock.now += 9
    assert life.tick() == 1
    clock.now += 1
    assert life.tick() is None
    assert life.ended == "settled"


def test_an_id_that_lived_twice_is_remembered_from_its_last_end_on():
    stones = Tombstones(2)
    stones.put(b"a", "revoked", [("x", "")])
    stones.put(b"b", "settled")
    stones.put(b"a", "settled", [("y", "root")])
    stones.put(b"c", "settled")
    assert stones.get(b"b") is None
    assert stones.landed(b"a", "y") == "root"
    assert stones.landed(b"a", "x") is None
