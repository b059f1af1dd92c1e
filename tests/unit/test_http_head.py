"""Heads of replies, as servers write them: what counts is read, what is ambiguous is refused."""

import contextlib
import http.client
import socket
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import weighlock
from weighlock.sources.http_head import MOST_HEAD_BYTES, Reply


def reply_to(head, body=b"", method="GET"):
    """What is made of the bytes that a server sends."""
    here, there = socket.socketpair()
    with socket_sending(there, head + body):
        here.settimeout(5)
        reply = Reply(here, method=method, most_s=5)
        here.close()  # the reply keeps it open
        try:
            reply.begin()
            return reply, reply.read()
        finally:
            reply.close()


@contextlib.contextmanager
def socket_sending(sock, content):
    """Another thread sends it and hangs up; more than fits may not be read to the end."""

    def send():
        with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(content)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


def test_names_are_found_in_any_spelling():
    reply, body = reply_to(b'HTTP/1.1 206 Partial\r\neTAG: "a"\r\nCONTENT-length:3\r\n\r\n', b"abc")
    assert (reply.status, reply.reason, reply.version) == (206, "Partial", 11)
    assert reply.getheader("ETag") == reply.getheader("etag") == '"a"'
    assert reply.getheader("Range") is None
    assert reply.getheader("Range", "none") == "none"
    assert body == b"abc"


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_lines_may_end_without_a_carriage_return(end):
    reply, body = reply_to(end.join([b"HTTP/1.1 200 OK", b"Content-Length: 2", b"", b""]), b"ab")
    assert reply.length == 0  # all of it was read
    assert body == b"ab"


def test_a_line_that_begins_with_space_goes_on_with_the_one_before():
    head = b'HTTP/1.1 200 OK\r\nETag: "one\r\n\t two"\r\nContent-Length: 0\r\n\r\n'
    assert reply_to(head)[0].getheader("ETag") == '"one two"'


@pytest.mark.parametrize("line", [b"no header", b": nothing", b"Content-Length : 1", b"a\x01b: 1"])
def test_what_is_no_header_is_passed_over_with_its_next_lines(line):
    head = b"HTTP/1.1 200 OK\r\n%b\r\n more of it\r\nContent-Length: 2\r\n\r\n" % line
    reply, body = reply_to(head, b"ab")
    assert body == b"ab"
    assert "more" not in str(reply.headers._values)


def test_headers_given_twice_are_joined():
    reply, _ = reply_to(b"HTTP/1.1 200 OK\r\nA: 1\r\na: 2\r\nContent-Length: 0\r\n\r\n")
    assert reply.getheader("A") == "1, 2"


def test_a_body_has_one_length():
    same = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n"
    assert reply_to(same, b"ab")[1] == b"ab"
    with pytest.raises(http.client.HTTPException, match="lengths 2 and 3 of one body"):
        reply_to(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", b"abc")


@pytest.mark.parametrize("length", [b"-1", b"+2", b"1_0", b"0x2", "²".encode(), b"9" * 30, b""])
def test_a_length_that_is_no_number_is_none(length):
    reply, body = reply_to(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % length, b"ab")
    assert reply.length is None
    assert reply.will_close
    assert body == b"ab"


def test_what_is_said_not_to_be_encoded_has_its_length():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Identity\r\nContent-Length: 2\r\n\r\n"
    reply, body = reply_to(head, b"ab")
    assert (body, reply.will_close) == (b"ab", False)


def test_chunks_count_before_a_length():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nContent-Length: 99\r\n\r\n"
    reply, body = reply_to(head, b"2\r\nab\r\n0\r\n\r\n")
    assert reply.length is None
    assert body == b"ab"


@pytest.mark.parametrize(
    ("status", "method"), [(204, "GET"), (304, "GET"), (200, "HEAD"), (101, "GET")]
)
def test_replies_that_have_no_body(status, method):
    head = b"HTTP/1.1 %d x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n" % status
    reply, body = reply_to(head, method=method)
    assert (body, reply.length, reply.will_close) == (b"", 0, False)


def test_what_comes_before_the_reply_is_passed_over():
    before = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    reply, body = reply_to(before + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ab")
    assert (reply.status, body) == (200, b"ab")
    assert reply.getheader("Link") is None


@pytest.mark.parametrize(
    ("version", "said", "closes"),
    [
        (b"1.1", b"", False),
        (b"1.1", b"Connection: Close\r\n", True),
        (b"1.0", b"", True),
        (b"1.0", b"Connection: keep-alive\r\n", False),
    ],
)
def test_whether_a_connection_goes_on(version, said, closes):
    reply, _ = reply_to(b"HTTP/%b 200 OK\r\n%bContent-Length: 0\r\n\r\n" % (version, said))
    assert reply.will_close is closes


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + (b"A: " + b"x" * 995 + b"\r\n") * (MOST_HEAD_BYTES // 1000 + 1),
    ],
    ids=["a line", "lines"],
)
def test_a_head_has_bounds(head):
    with pytest.raises(http.client.LineTooLong):
        reply_to(head)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nA: 1\r\n", b""])
def test_a_head_that_breaks_off_is_a_lost_peer(head):
    with pytest.raises(http.client.RemoteDisconnected):
        reply_to(head)


@pytest.mark.parametrize(
    "line", [b"HTTP/2.0 200 OK", b"HTTP/0.95 200 OK", b"HTTP/1.1 twenty", b"SSH-2.0-x", b"\x15\x03"]
)
def test_what_is_no_http_is_refused(line):
    with pytest.raises(http.client.HTTPException):
        reply_to(line + b"\r\n\r\n")


def test_a_folded_value_has_no_space_before_it():
    reply, body = reply_to(b"HTTP/1.1 200 OK\r\nContent-Length:\r\n 2\r\n\r\n", b"ab")
    assert (body, reply.will_close) == (b"ab", False)


def test_what_a_tunnel_says_of_lengths_does_not_count():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n"
    assert reply_to(head, method="CONNECT")[0].length is None


@pytest.mark.parametrize("encoding", [b"gzip, chunked", b"chunked\r\nTransfer-Encoding: gzip"])
@pytest.mark.parametrize("length", [b"", b"Content-Length: 3\r\n"])
def test_a_body_in_an_encoding_nobody_asked_for_is_refused(encoding, length):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: %b\r\n%b\r\n" % (encoding, length)
    with pytest.raises(http.client.HTTPException, match="chunked"):
        reply_to(head, b"3\r\nabc\r\n0\r\n\r\n")


def test_any_header_may_say_that_a_connection_ends():
    head = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nConnection: close\r\n"
    assert reply_to(head + b"Content-Length: 0\r\n\r\n")[0].will_close


def test_a_head_has_a_thousand_lines_at_the_most():
    with pytest.raises(http.client.HTTPException, match="more than 1000 lines"):
        reply_to(b"HTTP/1.1 200 OK\r\n" + b"A: x\r\n" * 1001 + b"\r\n")


NAMES = st.sampled_from([b"A", b"a", b"x-y_z", b"Content-Type", b'"odd"', b"\xe4", b"b c"])
VALUES = st.text("a ,:\t\x0b\xa0\xe4", max_size=9).map(lambda text: text.encode("latin-1"))


@given(st.lists(st.tuples(NAMES, st.sampled_from([b":", b": ", b" :"]), VALUES), max_size=6))
@example([(b"A", b":", b"\t a, \t"), (b"a", b": ", b"b"), (b"A", b":", b"")])
def test_a_head_is_read_alike_at_once_and_line_by_line(headers):
    lines = [b"HTTP/1.1 200 OK", *map(b"".join, headers), b"Content-Length: 2", b"", b""]
    by_line = [*lines[:-3], b"what is no header", *lines[-3:]]  # passed over, but nothing plain
    replies = [reply_to(b"\r\n".join(each), b"ab") for each in (lines, by_line)]
    assert replies[0][1] == replies[1][1] == b"ab"
    assert replies[0][0].headers._values == replies[1][0].headers._values


def test_what_our_server_writes_is_read_at_once():
    with weighlock.Server() as server:
        url = urlsplit(server.share({"a": np.ones(3)}).url)
        with socket.create_connection((url.hostname, url.port)) as sock:
            sock.sendall(f"GET {url.path} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-9\r\n\r\n".encode())
            reply = Reply(sock, method="GET", most_s=5)
            with contextlib.closing(reply):
                assert reply._read_status()[1] == 206
                assert reply._reader.plain_head().endswith("\r\n\r\n")
