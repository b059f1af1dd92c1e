"""Of many sources only those that were used last keep what they hold."""

import gc
import pickle

from weighlock.sources.resting import Resting


class Sleeper:
    def __init__(self):
        self.rests = 0

    def rest(self):
        self.rests += 1


def test_who_was_not_used_for_the_longest_time_rests():
    resting = Resting()
    sources = [Sleeper() for _ in range(12)]
    for source in sources[:8]:
        resting.use(source)
    resting.use(sources[0])
    assert not any(source.rests for source in sources)
    for source in sources[8:]:
        resting.use(source)
    assert [source.rests for source in sources] == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_it_keeps_no_source_alive():
    resting = Resting()
    for _ in range(20):
        resting.use(Sleeper())
    gc.collect()
    last = [Sleeper() for _ in range(9)]
    for source in last:
        resting.use(source)
    assert [source.rests for source in last] == [1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_it_travels_empty():
    resting = Resting()
    resting.use(Sleeper())
    pickle.loads(pickle.dumps(resting)).use(Sleeper())
