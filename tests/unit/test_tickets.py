"""Tickets that carry a name: what proves it, and what does not."""

import pytest

from weighlock.sharing.tickets import check_name, is_genuine, mac_of, ticket
from weighlock.sources.access import Address

KEY = bytes(range(32))
ID = "ab" * 16
URL = f"https://host:8400/s/{ID}/model.safetensors"
MORE = [f"r=a.{'G' * 32}", f"x=a.{'0' * 32}", f"r=a.{'0' * 32}&", f"r=a/b.{'0' * 32}"]


@pytest.mark.parametrize("name", ["a", "site-1", "a.b_c-d", "7", "x" * 64, f"a.{'0' * 32}"])
def test_a_ticket_names_its_holder_and_proves_it(name):
    address = Address.of(ticket(URL, KEY, ID, name))
    assert address.holder is not None
    found, mac = address.holder
    assert found == name
    assert is_genuine(KEY, ID, name, mac)
    assert address.url == URL  # what travels in requests for data is the same for everybody


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "ä", "a/b", "../x", ".a", "-a", "_a", "a\n", "a\0", "x" * 65, "a#b"]
)
def test_what_cannot_be_a_name_is_refused(name):
    with pytest.raises(ValueError, match="cannot be a name"):
        check_name(name)
    with pytest.raises(ValueError, match="cannot be a name"):
        ticket(URL, KEY, ID, name)


def test_a_mac_is_of_one_key_one_share_and_one_name():
    mac = mac_of(KEY, ID, "a")
    assert len(mac) == 32  # 128 bits
    assert not is_genuine(KEY, ID, "b", mac)
    assert not is_genuine(KEY, "cd" * 16, "a", mac)
    assert not is_genuine(bytes(32), ID, "a", mac)


@pytest.mark.parametrize("mac", [None, "", "x", "é" * 32, "0" * 32, "A" * 10_000])
def test_what_is_no_mac_proves_nothing_and_breaks_nothing(mac):
    assert not is_genuine(KEY, ID, "a", mac)


@pytest.mark.parametrize(
    "fragment",
    ["", "r=", "r=a", "r=a.", f"r=.{'0' * 32}", f"r=a.{'0' * 31}", *MORE],
)
def test_fragments_that_are_no_tickets_belong_to_nobody(fragment):
    assert Address.of(f"{URL}#{fragment}").holder is None


def test_no_part_of_a_ticket_is_shown():
    text = ticket(URL, KEY, ID, "a")
    address = Address.of(text)
    assert ID not in repr(address)
    assert text.rpartition(".")[2] not in repr(address)
