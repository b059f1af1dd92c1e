"""Sites that reach others by a proxy only: what the environment says is followed, as curl does."""

import ssl

import numpy as np
import pytest

import weighlock
from process.certificates import certificates, needs_openssl
from process.forward_proxy import ForwardProxy
from process.plain_server import PlainServer
from weighlock import Access, Credential, Limits
from weighlock.errors import PeerLost, Refused, SourceError

__all__ = ["certificates"]  # fixtures of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

BRIEF = Limits(patience_s=0.2, connect_s=2.0, idle_s=2.0)
HOST = "elsewhere.example"
"""Nobody knows it but the proxy."""
ARRAYS = {"a": np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables of proxies; those of whoever runs the tests are gone."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return lambda **names: [monkeypatch.setenv(name, text) for name, text in names.items()]


@pytest.fixture
def owner():
    with weighlock.Server(public_url=f"http://{HOST}:1") as owner:
        yield owner


def by_name(owner, url):
    """A URL of that server, with the name of the host and the port it has in truth."""
    return url.replace(f"{HOST}:1", f"{HOST}:{owner.port}")


@pytest.mark.parametrize("login", [None, "Basic dTpwOncgeQ=="])
def test_plain_http_goes_through_a_proxy(owner, environment, login):
    share = owner.share(ARRAYS, receivers=["b"])
    with ForwardProxy(login) as proxy:
        user = "" if login is None else "u:p%3Aw%20y@"
        environment(http_proxy=f"http://{user}127.0.0.1:{proxy.port}")
        catalog = weighlock.fetch(by_name(owner, share.url_for("b")))
        assert catalog["a"].load().tobytes() == ARRAYS["a"].tobytes()
        assert catalog.notes == ()
    assert share.wait(10).landed == ("b",)
    assert proxy.asked
    assert all(f"http://{HOST}:{owner.port}/s/" in line for line in proxy.asked)


def test_a_push_goes_through_a_proxy(owner, environment, tmp_path):
    inbox = owner.inbox("b", into=tmp_path / "in")
    with ForwardProxy() as proxy:
        environment(HTTP_PROXY=f"127.0.0.1:{proxy.port}")
        weighlock.push(by_name(owner, inbox.url_for("b")), ARRAYS)
    with weighlock.open(tmp_path / "in" / "b.safetensors") as catalog:
        assert catalog["a"].load().tobytes() == ARRAYS["a"].tobytes()
    assert any(line.startswith("PUT http://") for line in proxy.asked)


@needs_openssl
def test_tls_goes_through_a_tunnel(certificates, environment, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("wrong-host"))  # which is elsewhere.example
    weighlock.save(tmp_path / "a", ARRAYS, durable=False)
    with (
        PlainServer({"/a": (tmp_path / "a").read_bytes()}, tls=context) as server,
        ForwardProxy("Basic dTpw") as proxy,
    ):
        environment(https_proxy=f"http://u:p@127.0.0.1:{proxy.port}")
        origin = f"https://{HOST}:{server.port}"
        access = Access(origins={origin: Credential({"Authorization": "s"}, ca=certificates.ca)})
        catalog = weighlock.fetch(f"{origin}/a", access=access)
        assert catalog["a"].load().tobytes() == ARRAYS["a"].tobytes()
        assert all(request.headers["authorization"] == "s" for request in server.requests)
        assert not any("proxy-authorization" in request.headers for request in server.requests)
    assert set(proxy.asked) == {f"CONNECT {HOST}:{server.port} HTTP/1.1"}


@pytest.mark.parametrize(
    ("status", "error"),
    [("407 Who", Refused), ("403 Never", Refused), ("503 Busy", PeerLost), ("502 Bad", PeerLost)],
)
def test_a_proxy_that_leads_nowhere_is_named(environment, status, error):
    with ForwardProxy(refusal=status) as proxy:
        environment(https_proxy=f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(error, match=rf"proxy 127\.0\.0\.1:{proxy.port} answered {status[:3]}"):
            weighlock.open(f"https://{HOST}/a", limits=BRIEF)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_asked_directly(environment, variable, host):
    with weighlock.Server() as owner:
        url = owner.share(ARRAYS).url.replace("127.0.0.1", host)
        environment(**{variable: "http://127.0.0.1:9"})
        assert list(weighlock.fetch(url)) == ["a"]


def test_who_needs_no_proxy_is_asked_directly(environment):
    environment(http_proxy="http://127.0.0.1:9", no_proxy=f".other, {HOST}")
    with pytest.raises((PeerLost, SourceError)) as caught:
        weighlock.open(f"http://{HOST}/a", limits=BRIEF)
    assert "refused" not in str(caught.value)  # as the port of the proxy is


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "https://127.0.0.1", "http://:x"])
def test_a_proxy_that_cannot_be_spoken_to_is_an_error(environment, proxy):
    environment(http_proxy=proxy)
    with pytest.raises(SourceError, match="no http:// proxy; to ask without one"):
        weighlock.open(f"http://{HOST}/a", limits=BRIEF)
