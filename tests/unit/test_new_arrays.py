"""Arrays that are made while their bytes already arrive."""

import resource
import threading
from itertools import pairwise

import numpy as np
import pytest

import weighlock
from weighlock import Catalog, DType
from weighlock.errors import Aborted, LimitExceeded
from weighlock.fetching.filling import into_new_memory, places_of
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef


def to_receive(catalog, limits=Limits()):  # noqa: B008
    source = next(iter(catalog.values())).source
    return into_new_memory(catalog, places_of(catalog, source), limits)


@pytest.fixture
def model(tmp_path):
    arrays = {f"t{n:04}": np.full((n % 5, 7), n, np.int16) for n in range(1500)}
    arrays["packed"] = np.arange(9, dtype=np.uint8)
    weighlock.save(tmp_path / "m.safetensors", arrays, durable=False)
    with weighlock.open(tmp_path / "m.safetensors") as catalog:
        yield catalog


def test_who_comes_before_an_array_is_made_waits_for_it(model):
    received = to_receive(model)
    last = len(received.spans) - 1
    found = []
    asking = threading.Thread(target=lambda: found.append(received.buffer(last)))
    asking.start()
    assert not found
    received.make()
    asking.join()
    assert found[0] is received.buffer(last)
    assert found[0].nbytes == received.spans[last].length


def test_each_tensor_has_its_own_array_of_its_shape(model):
    received = to_receive(model)
    received.make()
    for number, span in enumerate(received.spans):
        received.buffer(number)[:] = number % 251
        assert received.buffer(number).nbytes == span.length
    complete = received.complete()
    assert list(complete) == list(model)
    for name, ref in model.items():
        assert complete[name].spec == ref.spec
        span = ref.contiguous_span
        numbers = [n % 251 for n, there in enumerate(received.spans) if there == span]
        assert set(np.unique(complete[name].load().view(np.uint8))) <= set(numbers)
    arrays = [ref.load() for ref in complete.values() if ref.nbytes]
    assert not any(np.shares_memory(a, b) for a, b in pairwise(arrays))


def received_from(arrays, path):
    """What is received together, and what it comes to if the bytes of a file are received."""
    weighlock.save(path, arrays, durable=False)
    content = np.fromfile(path, np.uint8)
    with weighlock.open(path) as catalog:
        received = to_receive(catalog)
        received.make()
        for number, span in enumerate(received.spans):
            received.buffer(number)[:] = content[span.offset : span.end]
        return received.spans, received.complete()


def test_very_many_small_tensors_lie_together(tmp_path):
    """A few in one piece of memory, each with bytes of its own, where its type may begin."""
    rng = np.random.default_rng(1)
    kinds = (np.float64, np.float32, np.int16, DType.BF16.numpy, np.uint8, np.complex64)
    arrays = {
        f"t{n:04}": rng.integers(0, 100, (n % 5 + 1, n % 3 + 1, 900)).astype(kinds[n % 6])
        for n in range(1500)
    }
    arrays["large"] = rng.integers(0, 9, 200_000)
    spans, complete = received_from(arrays, tmp_path / "m.safetensors")
    assert len(spans) < 60
    assert max(span.length for span in spans) <= 4 << 20
    for name, array in arrays.items():
        found = complete[name].load()
        assert found.dtype == array.dtype
        assert found.flags.aligned
        assert found.flags.writeable
        assert (found == array).all()
    complete["t0003"].load()[:] = 7
    assert all((complete[n].load() == a).all() for n, a in arrays.items() if n != "t0003")


def test_what_is_kept_of_them_keeps_little_else(tmp_path):
    arrays = {f"t{n:04}": np.full(5000, n, np.float32) for n in range(1500)}
    _, complete = received_from(arrays, tmp_path / "m.safetensors")
    kept = complete["t0700"].load()
    del complete
    assert kept.base.nbytes <= 6 << 20  # two megabytes of which were never touched
    assert (kept == 700).all()


def test_tensors_that_would_not_begin_on_their_type_get_memory_of_their_own():
    """In a file of somebody else's, an odd number of bytes may lie before a wide number."""
    source = BytesSource(memoryview(b""))
    refs, offset = [], 0
    for number in range(3000):
        spec = (
            TensorSpec(f"t{number}", DType.U8, (10_001,))
            if number % 3 == 0
            else TensorSpec(f"t{number}", DType.F32, (2000,))
        )
        refs.append(StoredRef(spec, source, Span(offset, spec.nbytes)))
        offset += spec.nbytes
    received = to_receive(Catalog({ref.name: ref for ref in refs}))
    received.make()
    assert len(received.spans) < 3000
    arrays = [ref.load() for ref in received.complete().values()]
    assert all(array.flags.aligned for array in arrays)
    assert _memory_of(arrays) < offset + 4096


def _memory_of(arrays):
    """Bytes of everything these arrays keep."""
    owners = {id(a): a for a in (a if a.base is None else a.base for a in arrays)}
    return sum(array.nbytes for array in owners.values())


def test_short_runs_take_no_more_memory_than_they_need(tmp_path):
    """Two small tensors between large ones, many times: each pair is a run."""
    arrays = {}
    for n in range(300):
        arrays[f"{n:03}.a"] = np.full(20_000, n, np.uint16)
        arrays[f"{n:03}.b"] = np.full(20_000, n, np.uint16)
        arrays[f"{n:03}.c"] = np.full(80_000, n, np.uint16)
    spans, complete = received_from(arrays, tmp_path / "m.safetensors")
    assert len(spans) == 600
    assert _memory_of([ref.load() for ref in complete.values()]) == complete.nbytes


@pytest.mark.parametrize("names", [None, "*[2-9]"])
def test_all_kinds_of_small_tensors_are_fetched_among_very_many(names):
    """Tied ones, packed ones, empty ones, and with gaps where only some are wanted."""
    rng = np.random.default_rng(2)
    tensors = {f"t{n}": rng.integers(0, 99, (n % 4, 9000)).astype(np.uint16) for n in range(1500)}
    tensors |= {f"tied{n}": tensors[f"t{n}"] for n in range(100, 140)}
    tensors |= {
        f"packed{n}": rng.integers(0, 16, 2000, np.uint8).view(DType.F4.numpy) for n in range(30)
    }
    tensors |= {f"bf{n}": rng.standard_normal(900).astype(DType.BF16.numpy) for n in range(99)}
    with weighlock.Server() as server, server.share(tensors) as share:
        found = weighlock.fetch(share.url, names=names)
        wanted = {n: a for n, a in tensors.items() if names is None or n[-1] in "23456789"}
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            assert found[name].load().tobytes() == array.tobytes(), name
        streamed = dict(weighlock.stream(share.url, names=names))
    assert {name: array.tobytes() for name, array in streamed.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }
    kept = [array for name, array in streamed.items() if array.nbytes and "packed" not in name]
    assert all(a.base is None or a.base.nbytes <= a.nbytes for a in kept)  # no neighbours


def test_very_many_small_tensors_are_pushed(tmp_path):
    arrays = {f"t{n}": np.full((n % 3 + 1, 5000), n, np.float32) for n in range(400)}
    with weighlock.Server() as server:
        inbox = server.inbox(("a", "b"), into=tmp_path / "in")
        weighlock.push(inbox.url_for("a"), arrays)
        weighlock.push(inbox.url_for("b"), arrays, limit_rate=40_000_000)
        for _, catalog in inbox:
            with catalog:
                assert all((catalog[name].load() == array).all() for name, array in arrays.items())


def test_who_waits_is_told_when_no_more_are_made():
    """Memory ends before the last array: whoever waits for it must not wait for ever."""
    length = 256 << 20
    source = BytesSource(memoryview(b""))  # nothing is read from it here
    refs = [
        StoredRef(TensorSpec(f"t{n}", DType.U8, (length,)), source, Span(n * length, length))
        for n in range(8)
    ]
    received = to_receive(Catalog({ref.name: ref for ref in refs}))
    told = []

    def ask():
        try:
            received.buffer(7)
        except Aborted as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    with open("/proc/self/statm") as status:
        now = int(status.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 4 * length, before[1]))
    try:
        with pytest.raises(MemoryError):
            received.make()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    asking.join()
    assert told


def test_too_much_is_refused_before_anything_is_made(model):
    with pytest.raises(LimitExceeded):
        to_receive(model, Limits(memory_bytes=1000))
