"""What to ask for next: every wanted block once, whatever lands, breaks or comes twice."""

from hypothesis import given
from hypothesis import strategies as st

from weighlock.fetching.plan import Plan, Portion

BLOCKS = st.lists(st.integers(0, 50), unique=True).map(sorted)


def taken(plan, most=1):
    found = []
    while (run := plan.take(most)) is not None:
        found.append(run)
    return found


@given(BLOCKS)
def test_what_is_given_out_is_a_partition_of_what_is_wanted(blocks):
    plan = Plan(blocks)
    assert [block for run in taken(plan) for block in run] == blocks
    assert plan.take() is None


@given(BLOCKS)
def test_it_is_complete_when_the_last_block_has_landed_and_not_before(blocks):
    plan = Plan(blocks)
    for block in blocks:
        assert not plan.is_complete
        assert plan.landed(block) is True
        assert plan.landed(block) is False  # I16: counts never double
    assert plan.is_complete


@given(BLOCKS, st.data())
def test_after_a_break_only_what_is_missing_is_asked_for(blocks, data):
    plan = Plan(blocks)
    for run in taken(plan):
        done = data.draw(st.integers(0, len(run)))
        for block in run[:done]:
            plan.landed(block)
        again = [block for part in plan.missing_of(run) for block in part]
        assert again == list(run[done:])


@given(BLOCKS, st.integers(1, 6), st.integers(1, 5))
def test_neighbouring_ranges_are_asked_for_together_and_every_block_once(blocks, most, takers):
    plan = Plan(blocks, takers=takers)
    found = taken(plan, most)
    assert [block for run in found for block in run] == blocks
    assert all(len(run) <= 8 * most for run in found)
    for run in found:
        assert plan.missing_of(run, most) == [run]
        smaller = plan.missing_of(run, 1)
        assert [block for part in smaller for block in part] == list(run)
        assert all(part.start // 8 == part[-1] // 8 for part in smaller)


def test_together_goes_most_first_and_in_the_end_each_takes_one_range():
    plan = Plan(range(8 * 40), takers=4)
    counts = [len(run) // 8 for run in taken(plan, 4)]
    assert counts == [4, 4, 4, 4, 4, 4, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]


def test_who_asks_alone_leaves_nothing_to_others():
    plan = Plan(range(8 * 10))
    assert [len(run) // 8 for run in taken(plan, 4)] == [4, 4, 2]


def test_what_comes_fast_is_asked_for_in_larger_requests_and_what_comes_slowly_in_smaller_ones():
    portion = Portion(16)
    found = []
    for seconds in (0.1, 0.4, 0.1, 0.1, 0.7, 1.5, 1.5, 1.5, 1.5, 1.5, 0.4, 0.6, 0.0):
        found.append(portion.ranges)
        portion.took(range(8 * portion.ranges), seconds)
    assert found == [1, 4, 8, 16, 16, 16, 8, 4, 2, 1, 1, 2, 2]
    assert portion.ranges == 8


def test_a_short_request_says_nothing_of_longer_ones():
    portion = Portion(16)
    portion.took(range(8), 0.1)
    portion.took(range(8), 0.1)
    assert portion.ranges == 4


def test_what_did_not_go_through_is_not_asked_for_at_once_again():
    portion = Portion(16)
    for _ in range(3):
        portion.took(range(8 * portion.ranges), 0.4)
    portion.failed(range(8 * 8))
    assert portion.ranges == 1
    portion.failed(range(8))  # of one range: that was no matter of its size
    found = []
    for _ in range(4):
        found.append(portion.ranges)
        portion.took(range(8 * portion.ranges), 0.4)
    assert found == [1, 2, 4, 4]


def test_what_lies_apart_is_not_asked_for_together():
    plan = Plan([*range(8), *range(16, 24)])
    assert taken(plan, 4) == [range(8), range(16, 24)]


def test_blocks_that_landed_in_the_middle_split_a_run():
    plan = Plan(range(8))
    plan.landed(3)
    assert plan.missing_of(range(8)) == [range(3), range(4, 8)]


@given(BLOCKS.filter(bool))
def test_a_server_without_ranges_is_asked_once_for_everything(blocks):
    plan = Plan(blocks, whole=blocks[-1] + 5)
    (run,) = taken(plan)
    assert (run.start, run.stop) == (0, blocks[-1] + 5)
    plan.landed(blocks[0])
    if len(blocks) > 1:
        assert plan.missing_of(run) == [run]
    for block in blocks:
        plan.landed(block)
    assert plan.missing_of(run) == []


def test_nothing_wanted_is_complete_from_the_start():
    for whole in (None, 7):
        plan = Plan([], whole=whole)
        assert plan.is_complete
        assert plan.take() is None


def test_blocks_nobody_wanted_do_not_count():
    plan = Plan([1, 5], whole=9)
    assert plan.landed(3) is False
    assert not plan.is_complete
