"""How slow a peer may be: told what was waited and what came, no clock."""

from weighlock.sources.pace import LEAST_BYTES_PER_S, Pace


def test_nothing_is_held_against_a_peer_before_a_stretch_is_over():
    pace = Pace(30)
    assert not any(pace.is_too_slow(5, 1) for _ in range(5))
    assert pace.is_too_slow(5, 1)


def test_a_peer_that_sends_enough_is_never_too_slow():
    pace = Pace(1)
    assert not any(pace.is_too_slow(0.1, LEAST_BYTES_PER_S // 8) for _ in range(100))


def test_what_came_fast_does_not_count_for_what_trickles_afterwards():
    pace = Pace(10)
    assert not pace.is_too_slow(0.1, 100_000_000)
    slow = [pace.is_too_slow(1, 1) for _ in range(20)]
    assert slow.index(True) == 19  # the first stretch had the fast bytes, the second none


def test_what_begins_anew_is_not_held_against_what_was_before():
    pace = Pace(10)
    assert not pace.is_too_slow(9, 1)
    pace.begin()
    assert not pace.is_too_slow(9, 1)


def test_bytes_that_took_no_time_are_never_too_few():
    pace = Pace(10)
    assert not any(pace.is_too_slow(0, 1) for _ in range(1000))
