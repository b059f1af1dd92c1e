"""The same bytes by every route (I1): random models, from every kind of file, to every place.

A model here is what people save: tensors of any dtype, views of them that overlap, are turned,
repeat, or have no bytes, and names for the same one. However it is stored and whichever way it
travels, each tensor must come back bit for bit.
"""

import io
import random
import warnings
import zipfile

import numpy as np
import pytest
import torch

import weighlock
from process.plain_server import PlainServer
from weighlock import Access, DType, Server, Spool

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SIZES = [0, 1, 2, 3, 7, 16, 129]
VIEWS = [
    lambda t: t.transpose(0, -1),
    lambda t: t[: max(0, t.shape[0] - 1)],
    lambda t: t[::2],
    lambda t: t[t.shape[0] // 2] if len(t) else t,
    lambda t: t.unsqueeze(0).expand(3, *t.shape) if t.numel() < 10_000 else t,
    lambda t: t.reshape(-1)[t.numel() // 3 :] if t.is_contiguous() else t,
    lambda t: t.reshape(-1),
]


def random_tensor(rng):
    dtype = rng.choice(DTYPES)
    shape = [rng.choice(SIZES) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
    if shape and rng.random() < 0.2:
        shape[0] = 5000
    count = int(np.prod(shape))
    raw = torch.from_numpy(np.frombuffer(rng.randbytes(count * dtype.itemsize), np.uint8).copy())
    if dtype == torch.bool:
        return (raw & 1).to(torch.bool).reshape(shape)
    return (raw.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


def random_model(rng):
    model = {}
    for number in range(rng.randrange(2, 8)):
        tensor = model[f"layers.{number}.weight"] = random_tensor(rng)
        if not tensor.dim():
            continue
        for view in range(rng.choice([0, 1, 2])):
            model[f"layers.{number}.view{view}"] = rng.choice(VIEWS)(tensor)
        if rng.random() < 0.2:
            model[f"layers.{number}.tied"] = tensor
    return model


def as_zip(model, place):
    torch.save(model, place / "model.pt")
    return "model.pt"


def as_legacy(model, place):
    torch.save(model, place / "model.pt", _use_new_zipfile_serialization=False)
    return "model.pt"


def as_deflated(model, place):
    plain = io.BytesIO()
    torch.save(model, plain)
    with zipfile.ZipFile(plain) as stored, zipfile.ZipFile(place / "model.pt", "w") as mixed:
        for number, name in enumerate(stored.namelist()):
            kind = zipfile.ZIP_DEFLATED if number % 3 else zipfile.ZIP_STORED
            mixed.writestr(name, stored.read(name), compress_type=kind)
    return "model.pt"


def as_safetensors(model, place):
    weighlock.save(place / "model.safetensors", model, durable=False)
    return "model.safetensors"


def as_shards(model, place):
    weighlock.save(place / "model", model, durable=False, max_shard_bytes=100_000)
    found = sorted(path.name for path in (place / "model").iterdir())
    return "model/" + next((name for name in found if name.endswith("index.json")), found[0])


def bytes_of(tensor):
    flat = tensor.detach().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_bytes(found, model):
    """Arrays, tensors or refs by name are those of the model."""
    assert set(found) == set(model)
    for name, tensor in model.items():
        value = found[name]
        assert tuple(value.shape) == tuple(tensor.shape), name
        if isinstance(value, torch.Tensor):
            assert bytes_of(value) == bytes_of(tensor), name
        elif isinstance(value, np.ndarray):
            assert np.ascontiguousarray(value).tobytes() == bytes_of(tensor), name
        else:
            buffer = bytearray(value.nbytes)
            value.load(out=memoryview(buffer))
            assert buffer == bytes_of(tensor), name


@pytest.mark.parametrize("store", [as_zip, as_legacy, as_deflated, as_safetensors, as_shards])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_route_brings_the_same_bytes(seed, store, tmp_path):
    rng = random.Random(f"{store.__name__} {seed}")
    model = random_model(rng)
    path = store(model, tmp_path)
    files = {
        f"/{file.relative_to(tmp_path)}": file.read_bytes()
        for file in tmp_path.rglob("*")
        if file.is_file()
    }
    some = {name: model[name] for name in model if rng.random() < 0.6} or model
    with (
        weighlock.open(tmp_path / path) as catalog,
        PlainServer(files) as plain,
        Server() as server,
    ):
        assert_bytes(catalog, model)
        urls = [plain.url(f"/{path}"), server.share(catalog).url, server.share(model).url]
        for number, url in enumerate(urls):
            assert_all_ways(url, model, some, tmp_path / f"{number}")
        assert_message(server, model, catalog)


def assert_all_ways(url, model, some, place):
    place.mkdir()
    with weighlock.open(url) as remote:
        assert_bytes(remote, model)
    assert_bytes(weighlock.fetch(url), model)
    assert_bytes(weighlock.fetch(url, names=list(some)), some)
    assert_bytes(dict(weighlock.stream(url)), model)
    arrays = {n: np.zeros(tuple(t.shape), DType.of(t.dtype).numpy) for n, t in model.items()}
    weighlock.fetch(url, out=arrays)
    assert_bytes(arrays, model)
    tensors = {n: torch.zeros(t.shape).to(t.dtype) for n, t in model.items()}
    weighlock.fetch(url, out=tensors)
    assert_bytes(tensors, model)
    with weighlock.fetch(url, into=place / "all", durable=False) as landed:
        assert_bytes(landed, model)
    with weighlock.fetch(url, names=list(some), into=place / "some", durable=False) as landed:
        assert_bytes(landed, some)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the spool may lie in memory here
        spool = Spool(place)
    with spool, weighlock.fetch(url, into=spool) as landed:
        assert_bytes(landed, model)


def assert_message(server, model, catalog):
    packed = server.pack({"model": model, "catalog": catalog}, expires_s=60)
    told = weighlock.unpack(packed.body, access=Access(allow=["127.0.0.1"]))
    here = weighlock.resolve(told)
    assert_bytes(here["model"], model)
    assert_bytes(here["catalog"], model)
