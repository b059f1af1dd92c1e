"""URLs, and who is shown which credential."""

import copy
import pickle

import pytest

import weighlock
from weighlock import Access, Credential
from weighlock.errors import LocalProtocolError, SourceError
from weighlock.sources.access import Address, shown

ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("url", "origin", "target"),
    [
        ("http://host/a", "http://host:80", "/a"),
        ("https://host/a", "https://host:443", "/a"),
        ("http://host:8400/a?b=c&d", "http://host:8400", "/a?b=c&d"),
        ("http://host", "http://host:80", "/"),
        ("http://host?q", "http://host:80", "/?q"),
        ("HTTP://HOST/A", "http://host:80", "/A"),
        ("  http://host/a\n", "http://host:80", "/a"),
        ("http://[::1]:8400/a", "http://[::1]:8400", "/a"),
        ("http://host/a b/ü", "http://host:80", "/a%20b/%C3%BC"),
        ("http://host/a%20b%2Fc", "http://host:80", "/a%20b%2Fc"),
        ("http://host/a#fragment", "http://host:80", "/a"),
        ("http://host/a?b=%26&c=d+e", "http://host:80", "/a?b=%26&c=d+e"),
    ],
)
def test_urls_are_taken_apart(url, origin, target):
    address = Address.of(url)
    assert address.origin == origin
    assert address.target == target
    assert address.url == origin + target


def test_fragment_stays_here():
    address = Address.of("http://host/a#r=site-1.mac")
    assert address.fragment == "r=site-1.mac"
    assert "site-1" not in address.url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a",
        "/etc/passwd",
        "//host/a",
        "file:///etc/passwd",
        "ftp://host/a",
        "unix:///run/socket",
        "http+unix://%2Frun%2Fsocket/a",
        "s3://bucket/key",
        "javascript:alert(1)",
        "http:",
        "http://",
        "http:///a",
        "http://:80/a",
        "http://host:port/a",
        "http://host:99999/a",
        "http://host:-1/a",
        "http://[::1/a",
        "http://user@host/a",
        "http://user:secret@host/a",
        "http://:secret@host/a",
        "http://@host/a",
        "http://ho st/a",
        "http://host\x00/a",
    ],
)
def test_what_is_no_url_of_a_host_is_refused(url):
    with pytest.raises(SourceError) as caught:
        Address.of(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("port", ["port", "99999"])
def test_what_is_no_url_is_refused_without_showing_its_secrets(port):
    # Somebody who mistypes a port has typed the password all the same.
    for url in (f"http://user:secret@host:{port}/a", f"http://host:{port}/s/{ID}/a?token=secret"):
        with pytest.raises(SourceError) as caught:
            Address.of(url)
        assert "secret" not in str(caught.value)
        assert ID not in str(caught.value)


@pytest.mark.parametrize("path", ["/a\r\nX-Injected: 1", "/a b", "/a\tb", "/a\x00b", "/\x7f"])
def test_nothing_in_a_url_can_end_a_line_of_a_request(path):
    target = Address.of(f"http://host{path}?q={path}").target
    assert not any(char <= " " or char == "\x7f" for char in target)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://host:1/a/b", "http://host:1/a/b"),
        (f"http://host:1/s/{ID}/model.safetensors", "http://host:1/s/…/model.safetensors"),
        (f"http://host:1/i/{ID}/x", "http://host:1/i/…/x"),
        (f"http://host/s/{ID}", "http://host/s/…"),
        ("http://host/a?X-Amz-Signature=secret", "http://host/a?…"),
        ("http://user:secret@host/a", "http://host/a"),
        ("http://host/a#r=site-1.secret", "http://host/a"),
        (
            f"http://host/prefix/s/{ID}/model.safetensors",
            "http://host/prefix/s/…/model.safetensors",
        ),
    ],
)
def test_what_is_shown_of_a_url_is_never_what_opens_it(url, text):
    assert shown(url) == text


@pytest.mark.parametrize("url", ["http://[::1/a", "http://[x]/", "http://host:port/"])
def test_anything_can_be_shown(url):
    assert isinstance(shown(url), str)


def test_shown_is_printable():
    assert shown("http://ho\x9bst/\x1b[31ma\u202e/ä") == "http://ho\\x9bst/\\x1b[31ma\\u202e/ä"


def test_shown_is_bounded():
    assert len(shown("http://host/" + "a" * 5000)) <= 300


def test_address_does_not_show_its_path():
    text = repr(Address.of(f"http://host/s/{ID}/a?token=secret#secret"))
    assert ID not in text
    assert "secret" not in text


SECRET = Credential(headers={"Authorization": "Bearer secret"}, ca="ca.pem")


@pytest.mark.parametrize("value", [SECRET, Access(["a"], {"host": SECRET})])
def test_credentials_do_not_travel_and_are_not_shown(value):
    assert "secret" not in repr(value)
    assert "secret" not in str(value)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(value, protocol)
    with pytest.raises(TypeError):
        copy.deepcopy(value)


@pytest.mark.parametrize(
    ("key", "url", "is_shown"),
    [
        ("host", "http://host/a", True),
        ("host", "https://host/a", True),
        ("host", "http://host:8400/a", True),
        ("HOST", "http://host/a", True),
        ("host:8400", "http://host:8400/a", True),
        ("host:8400", "http://host/a", False),
        ("host:80", "http://host/a", True),
        ("host:443", "https://host/a", True),
        ("host:443", "http://host/a", False),
        ("https://host", "https://host/a", True),
        ("https://host/", "https://host/a", True),
        ("https://host", "http://host/a", False),
        ("https://host", "https://host:8400/a", False),
        ("https://host:8400", "https://host:8400/a", True),
        ("https://host:8400", "http://host:8400/a", False),
        ("host", "http://host.evil/a", False),
        ("host", "http://evil-host/a", False),
        ("host", "http://sub.host/a", False),
        ("[::1]:8400", "http://[::1]:8400/a", True),
        ("http://[::1]:8400", "http://[::1]:8400/a", True),
    ],
)
def test_credential_is_shown_to_its_origin_only(key, url, is_shown):
    found = Access(origins={key: SECRET}).credential(Address.of(url))
    assert (found is SECRET) is is_shown
    if not is_shown:
        assert found.headers == {}


def test_the_narrower_origin_counts():
    narrow, wide = Credential(headers={"a": "1"}), Credential(headers={"a": "2"})
    access = Access(origins={"host": wide, "host:8400": narrow})
    assert access.credential(Address.of("http://host:8400/")) is narrow
    assert access.credential(Address.of("http://host:8401/")) is wide


@pytest.mark.parametrize(
    ("allow", "url", "is_allowed"),
    [
        ([], "http://host/a", False),
        (["host"], "http://host/a", True),
        (["Host"], "http://hOST:9/a", True),
        (["host:8400"], "http://host:8400/a", True),
        (["host:8400"], "http://host:8401/a", False),
        (["host:80"], "http://host/a", True),
        (["host"], "http://host.evil/a", False),
        (["10.0.0.7"], "http://10.0.0.70/a", False),
        (["169.254.169.254"], "http://localhost:22/", False),
    ],
)
def test_urls_in_messages_are_closed_unless_allowed(allow, url, is_allowed):
    assert Access(allow).allows(Address.of(url)) is is_allowed


def test_certificates_that_cannot_be_read_are_named():
    with pytest.raises(SourceError, match=r"nowhere\.pem"):
        Credential(ca="nowhere.pem").tls()


@pytest.mark.parametrize("text", ["hunter2\n", "hunter2\r\nX: y", "hunter2\0", "hunter2 ключ"])
def test_header_that_cannot_be_sent_is_refused_without_showing_it(text):
    with pytest.raises(SourceError, match="'Authorization'") as refused:
        Credential(headers={"Authorization": text})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\n", "ä"])
def test_name_of_a_header_is_one(name):
    with pytest.raises(SourceError, match="name of a header"):
        Credential(headers={name: "x"})


def test_path_that_is_taken_for_a_url_is_shown_as_it_was_given():
    with pytest.raises(SourceError, match=r"^models/a\.pt: only http"):
        Address.of("models/a.pt")


@pytest.mark.parametrize("url", [42, None, b"http://host/x"])
def test_what_is_no_text_is_no_url(url):
    for dial in (weighlock.fetch, lambda url: next(weighlock.stream(url))):
        with pytest.raises(TypeError, match="a URL is a str, not a"):
            dial(url)


@pytest.mark.parametrize(
    ("url", "beside", "below"),
    [
        ("http://h/s/1/data", "/s/1/x/0", "/s/1/data/x/0"),
        ("http://h//i/1", "//i/x/0", "//i/1/x/0"),  # no other host
        ("http://h/models//a/b", "/models//a/x/0", "/models//a/b/x/0"),
        ("http://h/a/?token=t#r=a", "/a/x/0?token=t", "/a/x/0?token=t"),
        ("http://h", "/x/0", "/x/0"),
    ],
)
def test_what_lies_beside_and_below_an_address(url, beside, below):
    address = Address.of(url)
    for found, target in ((address.beside("x/0"), beside), (address.below("x/0"), below)):
        assert (found.host, found.target, found.fragment) == ("h", target, "")


@pytest.mark.parametrize(
    ("query", "same"),
    [
        ("X-Amz-Date=2&X-Amz-Signature=b&X-Amz-Security-Token=u", "X-Amz-Date=1&X-Amz-Signature=a"),
        ("Expires=2&Signature=b&Key-Pair-Id=k", "Expires=1&Signature=a&Key-Pair-Id=k"),
        ("sv=1&se=2&sig=b&id=3", "sv=1&se=1&sig=a&id=3"),
        ("token=a", ""),
    ],
)
def test_two_signatures_of_a_url_name_the_same_file(query, same):
    one, two = (Address.of(f"https://h/m.bin?{text}") for text in (query, same))
    assert one.unsigned == two.unsigned


@pytest.mark.parametrize("query", ["id=2", "se=2", "versionId=2", "file=signature"])
def test_another_query_may_name_another_file(query):
    one, two = (Address.of(f"https://h/m.bin?{text}") for text in (query, "id=1"))
    assert one.unsigned != two.unsigned


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/mod\xc3\xa8le", "/mod%C3%A8le"),  # UTF-8, as http.client reads it
        ("/mod\xe8le", "/mod%E8le"),
        ("/mod%C3%A8le?a=b c", "/mod%C3%A8le?a=b%20c"),
        ("next", "/a/next"),
        ("//other/x", "/x"),
    ],
)
def test_where_a_redirect_leads(location, target):
    assert Address.of("http://h/a/b").redirected(location).target == target


@pytest.mark.parametrize(
    ("query", "also"),
    [
        ("", ""),
        ("?sv=1&sig=a%2Fb", "?sv=1&sig=a%2Fb"),
        ("?versionId=7", ""),
        ("?sv=1&snapshot=2020&sig=abc", "?sv=1&sig=abc"),
        ("?generation=5&alt=media", "?alt=media"),
        ("?download", "?download"),
    ],
)
def test_files_beside_are_asked_for_with_the_same_token(query, also):
    address = Address.of(f"https://host/m/model.index.json{query}")
    assert address.sibling("a?b.bin").url == f"https://host:443/m/a%3Fb.bin{also}"
    assert "sig" not in shown(address.sibling("a.bin").url)


def test_a_text_is_one_host():
    """It is an iterable of characters, too: nothing would be allowed, and nobody told why."""
    access = Access(allow="127.0.0.1")
    assert access.allows(Address.of("http://127.0.0.1:8400/a"))
    assert not access.allows(Address.of("http://1/a"))
    assert repr(access) == repr(Access(allow=["127.0.0.1"]))


@pytest.mark.parametrize(
    ("allow", "told"),
    [
        ("http://host:8400/s/1", "'host:8400'"),
        (["https://host"], "'host'"),
        (["10.0.0.0/8"], "'10.0.0.0'"),
        (["*"], "no patterns"),
        (["*.example.org"], "no patterns"),
        ([""], "allows nothing"),
    ],
)
def test_what_is_no_host_is_refused_with_what_to_write(allow, told):
    with pytest.raises(LocalProtocolError, match="allow: ") as caught:
        Access(allow=allow)
    assert told in str(caught.value)


def test_hosts_and_credentials_of_another_type_are_refused():
    with pytest.raises(TypeError, match="a host is a text, not 7"):
        Access(allow=[7])
    with pytest.raises(TypeError, match="'host' is shown is a str; pass a Credential") as caught:
        Access(origins={"host": "Bearer secret"})
    assert "secret" not in str(caught.value)
