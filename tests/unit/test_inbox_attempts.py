"""Attempts that meet in an inbox, and files that cannot be put in their place. No sockets.

Disks are the machine's, but for the one thing that a test holds up or lets fail.
"""

import errno
import gc
import os
import threading
import time
import weakref

import pytest
from blake3 import blake3
from transfer_samples import content

from crash.disks import Around, FailingDisk
from process.chaos_peers import InThread
from threads import no_more_threads
from waiting import until
from weighlock import Limits, State
from weighlock.disk.effects import PosixDisk
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import DiskError, NotDurable, Refused
from weighlock.sharing.arrival import root_of
from weighlock.sharing.destination import Directory
from weighlock.sharing.inbox import Inbox
from weighlock.sharing.offer import Ticketing
from weighlock.sharing.placing import NotPlaced
from weighlock.sharing.share import Life

__all__ = ["content"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

MB = 1 << 20


class Held(Around):
    """A disk on which an operation takes as long as a test wants."""

    def __init__(self, operation):
        super().__init__(PosixDisk(), operation)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def hold(self):
        self.begun.clear()
        self.go_on.clear()

    def instead(self, real, *arguments):
        self.begun.set()
        assert self.go_on.wait(60)
        return real(*arguments)


class On(Directory):
    """A directory on a disk of the test's."""

    def __init__(self, path, disk):
        super().__init__(path, durable=True, limits=Limits())
        self.disk = disk

    def file(self, name, size, promised_bytes):
        file = ResumableFile(self._of(name), disk=self.disk)
        return file, bool(file.adopted_bytes)


@pytest.fixture
def make(tmp_path):
    """Makes an inbox for "a" on a disk."""
    made = []

    def inbox(disk):
        life = Life(time.monotonic, receivers=["a"])
        inbox = Inbox(
            Ticketing(bytes(32), "0" * 32, f"http://here/i/{'0' * 32}"),
            life,
            destination=On(tmp_path / "in", disk),
            specs=None,
            quota_bytes=None,
            limits=Limits(),
            forget=lambda _: None,
        )
        made.append(inbox)
        return inbox

    yield inbox
    for each in made:
        each.close()
    for name in os.listdir(tmp_path / "in"):
        if ".part-" in name:
            os.unlink(tmp_path / "in" / name)


def begin(inbox, content, attempt="1"):
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    return inbox.begin("a", attempt, header, len(content))


def bring(arrival, content, *blocks):
    for block in blocks:
        data = content[block * MB : (block + 1) * MB]
        buffer = memoryview(bytearray(MB))
        arrival.receive(
            block, blake3(data).digest(), lambda view, data=data: _fill(view, data), buffer
        )


def _fill(view, data):
    view[:] = data


def root(content):
    starts = range(0, len(content), MB)
    return root_of(b"".join(blake3(content[at : at + MB]).digest() for at in starts))


def landed(inbox, content, attempt="1"):
    """Whether it landed; waits while it is being put in its place."""
    said = []

    def is_over():
        said.append(inbox.finish("a", attempt, root(content)))
        return said[-1] is not None

    until(is_over)
    return said[-1]


def test_a_push_that_begins_while_another_ends_is_the_one_that_counts(make, content, tmp_path):
    """The last block of the first is still being written when the second is told to go on."""
    disk = Held("write")
    inbox = make(disk)
    arrival = begin(inbox, content)
    bring(arrival, content, 0, 1)
    disk.hold()
    last = InThread(bring, arrival, content, 2)
    assert disk.begun.wait(60)
    ending = InThread(inbox.finish, "a", "1", root(content))
    until(lambda: arrival.is_sealed)
    assert begin(inbox, content, "2") is arrival
    disk.go_on.set()
    last.end()
    with pytest.raises(Refused, match="another one"):
        ending.end()
    assert os.listdir(tmp_path / "in") != ["a.safetensors"]
    other = bytearray(content)
    other[2 * MB + 5] ^= 1
    bring(arrival, bytes(other), 2)
    assert landed(inbox, bytes(other), "2")
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == other


def landing(inbox, content):
    """The sender was told that what it sent is being put in its place."""
    bring(begin(inbox, content), content, 0, 1, 2)
    return inbox.finish("a", "1", root(content)) is None


class HeldFailing(Held):
    """A disk on which an operation takes long, and fails."""

    def instead(self, real, *arguments):
        super().instead(lambda *_: None, *arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_whoever_was_told_to_wait_hears_why_it_failed(make, content, tmp_path):
    disk = HeldFailing("sync")
    disk.hold()
    inbox = make(disk)
    assert landing(inbox, content)
    disk.go_on.set()
    until(lambda: inbox.arrival("a") is None)
    for _ in range(2):  # as often as it asks: a reply may be lost
        with pytest.raises(NotDurable, match="syncing failed"):
            inbox.finish("a", "1", root(content))
    assert os.listdir(tmp_path / "in") == []
    assert disk.calls == 1  # a failed fsync is not tried again
    assert begin(inbox, content, "2").bytes_here == 0
    assert inbox.finish("a", "2", root(content)) is False  # of its own attempt nothing has come


def test_what_is_remembered_of_a_failure_holds_on_to_nothing(make, content):
    inbox = make(FailingDisk(PosixDisk(), "sync", 1, errno.EIO))
    arrival = begin(inbox, content)
    bring(arrival, content, 0, 1, 2)
    with pytest.raises(NotDurable):
        landed(inbox, content)
    arrival = weakref.ref(arrival)
    gc.collect()
    assert arrival() is None
    with pytest.raises(NotDurable):
        landed(inbox, content)


def test_what_cannot_be_completed_is_kept_and_tried_again(make, content, tmp_path):
    disk = FailingDisk(PosixDisk(), "truncate", 1, errno.EIO)
    inbox = make(disk)
    arrival = begin(inbox, content)
    bring(arrival, content, 0, 1, 2)
    with pytest.raises(NotPlaced, match="cannot be put in its place now"):
        landed(inbox, content)
    assert disk.hit
    assert arrival.bytes_here == len(content)
    assert begin(inbox, content, "2") is arrival  # for whoever comes next, and may send other data
    bring(arrival, content, 1)
    assert landed(inbox, content, "2")
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == content


def test_a_rename_that_fails_is_told_for_good(make, content, tmp_path):
    inbox = make(FailingDisk(PosixDisk(), "rename", 1, errno.EACCES))
    arrival = begin(inbox, content)
    bring(arrival, content, 0, 1, 2)
    for _ in range(2):
        with pytest.raises(DiskError, match="cannot be put in place"):
            landed(inbox, content)
    (left,) = os.listdir(tmp_path / "in")
    assert ".part-" in left  # for another inbox there


def test_where_there_are_no_more_threads_a_file_lands_all_the_same(make, content, tmp_path):
    inbox = make(PosixDisk())
    bring(begin(inbox, content), content, 0, 1, 2)
    with no_more_threads():
        assert inbox.finish("a", "1", root(content)) is True
    assert inbox.outcome["a"] is State.LANDED
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == content
