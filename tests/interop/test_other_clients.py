"""A share is a file on an HTTP server: clients and caches that know nothing of us can use it."""

import concurrent.futures
import json
import shutil
import socket
import subprocess

import numpy as np
import pytest
import safetensors

import weighlock
from process.counting_proxy import counting_proxy
from waiting import answers, until

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
needs_wget = pytest.mark.skipif(shutil.which("wget") is None, reason="needs wget")

ARRAYS = {
    "a": np.random.default_rng(0).standard_normal((1500, 1000)).astype(np.float32),
    "turned": np.arange(60_000, dtype=np.int32).reshape(300, 200).T,
    "tied": np.arange(5.0),
}
ARRAYS["tied too"] = ARRAYS["tied"]


@pytest.fixture(scope="module")
def share():
    with weighlock.Server() as server:
        yield server.share(ARRAYS)


@pytest.fixture(scope="module")
def content(share, tmp_path_factory):
    """The file as our own client gets it."""
    path = tmp_path_factory.mktemp("clients") / "a.safetensors"
    weighlock.fetch(share.url, into=path, durable=False).close()
    return path.read_bytes()


def run(*arguments):
    return subprocess.run(list(map(str, arguments)), capture_output=True, timeout=60, check=True)


def curl(*arguments):
    return run("curl", "--silent", "--show-error", "--fail", *arguments)


@needs_curl
def test_curl_downloads_the_whole_file(share, content, tmp_path):
    curl("-o", tmp_path / "a", share.url)
    assert (tmp_path / "a").read_bytes() == content


@needs_curl
def test_curl_names_the_file_as_the_header_says(share, content, tmp_path):
    curl("-OJ", "--output-dir", tmp_path, share.url)
    assert (tmp_path / "model.safetensors").read_bytes() == content


@needs_curl
@pytest.mark.parametrize("cut", [1, 100_000, 4_000_000])
def test_curl_goes_on_where_it_ended(cut, share, content, tmp_path):
    (tmp_path / "a").write_bytes(content[:cut])
    curl("-C", "-", "-o", tmp_path / "a", share.url)
    assert (tmp_path / "a").read_bytes() == content


@needs_curl
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0-0", slice(0, 1)),
        ("100-199", slice(100, 200)),
        ("-50", slice(-50, None)),
        ("1000000-", slice(1_000_000, None)),
    ],
)
def test_curl_gets_ranges(text, part, share, content):
    assert curl("-r", text, share.url).stdout == content[part]


@needs_curl
def test_curl_that_asks_for_more_than_one_range_gets_everything(share, content):
    assert curl("-r", "0-9,20-29", share.url).stdout == content


@needs_curl
def test_curl_gets_the_head_only(share, content):
    text = curl("-I", share.url).stdout.decode()
    lines = [line.partition(": ") for line in text.splitlines()[1:]]
    found = {name.lower(): value for name, _, value in lines}
    assert text.startswith("HTTP/1.1 200")
    assert int(found["content-length"]) == len(content)
    assert found["accept-ranges"] == "bytes"
    assert found["etag"].startswith('"')
    partial = curl("-I", "-r", "5-9", share.url).stdout.decode()
    assert partial.startswith("HTTP/1.1 206")


@needs_curl
def test_curl_asks_once_for_what_it_has(share, tmp_path):
    curl("--etag-save", tmp_path / "etag", "-o", tmp_path / "a", share.url)
    status = curl(
        *("--etag-compare", tmp_path / "etag", "-o", tmp_path / "b", "-w", "%{http_code}"),
        share.url,
    )
    assert status.stdout == b"304"


@needs_curl
def test_curl_uses_one_connection_for_many_requests(share):
    result = curl(
        "-w", "%{num_connects}\n", "-o", "/dev/null", share.url, "-o", "/dev/null", share.url
    )
    assert result.stdout.split() == [b"1", b"0"]


@needs_curl
@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "PATCH"])
def test_curl_can_change_nothing(method, share):
    result = curl("-X", method, "-w", "%{http_code}", "--no-fail", "-o", "/dev/null", share.url)
    assert result.stdout == b"405"


@needs_wget
@pytest.mark.parametrize("cut", [0, 100_000])
def test_wget_goes_on_where_it_ended(cut, share, content, tmp_path):
    if cut:
        (tmp_path / "model.safetensors").write_bytes(content[:cut])
    run("wget", "-q", "-c", "-P", tmp_path, share.url)
    assert (tmp_path / "model.safetensors").read_bytes() == content


def test_reference_reads_what_was_pulled(share, tmp_path):
    weighlock.fetch(share.url, into=tmp_path / "a", durable=False).close()
    with safetensors.safe_open(tmp_path / "a", "numpy") as file:
        assert set(file.keys()) | set(file.metadata()) >= set(ARRAYS)
        assert np.array_equal(file.get_tensor("a"), ARRAYS["a"])
        assert np.array_equal(file.get_tensor("turned"), ARRAYS["turned"])


def test_reference_reads_a_part_that_was_pulled(share, tmp_path):
    weighlock.fetch(share.url, into=tmp_path / "a", names="t*", durable=False).close()
    with safetensors.safe_open(tmp_path / "a", "numpy") as file:
        assert np.array_equal(file.get_tensor("turned"), ARRAYS["turned"])
        assert "a" not in file.keys()  # noqa: SIM118


# A cache in front of the owner.


def _has_slices():
    if shutil.which("nginx") is None:
        return False
    found = subprocess.run(["nginx", "-V"], capture_output=True, text=True, timeout=10)
    return "http_slice_module" in found.stderr


needs_nginx = pytest.mark.skipif(not _has_slices(), reason="needs nginx with http_slice_module")

CONFIG = """
daemon off;
worker_processes 1;
pid {place}/pid;
error_log {place}/error.log warn;
events {{ worker_connections 256; }}
http {{
    access_log {place}/access.log;
    client_body_temp_path {place}/body;
    proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    proxy_cache_path {place}/cache keys_zone=weights:1m max_size=1g use_temp_path=off;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            slice 8m;
            proxy_cache weights;
            proxy_cache_key $uri$slice_range;
            proxy_cache_lock on;
            proxy_cache_lock_timeout 60s;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Range $slice_range;
            proxy_pass http://127.0.0.1:{origin};
        }}
    }}
}}
"""


@pytest.fixture
def nginx(tmp_path_factory, let_others_in):
    """Starts nginx as a cache in front of a port; gives its own."""
    place = tmp_path_factory.mktemp("nginx")
    place.chmod(0o777)  # its workers are another user
    let_others_in(place.parent)
    processes = []

    def start(origin):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = place / "nginx.conf"
        config.write_text(CONFIG.format(place=place, port=port, origin=origin))
        log = place / "start.log"
        with open(log, "wb") as output:
            processes.append(
                subprocess.Popen(["nginx", "-c", config, "-e", place / "error.log"], stderr=output)
            )
        until(lambda: answers(port) or processes[-1].poll() is not None)
        assert processes[-1].poll() is None, log.read_text()
        return port

    yield start
    for process in processes:
        process.terminate()
        process.wait(20)


LARGE = {f"t{n}": np.random.default_rng(n).integers(0, 256, 10_000_000, np.uint8) for n in range(4)}


@needs_nginx
def test_behind_a_cache_the_owner_sends_each_byte_once_to_four_receivers(nginx, tmp_path):
    with weighlock.Server() as server:
        share = server.share(LARGE, cacheable=True)
        with counting_proxy(server.port) as (between, count):
            url = share.url.replace(str(server.port), str(nginx(between)))

            def receive(number):
                with weighlock.fetch(url, into=tmp_path / str(number), durable=False) as catalog:
                    assert catalog.notes == ()  # verified, whatever the cache did
                    return {name: ref.load().tobytes() for name, ref in catalog.items()}

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for got in pool.map(receive, range(4)):
                    assert got == {name: array.tobytes() for name, array in LARGE.items()}
            # Beside the file: the heads of replies, digests, and what receivers report.
            assert share.size <= count() < share.size + 100_000


@needs_nginx
def test_a_cache_keeps_nothing_of_a_share_that_is_not_cacheable(nginx):
    with weighlock.Server() as server:
        share = server.share({"a": LARGE["t0"]})
        with counting_proxy(server.port) as (between, count):
            url = share.url.replace(str(server.port), str(nginx(between)))
            for _ in range(2):
                assert weighlock.fetch(url)["a"].load().tobytes() == LARGE["t0"].tobytes()
            assert count() > 1.9 * share.size


@needs_nginx
def test_errors_are_not_kept_by_a_cache(nginx):
    with weighlock.Server() as server:
        share_id = "0123456789abcdef" * 2
        port = nginx(server.port)
        url = f"http://127.0.0.1:{port}/s/{share_id}/model.safetensors"
        with pytest.raises(weighlock.WeighlockError):
            weighlock.fetch(url)
        server.share(ARRAYS, cacheable=True, share_id=share_id)
        assert weighlock.fetch(url)["a"].load().tobytes() == ARRAYS["a"].tobytes()


@needs_nginx
@needs_curl
def test_a_cache_and_another_client_together(nginx, tmp_path):
    with weighlock.Server() as server:
        share = server.share(LARGE, cacheable=True)
        url = share.url.replace(str(server.port), str(nginx(server.port)))
        curl("-o", tmp_path / "a", url)
        with weighlock.open(tmp_path / "a") as catalog:
            assert catalog["t3"].load().tobytes() == LARGE["t3"].tobytes()
        header = json.loads((tmp_path / "a").read_bytes()[8:].partition(b"}}")[0] + b"}}")
        assert set(header) - {"__metadata__"} == set(LARGE)
