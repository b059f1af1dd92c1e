"""The contract of a source, run on every source there is and on the fake that counts."""

import concurrent.futures
import contextlib
import pickle
import random
import zlib

import pytest

from conftest import open_descriptors
from suites import served
from suites.counting import CountingSource
from weighlock.errors import Refused, ShortRead, SourceError
from weighlock.sources.access import Access
from weighlock.sources.base import Source
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import BytesSource, FileSource
from weighlock.sources.ticket import Tickets

CONTENT = random.Random(0).randbytes(100_000)
LARGE = random.Random(1).randbytes(17 * 1024 * 1024 + 12_345)
"""Enough for a source that reads with several threads to do so, and no multiple of anything."""


def read(source, offset, length):
    buffer = bytearray(length)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


class SourceSuite:
    """What holds for every source. A subclass says how to make one of some bytes."""

    @pytest.fixture
    def make(self, tmp_path):
        raise NotImplementedError

    @pytest.fixture
    def source(self, make):
        before = open_descriptors()
        found = make(CONTENT)
        yield found
        found.close()
        assert open_descriptors() == before

    def test_it_is_a_source(self, source):
        assert isinstance(source, Source)
        assert isinstance(source.label, str)
        assert source.label
        assert source.size == len(CONTENT)

    def test_whole_content_is_read(self, source):
        assert read(source, 0, len(CONTENT)) == CONTENT

    def test_any_part_is_read_in_any_order(self, source):
        chosen = random.Random(2)
        for _ in range(200):
            first = chosen.randrange(len(CONTENT))
            length = chosen.randrange(len(CONTENT) - first + 1)
            assert read(source, first, length) == CONTENT[first : first + length]

    def test_first_and_last_byte_are_read(self, source):
        assert read(source, 0, 1) == CONTENT[:1]
        assert read(source, len(CONTENT) - 1, 1) == CONTENT[-1:]

    @pytest.mark.parametrize("offset", [0, 5, len(CONTENT)])
    def test_nothing_can_be_read_anywhere(self, source, offset):
        assert read(source, offset, 0) == b""

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(len(CONTENT), 1), (len(CONTENT) - 3, 4), (0, len(CONTENT) + 1), (10**12, 5)],
    )
    def test_read_beyond_the_end_raises_with_both_numbers(self, source, offset, length):
        with pytest.raises(ShortRead) as caught:
            read(source, offset, length)
        assert caught.value.wanted == length
        assert caught.value.got == max(0, len(CONTENT) - offset)
        assert source.label in str(caught.value)
        assert read(source, 1, 2) == CONTENT[1:3]

    @pytest.mark.parametrize(("offset", "length"), [(-1, 1), (-4, 2), (-len(CONTENT), 7)])
    def test_negative_offset_is_no_offset_from_the_end(self, source, offset, length):
        with pytest.raises((SourceError, ValueError)):
            read(source, offset, length)

    def test_only_the_given_part_of_a_buffer_is_filled(self, source):
        buffer = bytearray(b"\xaa" * 30)
        source.read_into(100, memoryview(buffer)[10:20])
        assert bytes(buffer) == b"\xaa" * 10 + CONTENT[100:110] + b"\xaa" * 10

    def test_threads_do_not_disturb_each_other(self, source):
        def many(seed):
            chosen = random.Random(seed)
            for _ in range(100):
                first = chosen.randrange(len(CONTENT) - 500)
                assert read(source, first, 500) == CONTENT[first : first + 500]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(many, range(8)))

    def test_large_read_is_exact(self, make, no_leaks):
        source = make(LARGE)
        try:
            assert read(source, 0, len(LARGE)) == LARGE
            assert read(source, 12_345, len(LARGE) - 54_321) == LARGE[12_345 : len(LARGE) - 41_976]
            with pytest.raises(ShortRead):
                read(source, 1, len(LARGE))
        finally:
            source.close()

    def test_source_of_nothing(self, make):
        source = make(b"")
        assert source.size == 0
        assert read(source, 0, 0) == b""
        with pytest.raises(ShortRead):
            read(source, 0, 1)
        source.close()

    def test_closing_is_idempotent_and_final(self, source):
        source.close()
        source.close()
        with pytest.raises(SourceError):
            read(source, 0, 1)

    def test_closing_is_final_also_for_what_was_read_before(self, source):
        assert read(source, 0, len(CONTENT)) == CONTENT
        assert read(source, 5, 5) == CONTENT[5:10]
        source.close()
        with pytest.raises(SourceError):
            read(source, 5, 5)

    def test_it_equals_itself_and_not_other_bytes(self, make, source):
        other = make(CONTENT[::-1])
        assert source == source
        assert hash(source) == hash(source)
        assert source != other
        other.close()

    def test_pickle_reads_the_same_bytes(self, source):
        copy = pickle.loads(pickle.dumps(source))
        assert copy.size == source.size
        assert read(copy, 77, 1000) == CONTENT[77:1077]
        copy.close()


def make_file(tmp_path, content, **options):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
    path.write_bytes(content)
    return FileSource(path, **options)


class TestFileSource(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path):
        return lambda content: make_file(tmp_path, content)


class TestFileSourceThatHoldsNothing(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path):
        return lambda content: make_file(tmp_path, content, hold=False)


class TestBytesSource(SourceSuite):
    @pytest.fixture
    def make(self):
        return BytesSource


class TestBytesSourceOverPartOfABuffer(SourceSuite):
    @pytest.fixture
    def make(self):
        return lambda content: BytesSource(memoryview(bytearray(b"<" + content + b">"))[1:-1])


def deflated(content):
    packer = zlib.compressobj(1, wbits=-15)
    return packer.compress(content) + packer.flush()


class TestInflatedSource(SourceSuite):
    @pytest.fixture
    def make(self):
        def make(content):
            packed = deflated(content)
            around = BytesSource(b"before" + packed + b"after")
            return InflatedSource(around, 6, len(packed), len(content), "deflated")

        return make


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """A directory and the origin that serves its files."""
    directory = tmp_path_factory.mktemp("web")
    process, origin = served.start(directory)
    yield directory, origin
    process.communicate(timeout=20)


def make_remote(web, content, place, **options):
    directory, origin = web
    name = f"{len(list(directory.iterdir()))}"
    (directory / name).write_bytes(content)
    return HttpSource(Remote(f"{origin}/{place.format(name)}", **options))


class TestHttpSourceThatVerifies(SourceSuite):
    @pytest.fixture
    def make(self, web):
        return lambda content: make_remote(web, content, "s/{}/model.safetensors")

    def test_it_verifies(self, source):
        assert source.verifies


class TestHttpSourceThatDoesNotVerify(SourceSuite):
    @pytest.fixture
    def make(self, web):
        return lambda content: make_remote(web, content, "s/{}/model.safetensors", verify=False)

    def test_it_does_not_verify(self, source):
        assert not source.verifies


class TestHttpSourceOfAPlainServer(SourceSuite):
    @pytest.fixture
    def make(self, web):
        return lambda content: make_remote(web, content, "plain/{}/file")

    def test_it_cannot_verify(self, source):
        assert not source.verifies


class TestTicketSource(SourceSuite):
    """A share whose URL came in a message."""

    @pytest.fixture
    def make(self, web):
        tickets = Tickets(Access(allow=["127.0.0.1"]))

        def make(content):
            with contextlib.closing(make_remote(web, content, "s/{}/model.safetensors")) as known:
                return tickets(known.remote.address.url, len(content))

        return make

    def test_pickle_reads_the_same_bytes(self, source):
        """It does, once it is said again what may be dialled."""
        copy = pickle.loads(pickle.dumps(source))
        assert copy == source
        with pytest.raises(Refused):
            read(copy, 77, 1000)
        with contextlib.closing(copy.connect(Access(allow=["127.0.0.1"]))) as connected:
            assert read(connected, 77, 1000) == CONTENT[77:1077]

    def test_few_of_many_stay_open(self, make):
        before = len(open_descriptors())
        sources = [make(CONTENT) for _ in range(12)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for _ in range(3):
                assert all(pool.map(lambda s: read(s, 9, 9) == CONTENT[9:18], sources))
        read(sources[0], 0, 1)
        assert len(open_descriptors()) - before <= 3
        assert sum(source._opened is not None for source in sources) <= 4
        for source in sources:
            source.close()
        assert len(open_descriptors()) == before


class TestCountingSourceOverFile(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path):
        return lambda content: CountingSource(make_file(tmp_path, content))


class TestCountingSourceOverBytes(SourceSuite):
    @pytest.fixture
    def make(self):
        return lambda content: CountingSource(BytesSource(content))

    def test_it_remembers_reads(self, source):
        read(source, 3, 4)
        read(source, 0, 0)
        assert source.reads == [(3, 4), (0, 0)]
        assert source.taken() == [(3, 4)]
        assert source.taken() == []
