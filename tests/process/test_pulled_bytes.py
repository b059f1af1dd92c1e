"""`fetch(on_pulled=…)` tells what travelled, and nothing that was there already."""

import numpy as np
import pytest

import weighlock
from process.counting_proxy import counting_proxy
from process.plain_server import PlainServer

MB = 1 << 20


@pytest.fixture
def model():
    return {"w": np.random.default_rng(0).integers(0, 256, 6 * MB, np.uint8)}


@pytest.fixture
def server():
    with weighlock.Server() as server:
        yield server


def pulled(url, **options):
    """Bytes that were told of, and the size that progress ended with."""
    told, totals = [], [0]

    def progress(done, total):
        totals.append(total)

    weighlock.fetch(url, on_pulled=told.append, progress=progress, **options).close()
    return sum(told), totals[-1]


def test_all_of_it_when_nothing_is_there(server, model, tmp_path):
    share = server.share(model)
    assert pulled(share.url) == (share.size, share.size)
    assert pulled(share.url, into=tmp_path / "a") == (share.size, share.size)


def test_only_what_a_base_has_not(server, model, tmp_path):
    weighlock.save(tmp_path / "base", model, durable=False)
    share = server.share(model)
    assert pulled(share.url, into=tmp_path / "a", base=tmp_path / "base") == (0, share.size)
    changed = {"w": model["w"].copy()}
    changed["w"][3 * MB] ^= 1
    share = server.share(changed)
    assert pulled(share.url, into=tmp_path / "b", base=tmp_path / "base") == (MB, share.size)


def test_only_what_an_earlier_attempt_did_not_bring(server, model, tmp_path):
    share, first = server.share(model), []

    def stop(count):
        first.append(count)
        if len(first) == 3:
            raise ConnectionError("as if this process had been killed")

    with pytest.raises(ConnectionError):
        weighlock.fetch(share.url, into=tmp_path / "a", on_pulled=stop, connections=1)
    rest, size = pulled(share.url, into=tmp_path / "a")
    assert size == share.size
    assert rest <= share.size - 2 * MB


def test_from_servers_without_digests_and_of_checkpoints(model, tmp_path):
    torch = pytest.importorskip("torch")
    weighlock.save(tmp_path / "safe", model, durable=False)
    across = torch.from_numpy(model["w"]).reshape(2048, 3072).T  # read as a whole, not in blocks
    torch.save({"w": across, "b": torch.ones(3)}, tmp_path / "zip")
    files = {f"/{name}": (tmp_path / name).read_bytes() for name in ("safe", "zip")}
    with PlainServer(files) as plain:
        size = len(files["/safe"])
        assert pulled(plain.url("/safe"), into=tmp_path / "a") == (size, size)
        nbytes = model["w"].nbytes
        assert pulled(plain.url("/zip"), into=tmp_path / "b", names="w") == (nbytes, nbytes)


@pytest.mark.parametrize("size", [0.4, 2.5], ids=["one block", "three blocks"])
@pytest.mark.parametrize("into", [None, "file"])
def test_the_first_block_does_not_travel_twice(server, tmp_path, into, size):
    """It comes with the first reply, which tells what is there."""
    share = server.share({"w": np.random.default_rng(1).integers(0, 256, int(size * MB), np.uint8)})
    with counting_proxy(server.port) as (between, count):
        url = share.url.replace(f":{server.port}", f":{between}")
        weighlock.fetch(url, into=into and tmp_path / into).close()
        assert share.size < count() < share.size + 20_000
