"""What a receiver says, over a socket: words, answers, and what is made of odd ones."""

import json

import pytest

from process.chaos_peers import Scripted, reply
from weighlock.abort import Abort
from weighlock.errors import (
    Aborted,
    LocalProtocolError,
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
    SourceError,
)
from weighlock.limits import Limits
from weighlock.sources.http_remote import Remote
from weighlock.sources.receipt import Receipt, Said

pytestmark = pytest.mark.usefixtures("no_leaks")

TICKET = "#r=site-1." + "0" * 32


@pytest.fixture
def owner():
    with Scripted(b"x" * 100) as owner:
        yield owner


@pytest.fixture
def make_receipt(owner):
    made = []

    def make(answer=None, fragment=TICKET, name=None, abort=None):
        owner.answer = lambda request: answer if request.kind == "report" else owner.honest(request)
        remote = Remote(owner.url + fragment, limits=Limits(patience_s=0.1), abort=abort)
        made.append(remote)
        receipt = Receipt(remote, name)
        made.append(receipt)
        return receipt

    yield make
    for each in made:
        each.close()


def answered(**facts):
    return reply(200, {}, json.dumps(facts).encode())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered(), Said()),
        (answered(confirmed=True, alive_s=3.5), Said(True, 3.5)),
        (answered(confirmed=False, alive_s=None, lives=True, more=[1]), Said()),
    ],
)
def test_answers(make_receipt, answer, said):
    assert make_receipt(answer).say("landed") == said


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(200, {}, b""), RemoteProtocolError),
        (reply(200, {}, b"[]"), RemoteProtocolError),
        (reply(200, {}, b'{"confirmed": 1}'), RemoteProtocolError),
        (reply(200, {}, b'{"alive_s": "soon"}'), RemoteProtocolError),
        (reply(200, {}, b"\xff"), RemoteProtocolError),
        (reply(200, {}, b"[" * 50_000), RemoteProtocolError),
        (reply(200, {}, b" " * 100_000), RemoteProtocolError),
        (reply(403, {}), Refused),
        (reply(404, {}), ShareGone),
        (reply(405, {}), RemoteProtocolError),
        (reply(410, {}, b'{"reason": "revoked"}'), ShareGone),
        (reply(410, {}, b'{"reason": "changed"}'), SourceChanged),
        (reply(503, {}), PeerLost),
        (reply(500, {}, b'{"error": "unreadable", "cause": "ShortRead"}'), SourceError),
        (reply(500, {}, b'{"cause": "Timeout"}'), PeerLost),  # of whatever stands in between
        (None, PeerLost),
    ],
)
def test_what_is_no_answer_is_an_error_and_nothing_if_nothing_depends_on_it(
    make_receipt, answer, error
):
    receipt = make_receipt(answer)
    with pytest.raises(error):
        receipt.say("started")
    assert receipt.try_to_say("alive") == Said()


def test_names_come_from_the_ticket_or_the_caller_and_must_agree(make_receipt):
    assert make_receipt().name == "site-1"
    assert make_receipt().is_named
    assert make_receipt(name="site-1").name == "site-1"
    with pytest.raises(Refused, match="is the ticket of 'site-1', not of 'site-2'"):
        make_receipt(name="site-2")
    assert make_receipt(fragment="", name="me").name == "me"
    assert make_receipt(fragment="", name="me").is_named
    nobody = make_receipt(fragment="")
    assert nobody.name.startswith("anonymous-")
    assert not nobody.is_named


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "a\n", "ä", "x" * 65])
def test_what_cannot_be_a_name_is_refused_before_it_is_part_of_a_path(make_receipt, name):
    with pytest.raises(LocalProtocolError, match="cannot be a name"):
        make_receipt(fragment="", name=name)


def test_a_word_goes_where_the_name_says(make_receipt, owner):
    make_receipt(answered()).say("alive")
    assert owner.requests[-1].target == "/s/x/receivers/site-1"


def test_after_an_abort_only_last_words_are_said(make_receipt):
    abort = Abort()
    receipt = make_receipt(answered(), abort=abort)
    abort.set("enough")
    for word in ("started", "alive", "landed"):
        with pytest.raises(Aborted, match="enough"):
            receipt.say(word)
    assert receipt.say("aborted") == Said()


@pytest.mark.parametrize(
    ("word", "is_heard"),
    [("started", False), ("alive", False), ("failed", True), ("aborted", True)],
)
def test_what_wakes_others_does_not_silence_a_last_word(make_receipt, owner, word, is_heard):
    # An abort wakes one after the other: the first may stop and say so before the last is woken.
    receipt = make_receipt()

    def answer(request):
        receipt.shut()
        return answered()

    owner.answer = answer
    if is_heard:
        assert receipt.say(word) == Said()
    else:
        with pytest.raises(PeerLost):
            receipt.say(word)
