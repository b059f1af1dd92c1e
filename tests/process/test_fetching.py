"""Every way of fetching from a real server: to memory, arrays, modules, files; parts and rounds."""

import gc
import itertools
import multiprocessing
import os
import pickle
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import weighlock
from conftest import open_descriptors
from process.counting_proxy import counting_proxy
from process.plain_server import PlainServer
from waiting import until
from weighlock.errors import Aborted, LayoutError, LimitExceeded, LocalProtocolError
from weighlock.sources.access import Address

torch = pytest.importorskip("torch")

MB = 1 << 20


def model():
    rng = np.random.default_rng(1)
    tensors = {f"layer.{n}.weight": rng.standard_normal((300, 1000), np.float32) for n in range(6)}
    tensors["half"] = rng.standard_normal(70_001, np.float32).astype(ml_dtypes.bfloat16)
    tensors["tied"] = tensors["layer.2.weight"]
    tensors["turned"] = tensors["layer.3.weight"].T
    tensors["scalar"] = np.array(2.5)
    tensors["empty"] = np.zeros((0, 3), np.int8)
    tensors.update({f"small.{n}": np.arange(n, n + 40, dtype=np.int32) for n in range(500)})
    return tensors


MODEL = model()
APART = {name: np.array(array) for name, array in MODEL.items()}
"""The same, each in memory of its own."""


def assert_same(found, expected=MODEL):
    assert set(found) == set(expected)
    for name, array in expected.items():
        got = found[name]
        got = got.load() if isinstance(got, weighlock.TensorRef) else got
        array = np.asarray(array)
        assert got.dtype == array.dtype, name
        assert got.shape == array.shape, name
        assert got.tobytes() == array.tobytes(), name


@pytest.fixture
def server(no_leaks):
    with weighlock.Server() as server:
        yield server


@pytest.fixture
def url(server):
    return server.share(MODEL, metadata={"round": "7"}).url


def test_to_memory(url):
    found = weighlock.fetch(url)
    assert_same(found)
    assert found.metadata["round"] == "7"
    assert dict(found.aliases) == {"tied": "layer.2.weight"}
    assert found.notes == ()
    found["half"].load()[0] = 0  # its own buffer, and writable


def test_to_a_file_that_the_reference_opens(url, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    with weighlock.fetch(url, into=path) as found:
        assert_same(found)
    loaded = safetensors.load_file(path)
    assert set(loaded) == set(MODEL) - {"tied"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_into_arrays_that_are_there(url):
    out = {
        name: np.zeros(np.shape(array), np.asarray(array).dtype) for name, array in MODEL.items()
    }
    out["turned"] = np.zeros((300, 1000), np.float32).T  # not as a file has it
    addresses = {name: array.__array_interface__["data"][0] for name, array in out.items()}
    weighlock.fetch(url, out=out)
    assert_same(out)
    assert addresses == {name: array.__array_interface__["data"][0] for name, array in out.items()}


def test_into_a_module_with_tied_weights(server):
    def make():
        first, last = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
        last.weight = first.weight
        return torch.nn.Sequential(first, last, torch.nn.BatchNorm1d(7))

    trained, fresh = make(), make()
    share = server.share(trained.state_dict())
    before = [parameter.data_ptr() for parameter in fresh.parameters()]
    weighlock.fetch(share.url, out=fresh)
    assert before == [parameter.data_ptr() for parameter in fresh.parameters()]
    for name, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_arrays_of_other_types_receive_what_is_converted(url, tmp_path):
    """Of a share and of a file on another server, of one file and of shards."""
    expected = {name: np.asarray(array).astype(np.float64) for name, array in MODEL.items()}
    told = []

    def out():
        arrays = {name: np.zeros(array.shape) for name, array in expected.items()}
        first = next(iter(MODEL))
        arrays[first] = np.zeros(expected[first].shape, MODEL[first].dtype)  # as it comes
        arrays["half"] = torch.zeros(expected["half"].shape, dtype=torch.float32)
        return arrays

    weighlock.save(tmp_path / "shards", MODEL, max_shard_bytes=1_000_000, durable=False)
    files = {f"/{path.name}": path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    with PlainServer(files) as plain:
        index = plain.url("/model.safetensors.index.json")
        for place, names in ((url, None), (url, "*"), (index, None)):
            arrays = out()
            tell = lambda here, total: told.append((here, total))  # noqa: E731
            pulled = []
            how = {"cast": True, "progress": tell, "on_pulled": pulled.append}
            found = weighlock.fetch(place, out=arrays, names=names, **how)
            assert sum(pulled) >= sum(np.asarray(array).nbytes for array in MODEL.values())
            for name, array in expected.items():
                assert np.array_equal(np.asarray(arrays[name], np.float64), array), name
            assert found["half"].dtype == "F32"
            assert told[-1][0] == told[-1][1] > 0
    with pytest.raises(LayoutError, match="cast=True converts"):
        weighlock.fetch(url, out=out())
    with pytest.raises(LocalProtocolError, match="which is not given"):
        weighlock.fetch(url, cast=True)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({}, r"names differ: none of out= .* and \d+ more of the URL not in out=; names= chooses"),
        ({**MODEL, "more": np.zeros(2)}, r"'more' of out= not at the URL, none of .*names='\*'"),
        ({**APART, "half": np.zeros(70_001, np.float32)}, "BF16"),
        ({**APART, "half": np.zeros(7, ml_dtypes.bfloat16)}, "shape"),
    ],
    ids=["too few", "too many", "dtype", "shape"],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_asked_for(url, out, message):
    with pytest.raises(LayoutError, match=message):
        weighlock.fetch(url, out=out)


def test_a_part_of_the_model(url, tmp_path):
    wanted = {name: MODEL[name] for name in MODEL if name.startswith(("small.1", "ti", "layer.2"))}
    names = ["small.1*", "ti*", "layer.2.*"]
    assert_same(weighlock.fetch(url, names=names), wanted)
    with weighlock.fetch(url, names=names, into=tmp_path / "part.safetensors") as part:
        assert_same(part, wanted)
        assert part.metadata["round"] == "7"
    out = {name: np.zeros_like(array) for name, array in wanted.items()}
    weighlock.fetch(url, names=names, out={**out, "other": np.zeros(3)})
    assert_same(out, wanted)
    with pytest.raises(LayoutError, match="no tensor matches"):
        weighlock.fetch(url, names="nothing*")


def test_only_the_blocks_of_a_part_travel(server):
    share = server.share({f"t{n}": np.full(MB, n, np.float32) for n in range(8)})
    with counting_proxy(server.port) as (port, count):
        weighlock.fetch(share.url.replace(str(server.port), str(port)), names="t3")
        assert count() < 6.5 * MB  # four blocks and what its ends share, and the first


def test_a_slice_of_a_remote_tensor_takes_the_blocks_that_cover_it(server):
    array = np.arange(8 * MB, dtype=np.float32).reshape(8192, 1024)
    share = server.share({"w": array})
    with counting_proxy(server.port) as (port, count):
        with weighlock.open(share.url.replace(str(server.port), str(port))) as remote:
            opened = count()
            assert (remote["w"][4000:4010] == array[4000:4010]).all()
            assert count() - opened < 1.2 * MB
            assert (remote["w"][4010:4020] == array[4010:4020]).all()
            assert count() - opened < 1.2 * MB  # the block is still here
            assert (remote["w"][:, 5] == array[:, 5]).all()
        with weighlock.open(share.url.replace(str(server.port), str(port)), verify=False) as remote:
            before = count()
            assert (remote["w"][100:102] == array[100:102]).all()
            assert count() - before < 0.1 * MB  # exactly its bytes


def test_a_round_moves_what_changed(server, tmp_path):
    """5 % of the tensors changed: at most 7 % of the bytes travel."""
    rng = np.random.default_rng(2)
    first = {f"t{n}": rng.integers(0, 255, 4 * MB, np.uint8) for n in range(40)}
    second = {**first, "t7": first["t7"] + 1, "t30": first["t30"] + 1}
    base = tmp_path / "base.safetensors"
    weighlock.fetch(server.share(first).url, into=base).close()
    share = server.share(second)
    with counting_proxy(server.port) as (port, count):
        there = share.url.replace(str(server.port), str(port))
        with weighlock.fetch(there, into=tmp_path / "next", base=base) as found:
            assert_same(found, second)
        assert count() < 0.07 * share.size
        before = count()
        assert_same(weighlock.fetch(there, base=first), second)  # arrays are a base as well
        assert count() - before < 0.07 * share.size


def test_a_base_of_other_tensors_changes_nothing(url, tmp_path):
    weighlock.save(tmp_path / "b", {"half": np.zeros(3), "layer.0.weight": np.zeros((300, 1000))})
    assert_same(weighlock.fetch(url, base=tmp_path / "b"))


def test_streaming_gives_every_tensor_in_the_order_of_the_file(url):
    names = [name for name, array in weighlock.stream(url)]
    assert sorted(names) == sorted(MODEL)
    assert_same(dict(weighlock.stream(url)))
    assert len(list(weighlock.stream(url, names="layer.*"))) == 6
    with pytest.raises(LayoutError, match="no tensor matches 'nothing'"):
        next(weighlock.stream(url, names="nothing"))


@pytest.mark.parametrize("way", ["open", "message"])
def test_what_nobody_closed_ends_with_its_last_ref(url, way):
    """Not with the next collection of garbage, which may find its sockets first."""
    before = open_descriptors()
    gc.disable()
    try:
        if way == "open":
            catalog = weighlock.open(url)
        else:
            body = weighlock.pack(weighlock.open(url)).seal()
            address = Address.of(url)
            access = weighlock.Access(allow=[f"{address.host}:{address.port}"])
            catalog = weighlock.unpack(body, access=access)
        for name in MODEL:
            catalog[name].load()
        assert open_descriptors() != before
        del catalog
        until(lambda: open_descriptors() == before)  # the server's own end as well
    finally:
        gc.enable()


def test_a_stream_that_is_left_ends_its_connections(url):
    for _ in itertools.islice(weighlock.stream(url), 2):
        pass  # `no_leaks` looks for threads and sockets


@pytest.mark.parametrize("size", [MB, 8 * MB], ids=["all of it is here", "more is to come"])
def test_an_abort_ends_a_stream(server, size):
    share = server.share({f"t{n}": np.zeros(size, np.uint8) for n in range(12)})
    abort = weighlock.Abort()
    stream = weighlock.stream(share.url, abort=abort)
    next(stream)
    abort.set("enough")
    with pytest.raises(Aborted, match="enough"):
        next(stream)


def test_progress_knows_the_total_and_reaches_it(url, tmp_path):
    for options in ({}, {"into": tmp_path / "m"}, {"names": "layer.*"}):
        told = []
        found = weighlock.fetch(
            url, progress=lambda d, t, told=told: told.append((d, t)), **options
        )
        found.close()
        assert len({total for _, total in told}) == 1
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[-1][0] == told[-1][1]


def test_a_rate_is_kept(server):
    share = server.share({"w": np.zeros(4 * MB, np.uint8)})
    start = time.monotonic()
    weighlock.fetch(share.url, limit_rate=4 * MB)
    assert time.monotonic() - start > 0.5  # four blocks at four a second, less a burst


def test_a_model_larger_than_allowed_is_refused_before_it_is_asked_for(url):
    with pytest.raises(LimitExceeded, match="stream"):
        weighlock.fetch(url, limits=weighlock.Limits(memory_bytes=1000))


def test_two_places_at_once_are_a_mistake(url, tmp_path):
    with pytest.raises(LocalProtocolError, match="not both"):
        weighlock.fetch(url, out={}, into=tmp_path / "x")


def test_remote_refs_survive_pickling_threads_and_forks(url):
    with weighlock.open(url) as remote:
        again = pickle.loads(pickle.dumps(remote["half"]))
        assert again.load().tobytes() == MODEL["half"].tobytes()
        again.source.close()
        failures = []

        def load():
            try:
                assert_same(dict(remote))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        child = multiprocessing.get_context("fork").Process(target=_load_in_child, args=(remote,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert_same(dict(remote))


def _load_in_child(remote):
    assert_same(dict(remote))
    os._exit(0)


def test_a_checkpoint_is_served_as_it_is(server, tmp_path):
    torch.manual_seed(0)
    tensors = {
        "plain": torch.randn(200, 300),
        "turned": torch.randn(3000, 2000).t(),  # large enough to be laid down in a file
        "part": torch.randn(500, 40)[::3],
        "half": torch.randn(1000).bfloat16(),
    }
    expected = {name: t.contiguous() for name, t in tensors.items()}
    for name, options in {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}}.items():
        path = tmp_path / name
        torch.save(tensors, path, **options)
        with weighlock.open(path) as catalog, server.share(catalog) as share:
            found = weighlock.fetch(share.url)
            for key, tensor in expected.items():
                assert torch.equal(found[key].torch(), tensor), (name, key)


def test_what_was_fetched_lazily_can_be_shared_on(server, url):
    with weighlock.open(url) as remote, server.share(remote) as relayed:
        assert_same(weighlock.fetch(relayed.url))


def test_torch_tensors_of_every_kind(server):
    tensors = {
        "conj": torch.randn(30, dtype=torch.complex64).conj(),
        "strided": torch.arange(100)[::7],
        "parameter": torch.nn.Parameter(torch.randn(5, 5)),
        "f8": torch.randn(64).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
    }
    found = weighlock.fetch(server.share(tensors).url)
    assert found.metadata["format"] == "pt"
    for name, tensor in tensors.items():
        got = found[name].torch()
        expected = tensor.detach().resolve_conj()
        assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8)), name


def test_a_sharded_model_by_its_index(server, tmp_path):
    """Any directory behind an HTTP server; here ours serves the shards, so they are verified."""
    source = tmp_path / "sharded"
    weighlock.save(source, {k: MODEL[k] for k in MODEL if k != "tied"}, max_shard_bytes=2_000_000)
    with weighlock.open(source) as catalog, server.share(catalog) as share:
        found = weighlock.fetch(share.url)
        assert_same(found, {k: MODEL[k] for k in MODEL if k != "tied"})


@pytest.mark.parametrize("cacheable", [False, True])
def test_only_where_a_cache_may_keep_them_all_receivers_ask_for_the_same_ranges(server, cacheable):
    array = np.random.default_rng(7).integers(0, 256, 90 * MB, np.uint8)
    share = server.share({"a": array}, cacheable=cacheable)
    asked = []
    with counting_proxy(server.port, asked) as (port, _):
        url = share.url.replace(str(server.port), str(port))
        assert (weighlock.fetch(url, connections=2)["a"].load() == array).all()
    lengths = [last + 1 - first for first, last in asked[1:]]  # after the first block
    assert sum(lengths) == share.size - MB
    if cacheable:
        assert all(first // (8 * MB) == last // (8 * MB) for first, last in asked)
    else:
        assert max(lengths) >= 24 * MB
        assert min(lengths) <= 8 * MB  # in the end nobody is left with much


def test_a_gateway_that_passes_no_large_replies_is_asked_for_smaller_ones(server):
    array = np.random.default_rng(7).integers(0, 256, 60 * MB, np.uint8)
    share = server.share({"a": array})
    asked = []
    with counting_proxy(server.port, asked, most=20 * MB) as (port, _):
        url = share.url.replace(str(server.port), str(port))
        assert (weighlock.fetch(url, connections=1)["a"].load() == array).all()
    lengths = [last + 1 - first for first, last in asked]
    assert [length for length in lengths if length > 20 * MB] == [32 * MB]


def test_with_a_bound_on_the_rate_no_reply_is_long(server):
    """Its owner would see nobody take anything during a pause, and think the peer dead."""
    array = np.random.default_rng(7).integers(0, 256, 60 * MB, np.uint8)
    share = server.share({"a": array})
    asked = []
    with counting_proxy(server.port, asked) as (port, _):
        url = share.url.replace(str(server.port), str(port))
        assert (weighlock.fetch(url, limit_rate=10**10)["a"].load() == array).all()
    assert max(last + 1 - first for first, last in asked) <= 8 * MB
