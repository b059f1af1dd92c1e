"""What may be told of an upstream that failed."""

import json

import pytest

from weighlock.errors import (
    ChunkCorrupt,
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    TransferTimeout,
)
from weighlock.sharing.routes import not_forwarded
from weighlock.transfer.upstream import UpstreamFailed

HOST = "http://10.0.0.7:8400"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{HOST}/s/…/model.safetensors: Connection refused", f"{HOST}: Connection refused"),
        (f"{HOST}/a/secret/b?…: answered 503 X", f"{HOST}: answered 503 X"),
        (f"{HOST}: its proxy answered 502", f"{HOST}: its proxy answered 502"),
        (
            f"{HOST}/x: leads to {HOST}/token, or (https://h/y)",
            f"{HOST}: leads to {HOST}, or (https://h)",
        ),
        ("https://[::1]:8400/s/…: is over (revoked)", "https://[::1]:8400: is over (revoked)"),
        (f"{HOST}/x", HOST),
        ("two\nlines", "two\\nlines"),
    ],
)
def test_of_urls_only_the_host_is_told(text, told):
    assert UpstreamFailed(PeerLost(text)).told == told


def test_what_is_told_is_short():
    assert len(UpstreamFailed(PeerLost("x" * 1000)).told) <= 160


def test_what_is_remembered_holds_nothing_of_the_read():
    try:
        raise PeerLost("x", retry_after_s=3)
    except PeerLost as error:
        kept = UpstreamFailed(error).error
    assert isinstance(kept, PeerLost)
    assert kept.__traceback__ is None
    assert kept.retry_after_s == 3


@pytest.mark.parametrize(
    ("error", "status", "facts"),
    [
        (PeerLost("x"), 502, {"error": "upstream", "cause": "PeerLost"}),
        (ChunkCorrupt("x", chunk=3), 502, {"error": "upstream", "cause": "ChunkCorrupt"}),
        (
            TransferTimeout("x", phase="idle"),
            504,
            {"error": "upstream", "cause": "TransferTimeout"},
        ),
        (ShareGone("x", reason="revoked"), 410, {"error": "gone", "reason": "revoked"}),
        (ShareGone("x"), 410, {"error": "gone", "reason": "unknown"}),
        (Refused("x"), 500, {"error": "unreadable", "cause": "Refused"}),
        (RemoteProtocolError("x"), 500, {"error": "unreadable", "cause": "RemoteProtocolError"}),
    ],
)
def test_what_may_pass_is_to_be_asked_again_and_what_may_not_is_not(error, status, facts):
    answer = not_forwarded(UpstreamFailed(error))
    assert answer.status == status
    assert json.loads(answer.body) == {**facts, "upstream": "x"}
    assert answer.headers["Cache-Control"] == "no-store"
    assert ("Retry-After" in answer.headers) is error.retryable


@pytest.mark.parametrize(("asked", "said"), [(None, "1"), (0, "1"), (0.2, "1"), (7, "7")])
def test_the_upstreams_wish_to_be_left_alone_is_passed_on(asked, said):
    answer = not_forwarded(UpstreamFailed(PeerLost("x", retry_after_s=asked)))
    assert answer.headers["Retry-After"] == said
