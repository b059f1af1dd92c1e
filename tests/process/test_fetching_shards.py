"""A sharded model that is fetched to a directory: no mixture, and nothing of anybody else's."""

import json
import os

import numpy as np
import pytest

import weighlock
from process.plain_server import PlainServer, Reply, ranged
from weighlock.errors import Aborted, DiskError, FormatError, WeighlockError

INDEX = "model.safetensors.index.json"


class Stopped(Exception):
    """What a progress callback raises to end a fetch as Ctrl-C does."""


def arrays(version):
    return {f"t{n}": np.full(300_000, version, np.float32) for n in range(3)}


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def saved(directory, version):
    """A model in a directory of three shards and an index; the index is that of every version."""
    weighlock.save(directory, arrays(version), max_shard_bytes=1_300_000, durable=False)
    found = files_of(directory)
    assert len(found) == 4
    return found


def versions_in(directory):
    with weighlock.open(directory) as catalog:
        return {float(ref[0]) for ref in catalog.values()}


@pytest.fixture
def models(tmp_path):
    return [saved(tmp_path / f"v{version}", version) for version in (1, 2)]


@pytest.fixture
def server(models, no_leaks):
    """A plain server of the second version."""
    with PlainServer({f"/m/{name}": content for name, content in models[1].items()}) as server:
        yield server


_MANY = """
import os, resource, sys
import weighlock
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (52, most))
with weighlock.open(sys.argv[1]) as catalog:
    for _ in range(2):
        for name, ref in catalog.items():
            assert ref[-1] == int(name[1:]), name
    print(len(os.listdir("/proc/self/fd")))
"""


def test_a_model_of_more_shards_than_a_process_may_have_sockets(tmp_path, run_python, no_leaks):
    files, places = {}, {}
    for number in range(60):
        name = f"s{number}.safetensors"
        array = np.full(3 << 19, number, np.uint8)  # its end does not come with the first reply
        weighlock.save(tmp_path / name, {f"t{number}": array}, durable=False)
        files[f"/m/{name}"] = (tmp_path / name).read_bytes()
        places[f"t{number}"] = name
    files[f"/m/{INDEX}"] = json.dumps({"weight_map": places}).encode()
    with PlainServer(files) as server:
        run = run_python(_MANY, server.url(f"/m/{INDEX}"))
    assert int(run.stdout) < 45


@pytest.mark.parametrize("way", ["open", "memory", "directory", "stream"])
def test_a_token_in_the_query_of_an_index_opens_its_shards(way, server, tmp_path):
    def behave(request, content):
        if not request.path.endswith("?sv=1&sig=secret%2Fone"):
            return Reply(403)
        return ranged(request, content)

    server.behave = behave
    url = server.url(f"/m/{INDEX}?sv=1&sig=secret%2Fone")
    if way == "open":
        with weighlock.open(url) as catalog:
            assert {float(ref[0]) for ref in catalog.values()} == {2.0}
            assert "secret" not in repr(catalog)
    elif way == "memory":
        assert {float(ref[0]) for ref in weighlock.fetch(url).values()} == {2.0}
    elif way == "stream":
        assert {float(array[0]) for _, array in weighlock.stream(url)} == {2.0}
    else:
        weighlock.fetch(url, into=tmp_path / "new").close()
        assert versions_in(tmp_path / "new") == {2.0}


def test_a_token_in_the_query_of_an_index_is_not_shown(models, server):
    index = json.loads(models[1][INDEX])
    index["weight_map"]["promised"] = "model-00001-of-00003.safetensors"
    index["weight_map"]["missing"] = "gone.safetensors"
    server.files[f"/m/{INDEX}"] = json.dumps(index).encode()
    catalog = weighlock.open(server.url(f"/m/{INDEX}?sig=secret"))
    for name in ("promised", "missing"):
        with pytest.raises(WeighlockError) as caught:
            catalog[name]
        assert "secret" not in str(caught.value)
    catalog.close()
    with pytest.raises(WeighlockError) as caught:
        catalog["t2"]
    assert "secret" not in str(caught.value)


def stop_after(share):
    def tell(done, total):
        if done > share * total:
            raise Stopped

    return tell


def test_files_of_another_model_are_not_replaced(models, server, tmp_path):
    with pytest.raises(DiskError, match=rf"{INDEX}: is in the way .*another directory.*force"):
        weighlock.fetch(server.url(f"/m/{INDEX}"), into=tmp_path / "v1")
    assert files_of(tmp_path / "v1") == models[0]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_shard_without_an_index_is_not_replaced_either(is_link, models, server, tmp_path):
    target = tmp_path / "some"
    target.mkdir()
    name = "model-00002-of-00003.safetensors"
    if is_link:
        (target / name).symlink_to(tmp_path / "nothing")
    else:
        (target / name).write_bytes(b"mine")
    with pytest.raises(DiskError, match=f"{name}: is in the way"):
        weighlock.fetch(server.url(f"/m/{INDEX}"), into=target)
    assert os.listdir(target) == [name]
    assert {request.path for request in server.requests} == {f"/m/{INDEX}"}


def test_what_has_other_names_may_lie_there(models, server, tmp_path):
    target = tmp_path / "some"
    target.mkdir()
    (target / "config.json").write_text("{}")
    weighlock.fetch(server.url(f"/m/{INDEX}"), into=target).close()
    assert files_of(target) == models[1] | {"config.json": b"{}"}


@pytest.mark.parametrize("other", [INDEX, "old.bin.index.json"])
def test_with_force_no_index_ever_names_old_and_new_files(other, models, server, tmp_path):
    target = tmp_path / "v1"
    os.rename(target / INDEX, target / other)
    if other != INDEX:  # one of other files may stay
        kept = json.dumps({"weight_map": {"x": "x.safetensors"}}).encode()
        (target / "kept.index.json").write_bytes(kept)
    url = server.url(f"/m/{INDEX}")
    with pytest.raises(Stopped):
        weighlock.fetch(url, into=target, force=True, progress=stop_after(0.5))
    left = files_of(target)
    assert INDEX not in left
    assert other not in left
    assert left["model-00001-of-00003.safetensors"] == models[1]["model-00001-of-00003.safetensors"]
    assert left["model-00003-of-00003.safetensors"] == models[0]["model-00003-of-00003.safetensors"]
    weighlock.fetch(url, into=target).close()  # it has been begun: force need not be said again
    assert versions_in(target / INDEX) == {2.0}
    assert files_of(target) == models[1] | ({} if other == INDEX else {"kept.index.json": kept})


@pytest.mark.parametrize("etag", ['"strong"', None])
def test_what_an_unfinished_fetch_left_is_taken_up(etag, models, server, tmp_path):
    server.behave = lambda request, content: ranged(request, content, etag)
    url, target = server.url(f"/m/{INDEX}"), tmp_path / "new"
    with pytest.raises(Stopped):
        weighlock.fetch(url, into=target, progress=stop_after(0.7))
    assert sum(name.startswith("model-") for name in os.listdir(target)) == 2
    weighlock.fetch(url, into=target).close()
    assert files_of(target) == models[1]


def abort_after(abort, share):
    def tell(done, total):
        if done > share * total:
            abort.set()

    return tell


def test_an_abort_leaves_nothing_and_bad_content_the_other_files(models, server, tmp_path):
    url, target = server.url(f"/m/{INDEX}"), tmp_path / "new"
    abort = weighlock.Abort()
    with pytest.raises(Aborted):
        weighlock.fetch(url, into=target, abort=abort, progress=abort_after(abort, 0.7))
    assert os.listdir(target) == []
    server.files["/m/model-00003-of-00003.safetensors"] = b"no weights" * 1000
    with pytest.raises(FormatError):
        weighlock.fetch(url, into=target)
    left = sorted(name for name in os.listdir(target) if ".part-" not in name)
    assert left == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2)]
    server.files["/m/model-00003-of-00003.safetensors"] = models[0][
        "model-00003-of-00003.safetensors"
    ]
    weighlock.fetch(url, into=target).close()


@pytest.mark.parametrize(
    "name", ["train.py", ".bashrc", ".hidden.safetensors", "safetensors", "a.index.json"]
)
def test_an_index_does_not_choose_the_names_of_other_files(name, models, server, tmp_path):
    index = json.dumps({"weight_map": {"t0": name}}).encode()
    shard = models[1]["model-00001-of-00003.safetensors"]
    server.files |= {f"/m/{INDEX}": index, f"/m/{name}": shard}
    for force in (False, True):
        with pytest.raises(FormatError, match="names the shard"):
            weighlock.fetch(server.url(f"/m/{INDEX}"), into=tmp_path / "new", force=force)
    assert not (tmp_path / "new").exists()
    assert weighlock.fetch(server.url(f"/m/{INDEX}"))["t0"][0] == 2.0  # no name is written


def test_the_same_model_may_lie_there_and_is_not_written_again(models, tmp_path, no_leaks):
    """Digests tell: here shards of an owner of ours, behind the index of a plain server."""
    target = tmp_path / "new"
    with weighlock.Server("127.0.0.1", 0) as owner:
        shares = {}
        for name in models[0]:
            if name != INDEX:
                shares[f"/m/{name}"] = owner.share(weighlock.open(tmp_path / "v1" / name)).url

        def behave(request, content):
            if request.path in shares:
                return Reply(302, {"Location": shares[request.path]})
            return ranged(request, content)

        with PlainServer({f"/m/{INDEX}": models[0][INDEX]}, behave) as plain:
            url = plain.url(f"/m/{INDEX}")
            weighlock.fetch(url, into=target).close()
            before = {path.name: path.stat().st_ino for path in target.iterdir()}
            weighlock.fetch(url, into=target).close()
            assert {path.name: path.stat().st_ino for path in target.iterdir()} == before
            changed = target / "model-00002-of-00003.safetensors"
            content = bytearray(changed.read_bytes())
            content[-1] ^= 1
            changed.write_bytes(content)
            with pytest.raises(DiskError, match="in the way"):
                weighlock.fetch(url, into=target)
            weighlock.fetch(url, into=target, force=True).close()
            assert versions_in(target) == {1.0}


def test_an_index_that_lists_nothing_is_noted(no_leaks):
    files = {f"/m/{INDEX}": b'{"weight_map": {}}'}
    with PlainServer(files) as server, weighlock.open(server.url(f"/m/{INDEX}")) as catalog:
        assert not catalog
        assert "its index lists no tensors" in catalog.notes
