"""What a server has on offer, by id: bounds, ends, and what is remembered."""

import json

import numpy as np
import pytest

import weighlock
from weighlock.errors import LimitExceeded, LocalProtocolError
from weighlock.limits import Limits
from weighlock.sharing.offer import Offer, Ticketing
from weighlock.sharing.offers import Offers
from weighlock.sharing.share import Event, Life

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def make_offers():
    made = []

    def make(**limits):
        made.append(Offers(Limits(**limits)))
        return made[-1]

    yield make
    for offers in made:
        offers.close()


def add(offers, offer_id, pinned_bytes=0, clock=lambda: 0.0, **options):
    offer = Offer(
        Ticketing(bytes(32), offer_id, f"http://host/s/{offer_id}/model.safetensors"),
        Life(clock, **options),
        forget=lambda offer: offers.forget(offer_id, offer),
    )
    offers.add(offer_id, offer, pinned_bytes)
    return offer


def test_what_is_offered_is_found_until_its_end_and_then_remembered(make_offers):
    offers = make_offers()
    offer = add(offers, "a", receivers=("x",))
    assert offers.find("a") is offer
    assert offers.find("b") is None
    offer.report("x", Event.LANDED, "1")
    assert offers.find("a") == "settled"
    assert len(offers) == 0
    assert offers.was_confirmed("a", "x")
    assert not offers.was_confirmed("a", "y")
    assert not offers.was_confirmed("b", "x")


def test_an_end_that_nobody_has_told_yet_is_found_nevertheless(make_offers):
    # As seen by one thread while another is about to bury it.
    offers = make_offers()
    offer = add(offers, "a", receivers=("x", "y"))
    offer._is_told = True
    offer.report("x", Event.LANDED, "1")
    offer.revoke()
    assert offers.find("a") == "revoked"
    assert offers.was_confirmed("a", "x")
    assert not offers.was_confirmed("a", "y")


def test_what_expired_is_buried_by_who_asks_first(make_offers):
    now = [0.0]
    offers = make_offers()
    add(offers, "a", clock=lambda: now[0], expires_s=5)
    now[0] = 5.0
    assert offers.find("a") == "expired"
    assert len(offers) == 0


def test_shares_are_bounded_and_make_room_when_they_end(make_offers):
    offers = make_offers(shares=2)
    first, _ = add(offers, "a"), add(offers, "b")
    with pytest.raises(LimitExceeded, match="3 asked, 2 allowed"):
        add(offers, "c")
    first.revoke()
    add(offers, "c")
    assert len(offers) == 2


def test_pinned_bytes_are_bounded_and_counted_back(make_offers):
    offers = make_offers(pinned_bytes=100)
    first = add(offers, "a", 60)
    with pytest.raises(LimitExceeded, match="120 asked, 100 allowed"):
        add(offers, "b", 60)
    assert offers.pinned_bytes == 60
    first.revoke()
    first.revoke()
    assert offers.pinned_bytes == 0
    add(offers, "b", 100)


def test_ids_are_taken_once_and_may_live_again(make_offers):
    offers = make_offers()
    first = add(offers, "a")
    with pytest.raises(LocalProtocolError, match="already"):
        add(offers, "a")
    first.revoke()
    second = add(offers, "a")
    first.revoke()
    assert offers.find("a") is second


def test_tombstones_are_bounded(make_offers):
    offers = make_offers(tombstones=2)
    for name in "abc":
        add(offers, name).revoke()
    assert [offers.find(name) for name in "abc"] == [None, "revoked", "revoked"]


def test_closing_ends_everything_and_nothing_is_offered_afterwards(make_offers):
    offers = make_offers()
    made = [add(offers, name) for name in "abc"]
    offers.close()
    assert [offer.ended for offer in made] == ["revoked"] * 3
    with pytest.raises(LocalProtocolError, match="closed"):
        add(offers, "d")


def test_servers_refuse_what_pins_too_much_before_it_is_hashed_or_copied():
    with weighlock.Server(limits=Limits(pinned_bytes=1000, shares=2)) as server:
        with pytest.raises(LimitExceeded, match="1,600 asked"):
            server.share({"a": np.zeros(200)})
        with pytest.raises(LimitExceeded, match="1,600 asked"):
            server.share({"a": np.zeros((2, 100)).T})  # strided ones are there as well
        server.share({"a": np.zeros(100)})
        with pytest.raises(LimitExceeded, match="1,600 asked"):
            server.share({"a": np.zeros(100)}, snapshot=True)
        server.share({"a": np.zeros(10)})
        with pytest.raises(LimitExceeded, match="3 asked, 2 allowed"):
            server.share({"a": np.zeros(1)})


MANY = """
import json, resource, time
import numpy as np
import weighlock
from weighlock.sharing.share import Event

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(x.split()[1]) * 1024 for x in status if x.startswith("RssAnon"))

with weighlock.Server() as server:
    array = np.zeros(10)
    weighlock.fetch(server.share({"a": array}).url)
    before = anonymous()
    # Tombstones of shares that named receivers settled.
    for _ in range(100_000):
        server._offers._tombstones.put(
            weighlock.sharing.offers._key(str(_)), "settled", [("site-1", ""), ("site-2", "")]
        )
    for number in range(10_000 - 2):
        server.share({"a": array}, receivers=("site-1", "site-2"))
    last = server.share({"a": array}, receivers=("site-1",), expires_s=1.5)
    added, held = anonymous() - before, [len(server._offers), len(server._offers._tombstones)]
    cpu, began = time.process_time(), time.monotonic()
    last.wait(60)  # what watching costs while nothing happens until one is over
    cpu = (time.process_time() - cpu) / (time.monotonic() - began)
    print(json.dumps([*held, added, cpu]))
"""


def test_d9_ten_thousand_shares_and_a_hundred_thousand_tombstones_are_small(run_python):
    shares, tombstones, added, cpu = json.loads(run_python(MANY).stdout)
    assert (shares, tombstones) == (10_000, 100_000)
    assert added <= 200_000_000
    assert cpu < 0.5  # it is about 0.001; a thread that looks at each all the time needs all of it
