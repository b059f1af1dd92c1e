"""Digests of an owner: asked for again when in doubt, and never against what was believed."""

import pytest

from weighlock.errors import ChunkCorrupt, SourceChanged
from weighlock.sources.digest_pages import DigestPages
from weighlock.sources.grid import BLOCKS_PER_PAGE, DIGEST_BYTES, page_of

NEXT = BLOCKS_PER_PAGE  # the first block of the second page


def digest(content):
    return bytes([content]) * DIGEST_BYTES


def page(*contents):
    return b"".join(map(digest, contents)).ljust(BLOCKS_PER_PAGE * DIGEST_BYTES, b"\0")


class Owner:
    """Gives its pages as they are now, and counts."""

    def __init__(self, *pages):
        self.pages = list(pages)
        self.spoiled = []
        """What is given instead, first of all."""
        self.asked = []

    def __call__(self, number):
        self.asked.append(number)
        return self.spoiled.pop(0) if self.spoiled else self.pages[number]


def test_a_page_is_asked_for_once():
    owner, pages = Owner(page(1, 2)), DigestPages("it")
    for block in (0, 1, 0):
        pages.load(page_of(block), owner)
        assert pages.matches(block, digest(block + 1))
    assert not pages.matches(0, digest(2))
    assert owner.asked == [0]


def test_a_page_that_was_spoiled_is_mended():
    owner, pages = Owner(page(1, 2)), DigestPages("it")
    owner.spoiled = [page(1, 9)]
    pages.load(page_of(0), owner)
    assert pages.matches(0, digest(1))
    assert not pages.matches(1, digest(2))
    pages.doubt(1)
    pages.load(page_of(1), owner)
    assert pages.matches(1, digest(2))
    assert owner.asked == [0, 0]


def test_a_page_that_contradicts_a_block_that_came_is_of_another_file():
    owner, pages = Owner(page(1, 2, 3)), DigestPages("it")
    pages.load(page_of(0), owner)
    assert pages.matches(0, digest(1))
    owner.pages = [page(7, 8, 9)]
    pages.doubt(1)
    with pytest.raises(SourceChanged, match="block 0"):
        pages.load(page_of(1), owner)
    assert not pages.matches(1, digest(8))


def test_a_page_that_changes_is_held_against_the_blocks_of_all_pages():
    owner, pages = Owner(page(1), page(2, 3)), DigestPages("it")
    for block in (0, NEXT):
        pages.load(page_of(block), owner)
    assert pages.matches(0, digest(1))
    owner.pages = [page(7), page(8, 9)]
    pages.doubt(NEXT)
    with pytest.raises(SourceChanged, match="block 0"):
        pages.load(page_of(NEXT), owner)


def test_a_page_that_comes_spoiled_again_proves_nothing():
    owner, pages = Owner(page(1, 2)), DigestPages("it")
    pages.load(page_of(0), owner)
    assert pages.matches(0, digest(1))
    pages.doubt(1)
    owner.spoiled = [page(9, 2)]
    with pytest.raises(ChunkCorrupt):
        pages.load(page_of(1), owner)
    pages.load(page_of(1), owner)
    assert pages.matches(1, digest(2))
