"""From a request to a reply, without a socket: paths, ranges, conditions."""

import json
import time

import numpy as np
import pytest

from weighlock.sharing.offer import Ticketing
from weighlock.sharing.routes import (
    Route,
    answer_data,
    answer_digests,
    answer_report,
    failure,
    find,
    gone,
    requested_span,
)
from weighlock.sharing.share import Life
from weighlock.sharing.shared import Share
from weighlock.tensors.spec import Span
from weighlock.transfer.contents import Contents
from weighlock.transfer.layout import lay_out

KEY = bytes(32)
ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("path", "route"),
    [
        (f"/s/{ID}/model.safetensors", Route(ID)),
        (f"/s/{ID}/model.safetensors?any=thing", Route(ID)),
        (f"/s/{ID}/digests/0", Route(ID, page=0)),
        (f"/s/{ID}/digests/123456789", Route(ID, page=123456789)),
        (f"/s/{ID}/receivers/site-1.a_B", Route(ID, receiver="site-1.a_B")),
        (f"/s/{ID}/digests/1234567890", None),
        (f"/s/{ID}/digests/-1", None),
        (f"/s/{ID}/digests/", None),
        (f"/s/{ID}/receivers/", None),
        (f"/s/{ID}/receivers/{'a' * 65}", None),
        (f"/s/{ID}/receivers/a/b", None),
        (f"/s/{ID}/model.safetensors/", None),
        (f"/s/{ID}/model.safetensors\n", None),
        (f"/s/{ID}//model.safetensors", None),
        (f"/s/{ID}/../{ID}/model.safetensors", None),
        (f"/s/{ID.upper()}/model.safetensors", None),
        (f"/s/{ID[:-1]}/model.safetensors", None),
        (f"/s/{ID}0/model.safetensors", None),
        (f"http://host/s/{ID}/model.safetensors", None),
        ("/", None),
        ("", None),
        ("*", None),
    ],
)
def test_paths(path, route):
    assert find(path) == route


EVERYTHING = None
OUTSIDE = ValueError


@pytest.mark.parametrize(
    ("text", "span"),
    [
        (None, EVERYTHING),
        ("", EVERYTHING),
        ("bytes=0-0", Span(0, 1)),
        ("bytes=0-99", Span(0, 100)),
        ("bytes=0-100", Span(0, 100)),
        ("bytes=0-9999999999999999999", Span(0, 100)),
        ("bytes=10-19", Span(10, 10)),
        ("bytes=99-", Span(99, 1)),
        ("bytes=0-", Span(0, 100)),
        ("bytes=-1", Span(99, 1)),
        ("bytes=-100", Span(0, 100)),
        ("bytes=-5000", Span(0, 100)),
        ("bytes= 5 - 9 ", Span(5, 5)),
        ("bytes=-0", OUTSIDE),
        ("bytes=100-", OUTSIDE),
        ("bytes=100-200", OUTSIDE),
        ("bytes=9999999999999999999-", OUTSIDE),
        # What is not one range that can be understood counts as if nothing had been asked for.
        ("bytes=5-4", EVERYTHING),
        ("bytes=0-1,5-6", EVERYTHING),
        ("bytes=0-1,", EVERYTHING),
        ("bytes=-", EVERYTHING),
        ("bytes=a-b", EVERYTHING),
        ("bytes=0x1-0x2", EVERYTHING),
        ("bytes=+1-2", EVERYTHING),
        ("bytes=--1", EVERYTHING),
        ("bytes=1--2", EVERYTHING),
        ("bytes=" + "9" * 30 + "-", EVERYTHING),
        ("lines=0-1", EVERYTHING),
        ("bytes", EVERYTHING),
    ],
)
def test_ranges(text, span):
    if span is OUTSIDE:
        with pytest.raises(ValueError, match=r"outside|empty"):
            requested_span(text, 100)
    else:
        assert requested_span(text, 100) == span


def test_unit_of_a_range_is_case_insensitive():
    # RFC 9110, 14.1: range-unit names are case-insensitive.
    assert requested_span("Bytes=1-2", 100) == Span(1, 2)


def test_range_of_nothing_lies_outside():
    for text in ("bytes=0-", "bytes=0-0", "bytes=-5"):
        with pytest.raises(ValueError, match=r"outside|empty"):
            requested_span(text, 0)


@pytest.fixture
def make_share():
    shares = []

    def make(cacheable=False, expires_s=None, clock=time.monotonic):
        contents = Contents(lay_out({"a": np.arange(100, dtype=np.uint8)}))
        share = Share(
            Ticketing(KEY, ID, f"http://127.0.0.1:1/s/{ID}/model.safetensors"),
            contents,
            Life(clock, expires_s=expires_s),
            cacheable=cacheable,
            forget=lambda _: None,
        )
        shares.append(share)
        return share

    yield make
    for share in shares:
        share.revoke()


@pytest.fixture
def share(make_share):
    return make_share()


def test_without_a_range_everything_is_sent(share):
    answer = answer_data(share, {})
    assert answer.status == 200
    assert answer.span == Span(0, share.size)
    assert answer.headers["ETag"] == share.etag
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["Weighlock"] == "1"
    assert "Content-Range" not in answer.headers


def test_range_is_sent_and_named(share):
    answer = answer_data(share, {"range": "bytes=8-15"})
    assert answer.status == 206
    assert answer.span == Span(8, 8)
    assert answer.headers["Content-Range"] == f"bytes 8-15/{share.size}"


def test_range_outside_is_416_and_says_how_long_it_is(share):
    answer = answer_data(share, {"range": f"bytes={share.size}-"})
    assert answer.status == 416
    assert answer.span is None
    assert answer.length == 0
    assert answer.headers["Content-Range"] == f"bytes */{share.size}"


THIS, OTHER = "this", '"other"'
RANGE = {"range": "bytes=0-7"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"if-match": THIS}, 206),
        ({"if-match": "*"}, 206),
        ({"if-match": f"{OTHER}, {THIS}"}, 206),
        ({"if-match": OTHER}, 412),
        ({"if-match": f"W/{THIS}"}, 412),
        ({"if-none-match": THIS}, 304),
        ({"if-none-match": "*"}, 304),
        ({"if-none-match": f"W/{THIS}"}, 304),  # the weak comparison: RFC 9110, 13.1.2
        ({"if-none-match": OTHER}, 206),
        ({"if-none-match": f"{OTHER},{THIS}"}, 304),
        ({"if-range": THIS}, 206),
        ({"if-range": f" {THIS} "}, 206),
        ({"if-range": OTHER}, 200),
        ({"if-range": f"W/{THIS}"}, 200),
        ({"if-range": "Mon, 01 Jan 2024 00:00:00 GMT"}, 200),
        ({"if-match": OTHER, "if-none-match": THIS}, 412),
        ({"if-match": THIS, "if-none-match": THIS}, 304),
    ],
)
def test_conditions(headers, status, share):
    given = {name: text.replace(THIS, share.etag) for name, text in headers.items()}
    answer = answer_data(share, RANGE | given)
    assert answer.status == status
    assert answer.headers["ETag"] == share.etag
    assert (answer.span is None) is (status in (304, 412))


def test_range_outside_of_another_version_is_the_whole_of_this_one(share):
    answer = answer_data(share, {"range": "bytes=999999-", "if-range": OTHER})
    assert answer.status == 200


def test_validator_is_strong_and_does_not_give_the_id_away(share):
    assert share.etag.startswith('"')
    assert ID not in share.etag
    assert ID[:8] not in share.etag


def test_caches_keep_only_what_they_may_and_no_longer_than_it_lives(make_share):
    now = [0.0]
    assert "private" in answer_data(make_share(), {}).headers["Cache-Control"]
    bounded = make_share(cacheable=True, expires_s=100, clock=lambda: now[0])
    now[0] = 40.5
    control = answer_data(bounded, {}).headers["Cache-Control"]
    assert control == "public, no-transform, max-age=59"
    digests = answer_digests(bounded, 0, 1).headers["Cache-Control"]
    assert digests == control


def test_digests(share):
    answer = answer_digests(share, 0, 1)
    assert answer.status == 200
    assert len(answer.body) == 32
    assert answer_digests(share, 1, 1).status == 404


def test_digests_that_are_not_ready_are_to_be_asked_for_again(share):
    with share.digests._hashing:
        answer = answer_digests(share, 0, 0.001)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "0"  # it is hashed while somebody asks
    assert answer.headers["Cache-Control"] == "no-store"
    assert json.loads(answer.body) == {"error": "hashing", "done": 0, "total": 1}


@pytest.mark.parametrize(
    ("reason", "status"), [(None, 404), ("revoked", 410), ("expired", 410), ("changed", 410)]
)
def test_what_is_over_says_why_and_what_never_was_says_nothing(reason, status):
    answer = gone(reason)
    assert answer.status == status
    assert json.loads(answer.body).get("reason") == reason
    assert answer.headers["Cache-Control"] == "no-store"


def test_failures_are_json_that_no_cache_keeps():
    answer = failure(500, error="unreadable", cause="ShortRead")
    assert json.loads(answer.body) == {"error": "unreadable", "cause": "ShortRead"}
    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b'{"state": 3}',
        b'{"state": "mismatch"}',
        b'{"state": "mismatch", "block": -1}',
        b'{"state": "mismatch", "block": 1}',
        b'{"state": "mismatch", "block": "0"}',
        b'{"state": "mismatch", "block": 1e400}',
        b"[" * 60_000,
    ],
)
def test_reports_that_make_no_sense_are_refused(body, share):
    assert answer_report(share, "x", None, body).status == 400
    assert share.ended is None


def test_report_of_a_block_that_is_right_here_changes_nothing(share):
    share.digests.hash_all()
    answer = answer_report(share, "x", None, b'{"state": "mismatch", "block": 0}')
    assert answer.status == 200
    assert json.loads(answer.body)["lives"] is True
    assert share.ended is None


def test_report_of_a_block_that_was_written_ends_the_share(make_share):
    array = np.zeros(100, np.uint8)
    contents = Contents(lay_out({"a": array}))
    ticketing = Ticketing(KEY, ID, f"http://127.0.0.1:1/s/{ID}/model.safetensors")
    life = Life(time.monotonic)
    share = Share(ticketing, contents, life, cacheable=False, forget=lambda _: None)
    share.digests.hash_all()
    array[3] = 1
    answer = answer_report(share, "x", None, b'{"state": "mismatch", "block": 0}')
    assert answer.status == 410
    assert json.loads(answer.body)["reason"] == "changed"
    assert share.ended == "changed"
