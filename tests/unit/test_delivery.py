"""Finished blocks of a combination: each reaches the target once, by one thread at a time."""

import threading

import numpy as np
import pytest

from waiting import until
from weighlock import DType, TensorSpec
from weighlock.combining.delivery import Delivery
from weighlock.combining.outcome import target_for
from weighlock.combining.plan import Part
from weighlock.limits import Limits

SPEC = TensorSpec("w", DType.U8, (1000,))
NOBODY = Part(SPEC, (), (), None)


@pytest.fixture
def target(tmp_path):
    options = {"order": ["w"], "metadata": {}, "aliases": {}, "durable": False}
    target = target_for(tmp_path / "out", [NOBODY], limits=Limits(), **options)
    yield target
    target.discard()


class Watched:
    """A target that counts who is in it, and can be held up or broken."""

    def __init__(self, target):
        self._target = target
        self._inside = threading.Lock()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.starts = []
        self.error = None

    def put(self, spec, start, data):
        assert self._inside.acquire(blocking=False), "two are in at once"
        try:
            self.starts.append(start)
            assert self.goes_on.wait(30)
            if self.error is not None:
                raise self.error
            self._target.put(spec, start, data)
        finally:
            self._inside.release()


def put(delivery, start):
    buffer = delivery.buffer()
    buffer[:10] = start // 10
    delivery.put(SPEC, start, 10, buffer)


def test_blocks_of_many_threads_arrive_each_once(target):
    watched = Watched(target)
    delivery = Delivery(watched, 64)
    starts = iter(range(0, 1000, 10))
    taking = threading.Lock()

    def work():
        while True:
            with taking:
                start = next(starts, None)
            if start is None:
                return
            put(delivery, start)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(watched.starts) == list(range(0, 1000, 10))
    target.finish()
    with target.catalog() as catalog:
        assert (catalog["w"].load() == np.repeat(np.arange(100), 10)).all()


def test_who_finds_somebody_writing_goes_on(target):
    watched = Watched(target)
    delivery = Delivery(watched, 64)
    watched.goes_on.clear()
    writer = threading.Thread(target=put, args=(delivery, 0))
    writer.start()
    until(lambda: watched.starts)
    for start in (10, 20, 30, 40):
        put(delivery, start)  # returns at once
    one_more = threading.Thread(target=put, args=(delivery, 50))
    one_more.start()
    one_more.join(0.2)
    assert one_more.is_alive()  # what waits is bounded
    assert watched.starts == [0]
    watched.goes_on.set()
    writer.join()
    one_more.join()
    assert sorted(watched.starts) == [0, 10, 20, 30, 40, 50]


def test_a_block_that_comes_when_a_turn_ends_is_put_as_well(target, monkeypatch):
    watched = Watched(target)
    delivery = Delivery(watched, 64)
    end_turn, others = delivery._end_turn_of, [10]

    def end_late(me):
        while others:  # everything was put, and the turn is not given back
            late = threading.Thread(target=put, args=(delivery, others.pop()))
            late.start()
            late.join()
        end_turn(me)

    monkeypatch.setattr(delivery, "_end_turn_of", end_late)
    put(delivery, 0)
    assert watched.starts == [0, 10]


def test_a_target_that_refuses_is_heard_by_who_writes(target):
    watched = Watched(target)
    watched.error = OSError("no room")
    delivery = Delivery(watched, 64)
    with pytest.raises(OSError, match="no room"):
        put(delivery, 0)
    with pytest.raises(OSError, match="no room"):  # and by the next: nobody waits for ever
        put(delivery, 10)
