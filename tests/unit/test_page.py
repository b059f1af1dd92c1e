"""What the page is told, without a socket: paths, the token, numbers instead of ids, metrics."""

import json
import re
import time

import numpy as np
import pytest

from weighlock.errors import LocalProtocolError, SourceError
from weighlock.sharing.board import Board
from weighlock.sharing.inspection import Inspection, Partly
from weighlock.sharing.metrics import Family, Meters, exposition, kind_of
from weighlock.sharing.offer import Ticketing
from weighlock.sharing.page import Page, PageRoute, check_token, find_page
from weighlock.sharing.share import Event, Life
from weighlock.sharing.shared import Share
from weighlock.transfer.contents import Contents
from weighlock.transfer.layout import lay_out

ID = "0123456789abcdef" * 2
TOKEN = "a-token-of-some-length"
BEARER = {"authorization": f"Bearer {TOKEN}"}
HOSTILE = "<img src=x onerror=alert(1)>.\x1b[31m\u202e\"'&"


@pytest.mark.parametrize(
    ("target", "route"),
    [
        ("/", PageRoute("/")),
        ("/?any", PageRoute("/")),
        ("/page.js", PageRoute("/page.js")),
        ("/metrics", PageRoute("metrics")),
        ("/api/shares", PageRoute("shares")),
        ("/api/shares/3/receivers", PageRoute("receivers", 3)),
        ("/api/shares/3/tensors?offset=7", PageRoute("tensors", 3, {"offset": "7"})),
        (
            "/api/shares/12/statistics?name=a%2Eb%20%C3%BC&name=c",
            PageRoute("statistics", 12, {"name": "a.b ü"}),
        ),
        ("/api/shares/3/statistics?name=%ff", PageRoute("statistics", 3)),
        ("/api/shares/3/statistics?" + "a=b&" * 50, PageRoute("statistics", 3)),
        ("/api/shares/3/ticket", PageRoute("ticket", 3)),
        ("/api/shares/0/tensors", None),
        ("/api/shares/-1/tensors", None),
        ("/api/shares/1e3/tensors", None),
        (f"/api/shares/{'9' * 16}/tensors", None),
        ("/api/shares/3", None),
        ("/api/shares/3/tensors/", None),
        ("/api/shares/\u0663/tensors", None),
        ("/api/", None),
        ("/page.js/../index.html", None),
        ("/web/page.js", None),
        ("/index.html", None),
        ("//", None),
        (f"/s/{ID}/model.safetensors", None),
        ("*", None),
    ],
)
def test_paths(target, route):
    assert find_page(target) == route


def shared(arrays, board=None, receivers=(), title="", **options):
    """A share, and its number on a board."""
    board = board or Board()
    number = board.next_number()
    share = Share(
        Ticketing(bytes(32), ID, f"http://host/s/{ID}/model.safetensors"),
        Contents(lay_out(arrays), **options),
        Life(time.monotonic, receivers=receivers),
        cacheable=False,
        forget=lambda _: board.take_down(number),
        title=title,
    )
    board.put(number, share)
    return share, number


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def page(board):
    return Page(TOKEN, board, lambda: [Family("up", "gauge", "It is up.", {(): 1})])


def ask(page, target, headers=BEARER, method="GET"):
    answer = page.answer(find_page(target), method, headers)
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer ÿ☃"},
        {"cookie": f"token={TOKEN}"},
    ],
)
@pytest.mark.parametrize(
    "target",
    [
        "/api/shares",
        *(f"/api/shares/1/{what}" for what in ("tensors", "receivers", "statistics?name=a")),
        "/metrics",
        f"/api/shares?token={TOKEN}",
    ],
)
def test_nothing_is_told_without_the_token(page, board, headers, target):
    shared({"secret.name": np.ones(3)}, board)
    status, facts = ask(page, target, headers)
    assert (status, facts) == (401, {"error": "not the token of this page"})
    status, _ = ask(page, "/api/shares/1/ticket", headers, "POST")
    assert status == 401


def test_scheme_of_the_token_may_be_written_as_one_likes(page):
    assert ask(page, "/api/shares", {"authorization": f"bearer {TOKEN}"})[0] == 200


def test_token_is_not_shown(page):
    assert TOKEN not in repr(page)


@pytest.mark.parametrize("token", ["", "short", "x" * 129, "with a space in it", "ü" * 20])
def test_tokens_that_guard_nothing_are_refused(token):
    with pytest.raises(LocalProtocolError, match=f"{len(token)} characters"):
        check_token(token)


@pytest.mark.parametrize("target", ["/", "/page.css", "/page.js"])
def test_files_of_the_page_are_open_and_may_load_nothing_from_elsewhere(page, target):
    answer = page.answer(find_page(target), "GET", {})
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    text = answer.body.decode()
    # The namespace of SVG is a name, not a place.
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}
    for way_in in ("innerHTML =", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in text


@pytest.mark.parametrize(
    ("target", "method", "allowed"),
    [
        ("/", "POST", "GET, HEAD"),
        ("/api/shares", "DELETE", "GET, HEAD"),
        ("/api/shares/1/ticket", "GET", "POST"),
    ],
)
def test_other_methods_are_refused(page, target, method, allowed):
    answer = page.answer(find_page(target), method, BEARER)
    assert answer.status == 405
    assert answer.headers["Allow"] == allowed


def test_shares_are_numbered_and_their_ids_not_told(page, board):
    shared({"a": np.ones(3)}, board, title=HOSTILE)
    share, _ = shared({"b": np.ones(4), "c": np.ones(0)}, board, receivers=("site-1",))
    status, facts = ask(page, "/api/shares")
    assert status == 200
    assert facts["live"] == 2
    second, first = facts["shares"]
    assert (first["number"], first["title"], second["number"]) == (1, HOSTILE, 2)
    assert (second["tensors"], second["bytes"]) == (2, share.size)
    assert second["receivers"] == {"waiting": 1}
    assert ID not in json.dumps(facts)


def test_ticket_is_told_when_asked_for(page, board):
    share, _ = shared({"a": np.ones(3)}, board, receivers=("site-1",))
    assert ask(page, "/api/shares/1/ticket", method="POST") == (200, {"url": share.url})
    _, named = ask(page, "/api/shares/1/ticket?receiver=site-1", method="POST")
    assert named == {"url": share.url_for("site-1")}
    assert ask(page, "/api/shares/1/ticket?receiver=site-2", method="POST")[0] == 404


def test_share_that_is_over_is_still_told_of_and_no_longer_readable(page, board):
    share, _ = shared({"a": np.ones(3)}, board, receivers=("site-1",))
    share.report("site-1", Event.STARTED, "0")
    _, facts = ask(page, "/api/shares/1/receivers")
    assert facts["receivers"][0]["state"] == "started"
    share.report("site-1", Event.LANDED, "0", share.size)
    _, facts = ask(page, "/api/shares/1/receivers")
    assert facts["share"]["ended"] == "settled"
    assert facts["receivers"][0]["state"] == "landed"
    assert facts["receivers"][0]["bytes"] == facts["receivers"][0]["of"] == share.size
    assert ask(page, "/api/shares")[1]["live"] == 0
    for what in ("tensors", "statistics?name=a"):
        status, facts = ask(page, f"/api/shares/1/{what}")
        assert (status, facts["reason"]) == (410, "settled")
    assert ask(page, "/api/shares/2/tensors")[0] == 404
    assert ask(page, "/api/shares/2/receivers")[0] == 404


def test_only_so_many_that_are_over_are_remembered(page, board):
    for _ in range(70):
        shared({"a": np.ones(1)}, board)[0].revoke()
    shares = ask(page, "/api/shares")[1]["shares"]
    assert [share["number"] for share in shares] == list(range(70, 6, -1))
    assert board.ended == {("share", "revoked"): 70}


def test_tensors_come_in_pages_with_their_other_names(page, board):
    arrays = {f"t{n}": np.full(2, n, np.int16) for n in range(2500)}
    arrays |= {"empty": np.ones((0, 3)), HOSTILE: np.ones(1), "tied": arrays["t7"]}
    shared(arrays, board)
    rows, total = [], 1
    while len(rows) < total:
        status, facts = ask(page, f"/api/shares/1/tensors?offset={len(rows)}")
        assert status == 200
        assert facts["rows"]
        total = facts["of"]
        rows += facts["rows"]
    assert len(rows) == len(arrays)
    assert ["t7", "I16", [2], 4] in rows
    assert ["empty", "F64", [0, 3], 0] in rows
    assert [HOSTILE, "F64", [1], 8] in rows
    assert ["tied", "I16", [2], 0, "t7"] in rows
    for beyond in (len(rows), 10**11):
        assert ask(page, f"/api/shares/1/tensors?offset={beyond}")[1]["rows"] == []
    for wrong in ("-1", "x", "", "1" * 13, "%D9%A3"):
        assert ask(page, f"/api/shares/1/tensors?offset={wrong}")[0] == 400


# statistics


def test_statistics_are_of_what_is_offered(page, board):
    strided = np.arange(40, dtype=np.float32).reshape(5, 8).T
    shared({"s": strided, "empty": np.ones((0, 3)), "also": strided}, board)
    for name in ("s", "also"):
        status, facts = ask(page, f"/api/shares/1/statistics?name={name}")
        assert status == 200
        found = facts["statistics"]
        assert (found["count"], found["min"], found["max"], found["mean"]) == (40, 0, 39, 19.5)
        assert sum(found["bins"]) == 40
    assert ask(page, "/api/shares/1/statistics?name=empty")[1]["statistics"]["count"] == 0
    assert ask(page, "/api/shares/1/statistics?name=nothing")[0] == 404
    assert ask(page, "/api/shares/1/statistics")[0] == 404


def test_snapshot_is_looked_at_and_not_its_array():
    array = np.zeros(10)
    share, number = shared({"a": array})
    share.contents.copy_memory()
    array[:] = 7
    assert Inspection().look(number, share, "a").max == 0


def test_large_tensor_is_read_in_slices_that_say_how_far_they_are():
    array = np.arange(700_000, dtype=np.float32)
    share, number = shared({"a": array})
    inspection, seen = Inspection(slice_s=0.0), []
    while isinstance(found := inspection.look(number, share, "a"), Partly):
        assert found.of_bytes == array.nbytes
        seen.append(found.done_bytes)
    assert seen == [2**20, 2 * 2**20]
    assert (found.count, found.max, found.zeros) == (array.size, array.size - 1, 1)
    assert sum(found.bins) == array.size
    array[0] = -5
    assert inspection.look(number, share, "a") is found  # remembered, not read again


def test_looks_that_are_begun_and_left_are_bounded():
    share, number = shared({f"{n}": np.full(300_000, n, np.float64) for n in range(6)})
    inspection = Inspection(slice_s=0.0)
    for n in range(6):
        assert inspection.look(number, share, f"{n}").done_bytes == 2**20
    assert inspection.look(number, share, "5").done_bytes == 2 * 2**20
    assert inspection.look(number, share, "0").done_bytes == 2**20  # from the start again


def test_one_at_a_time_is_looked_at(page, board):
    shared({"a": np.ones(3)}, board)
    with page.inspection.busy:
        page.inspection.wait_s = 0.0
        answer = page.answer(find_page("/api/shares/1/statistics?name=a"), "GET", BEARER)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    assert ask(page, "/api/shares/1/statistics?name=a")[0] == 200


def test_elements_that_cannot_be_told_apart_are_said_to_be(page, board):
    from weighlock import TensorSpec
    from weighlock.sources.local import BytesSource
    from weighlock.tensors.spec import Span
    from weighlock.tensors.stored import StoredRef

    ref = StoredRef(TensorSpec("a", "F6_E2M3", (4,)), BytesSource(bytes(3)), Span(0, 3))
    shared({"a": ref}, board)
    status, facts = ask(page, "/api/shares/1/statistics?name=a")
    assert status == 422
    assert "F6_E2M3" in facts["error"]


def test_share_that_ends_during_a_look_ends_the_look():
    share, number = shared({"a": np.ones(300_000)})
    inspection = Inspection(slice_s=0.0)
    assert isinstance(inspection.look(number, share, "a"), Partly)
    share.revoke()
    with pytest.raises(SourceError):
        inspection.look(number, share, "a")


# metrics


def test_exposition_escapes_what_it_is_given():
    family = Family("a", "counter", 'say "x"\n\\', {(("l", 'a"b\\c\nd'), ("m", "")): 2})
    assert exposition([family]) == (
        '# HELP weighlock_a say "x"\\n\\\\\n'
        "# TYPE weighlock_a counter\n"
        'weighlock_a{l="a\\"b\\\\c\\nd",m=""} 2\n'
    )


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (f"/s/{ID}/model.safetensors", "data"),
        (f"/s/{ID}/digests/3", "digests"),
        (f"/s/{ID}/receivers/x", "reports"),
        (f"/i/{ID}/senders/x", "inbox"),
        ("/api/shares", "page"),
        ("/", "page"),
        (f"/s/{ID}", "other"),
        ("/" + "x" * 1000, "other"),
        ("", "other"),
    ],
)
def test_kinds_of_requests_are_few(target, kind):
    assert kind_of(target) == kind


def test_connections_count_for_themselves_and_are_added_up():
    meters = Meters()
    with meters.connection() as one, meters.connection() as two:
        one.sent_bytes += 5
        two.requests["data", 206] += 1
        one.requests["data", 206] += 2
        assert meters.total().sent_bytes == 5

    def breaks():
        with meters.connection() as three:
            three.received_bytes += 7
            raise OSError("reset")

    with pytest.raises(OSError, match="reset"):
        breaks()
    total = meters.total()
    assert (total.sent_bytes, total.received_bytes, meters.broken) == (5, 7, 1)
    assert total.requests == {("data", 206): 3}
