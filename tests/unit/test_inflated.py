"""Deflated bytes, read as what they unpack to."""

import itertools
import pickle
import sys
import threading
import zlib

import numpy as np
import pytest

from weighlock.errors import FormatError, ShortRead
from weighlock.sources import inflated
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import BytesSource

PLAIN = np.random.default_rng(3).integers(0, 40, 700_000, np.uint8).tobytes()


def deflate(data, level=6):
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


PACKED = deflate(PLAIN)
SIZE = len(PLAIN)


def made(packed=PACKED, size=SIZE, around=b"front"):
    source = BytesSource(around + packed + b"back")
    return InflatedSource(source, len(around), len(packed), size, "member")


def read(source, offset, length):
    buffer = bytearray(length)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def test_everything_at_once():
    assert read(made(), 0, len(PLAIN)) == PLAIN


@pytest.mark.parametrize(
    "steps",
    [
        [(0, 10), (10, 10), (20, 300_000), (300_020, 399_980)],
        [(699_999, 1), (0, 1)],
        [(500_000, 100), (499_999, 100), (100, 5), (100, 5)],
        [(0, 0), (700_000, 0), (5, 0), (5, 1)],
        [(262_144, 262_144), (262_143, 2), (524_287, 2)],
    ],
    ids=["forwards", "last", "back", "nothing", "edges"],
)
def test_any_order_of_reads(steps):
    source = made()
    for offset, length in steps:
        assert read(source, offset, length) == PLAIN[offset : offset + length]


@pytest.mark.parametrize("level", [0, 1, 9])
def test_every_level(level):
    packed = deflate(PLAIN, level)
    assert read(made(packed), 1000, 300_000) == PLAIN[1000:301_000]


def test_reads_behind_the_end():
    source = made()
    with pytest.raises(ShortRead) as caught:
        read(source, len(PLAIN) - 3, 10)
    assert (caught.value.wanted, caught.value.got) == (10, 3)
    assert read(source, len(PLAIN) - 3, 3) == PLAIN[-3:]


def test_fewer_bytes_than_announced():
    source = made(size=len(PLAIN) + 5)
    assert read(source, 0, 10) == PLAIN[:10]
    with pytest.raises(FormatError, match=r"member.*700,000 bytes, 700,005 were announced"):
        read(source, 0, len(PLAIN) + 5)


def test_never_more_than_announced():
    bomb = deflate(bytes(50_000_000))
    source = made(bomb, 100)
    assert read(source, 0, 100) == bytes(100)
    with pytest.raises(ShortRead):
        read(source, 0, 101)


def test_packed_bytes_that_break_off():
    with pytest.raises(FormatError, match="announced"):
        read(made(PACKED[: len(PACKED) // 2]), 0, len(PLAIN))


def test_what_is_not_deflated():
    with pytest.raises(FormatError, match=r"member.*cannot be unpacked"):
        read(made(b"\xff" * 100, 100), 0, 100)


def test_nothing_in_it():
    assert read(made(deflate(b""), 0), 0, 0) == b""


def test_after_an_error_it_still_reads_what_is_whole():
    source = made(PACKED[: len(PACKED) // 2])
    with pytest.raises(FormatError):
        read(source, 0, len(PLAIN))
    assert read(source, 0, 1000) == PLAIN[:1000]


def test_equal_if_they_read_the_same_place():
    source = BytesSource(PACKED * 2)
    one = InflatedSource(source, 0, len(PACKED), len(PLAIN), "a")
    same = InflatedSource(source, 0, len(PACKED), len(PLAIN), "b")
    other = InflatedSource(source, len(PACKED), len(PACKED), len(PLAIN), "a")
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "a"


def test_pickled_and_in_threads():
    source = pickle.loads(pickle.dumps(made()))
    wrong = []

    def work(seed):
        for offset in np.random.default_rng(seed).integers(0, 600_000, 10):
            if read(source, int(offset), 5000) != PLAIN[offset : offset + 5000]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closing_leaves_the_source_below_open():
    below = BytesSource(PACKED)
    InflatedSource(below, 0, len(PACKED), len(PLAIN), "a").close()
    assert read(below, 0, 3) == PACKED[:3]


def test_a_read_that_is_interrupted_anywhere_leaves_nothing_torn():
    def interrupted(number):
        lines = 0

        def trace(frame, event, arg):
            nonlocal lines
            if frame.f_code.co_filename != inflated.__file__:
                return None
            lines += event == "line"
            if lines == number:
                raise KeyboardInterrupt
            return trace

        return trace

    for number in itertools.count(1):
        source = made()
        sys.settrace(interrupted(number))
        try:
            read(source, 0, 400_000)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(None)
        assert read(source, 600_000, 1000) == PLAIN[600_000:601_000], number
    assert number > 20


def test_a_signal_handler_reads_in_the_midst_of_a_read():
    class Interrupting(BytesSource):
        """Asks for other bytes of the source above while it is asked for its own."""

        above = None

        def read_into(self, offset, buffer):
            above, self.above = self.above, None
            if above is not None:
                assert read(above, 500_000, 10) == PLAIN[500_000:500_010]
            super().read_into(offset, buffer)

    below = Interrupting(PACKED)
    source = InflatedSource(below, 0, len(PACKED), SIZE, "member")
    for _ in range(3):
        below.above = source
        assert read(source, 0, SIZE) == PLAIN


FORKED = """
import os, signal, threading, zlib
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import BytesSource

reading, go_on = threading.Event(), threading.Event()


class Slow(BytesSource):
    def read_into(self, offset, buffer):
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            go_on.wait()
        super().read_into(offset, buffer)


def check():
    buffer = bytearray(len(plain))
    source.read_into(0, memoryview(buffer))
    assert buffer == plain


plain = os.urandom(1_000_000)
packed = zlib.compress(plain, wbits=-15)
source = InflatedSource(Slow(packed), 0, len(packed), len(plain), "member")
thread = threading.Thread(target=check)
thread.start()
reading.wait()
child = os.fork()
if not child:
    signal.alarm(20)  # it would wait for a thread that is not here
    check()
    os._exit(0)
status = os.waitpid(child, 0)[1]
go_on.set()
thread.join()
assert status == 0
"""


def test_a_fork_in_the_midst_of_a_read(run_python):
    run_python(FORKED)
