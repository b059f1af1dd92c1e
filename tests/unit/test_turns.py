"""Threads that take the next item each: every item once, the first failure, nobody left at work."""

import threading

import pytest

from weighlock.sources.turns import in_turns


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_item_is_done_once(threads, count):
    done, workers = [], []

    def worker():
        workers.append(threading.get_ident())
        return done.append

    in_turns((n for n in range(count)), worker, threads)
    assert sorted(done) == list(range(count))
    assert len(workers) == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_failure_ends_it_when_all_have_stopped(threads):
    under_way, done = [], []

    def work(item):
        under_way.append(item)
        if item == 5:
            raise OSError("five")
        done.append(item)
        under_way.remove(item)

    with pytest.raises(OSError, match="five"):
        in_turns(iter(range(100_000)), lambda: work, threads)
    assert under_way == [5]
    assert len(done) < 100_000


def test_what_the_items_raise_is_raised():
    def items():
        yield 1
        raise ValueError("no more of these")

    with pytest.raises(ValueError, match="no more"):
        in_turns(items(), lambda: lambda _: None, 2)
