"""Patience, with a clock and dice that do as they are told."""

import itertools

import pytest

from weighlock.errors import (
    Aborted,
    ChunkCorrupt,
    LocalProtocolError,
    NoSpace,
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
    TransferTimeout,
)
from weighlock.sources.retrying import Retrying

LOST = PeerLost("lost")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def patient(clock, patience_s=30.0, dice=1.0):
    return Retrying(patience_s, clock, lambda: dice)


def waited_for(retrying, clock, errors):
    """Wait as long as is asked after each error, until one is raised."""
    for error in errors:
        clock.now += retrying.pause_after(error)


@pytest.mark.parametrize(
    "error",
    [
        ShareGone("gone"),
        Refused("no"),
        Aborted("stop"),
        SourceChanged("other"),
        RemoteProtocolError("what?"),
        LocalProtocolError("oops"),
        NoSpace("full", wanted_bytes=1, free_bytes=0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_another_attempt_cannot_mend_is_raised_at_once(error, clock):
    with pytest.raises(type(error)) as caught:
        patient(clock).pause_after(error)
    assert caught.value is error


@pytest.mark.parametrize("error", [LOST, TransferTimeout("late", phase="idle")])
def test_pauses_double_up_to_a_bound(error, clock):
    retrying = patient(clock, patience_s=1000)
    pauses = [retrying.pause_after(error) for _ in range(12)]
    assert pauses[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    assert pauses[6:] == pytest.approx([5.0] * 6)


def test_dice_take_up_to_half_of_a_pause(clock):
    assert patient(clock, dice=0.0).pause_after(LOST) == pytest.approx(0.05)
    assert patient(clock, dice=0.5).pause_after(LOST) == pytest.approx(0.075)


def test_patience_ends_and_not_one_pause_later(clock):
    retrying = patient(clock)
    start = clock.now
    with pytest.raises(PeerLost):
        waited_for(retrying, clock, itertools.repeat(LOST, 1000))
    assert clock.now - start == pytest.approx(30)


def test_progress_renews_patience_and_shortens_pauses(clock):
    retrying = patient(clock)
    for _ in range(50):
        clock.now += 29
        assert retrying.pause_after(LOST) <= 0.1
        retrying.progressed()


@pytest.mark.parametrize("patience_s", [30, 0])
def test_an_owner_that_hashes_more_and_more_blocks_is_waited_for(clock, patience_s):
    retrying = patient(clock, patience_s)
    for hashed in range(1, 50):
        clock.now += 29
        assert retrying.pause_after(PeerLost("hashing", hashed_blocks=hashed)) <= 0.1
    for hashed in (49, 3):  # no more than it had
        with pytest.raises(PeerLost):
            waited_for(retrying, clock, [PeerLost("hashing", hashed_blocks=hashed)] * 100)


def test_without_patience_the_first_failure_is_final(clock):
    with pytest.raises(PeerLost):
        patient(clock, patience_s=0).pause_after(LOST)


@pytest.mark.parametrize(
    ("asked", "pause"), [(None, 0.1), (0, 0.1), (3, 3.0), (99_999, 30.0), (30, 30.0)]
)
def test_the_other_side_may_ask_for_a_longer_pause_within_patience(asked, pause, clock):
    error = PeerLost("busy", retry_after_s=asked)
    assert patient(clock).pause_after(error) == pytest.approx(pause)


def test_a_block_gets_three_tries(clock):
    retrying = patient(clock)
    bad = ChunkCorrupt("bad", chunk=7)
    assert retrying.pause_after(bad) == 0
    assert retrying.pause_after(bad) == 0
    with pytest.raises(ChunkCorrupt):
        retrying.pause_after(bad)


def test_tries_of_a_block_are_its_own_and_progress_of_others_does_not_renew_them(clock):
    retrying = patient(clock)
    for block in range(20):
        assert retrying.pause_after(ChunkCorrupt("bad", chunk=block)) == 0
        retrying.progressed()
    assert retrying.pause_after(ChunkCorrupt("bad", chunk=3)) == 0
    with pytest.raises(ChunkCorrupt):
        retrying.pause_after(ChunkCorrupt("bad", chunk=3))


def test_no_sequence_of_failures_waits_longer_than_patience_without_progress(clock):
    kinds = itertools.cycle(
        [LOST, TransferTimeout("late", phase="idle"), PeerLost("busy", retry_after_s=20)]
    )
    retrying = patient(clock, dice=0.3)
    start = clock.now
    with pytest.raises((PeerLost, TransferTimeout)):
        waited_for(retrying, clock, kinds)
    assert clock.now - start <= 30.001


def test_a_wait_that_took_all_the_patience_is_followed_by_another(clock):
    """With the usual limits, nothing for 30 s is noticed after 30 s: that is one failure."""
    retrying = patient(clock)
    retrying.progressed()
    clock.now += 30
    clock.now += retrying.pause_after(TransferTimeout("late", phase="idle"))
    clock.now += 30
    with pytest.raises(TransferTimeout):
        retrying.pause_after(TransferTimeout("late", phase="idle"))
