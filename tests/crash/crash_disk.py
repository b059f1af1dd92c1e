"""A disk that remembers what was done to it, and every state a power loss may leave of that.

`RecordingDisk` is the machine's own disk with a log. `crash_states` reads the log as an adversary
who keeps to the letter of POSIX would: power fails after any operation, and whatever was not synced
by then is there, is not there, or is there in part - each operation for itself, in no order.

- A sync of a file settles its bytes and its length, a sync of a directory its names.
- An unsettled write is done, not done, or torn at a 512-byte boundary of the file: only what comes
  before or only what comes behind it was written; its length may be there without its bytes.
- An unsettled new name, rename or removal has happened or has not. A rename is never half done.
"""

import itertools
import math
import os
import random
from dataclasses import dataclass, field

from weighlock.disk.effects import PosixDisk

SECTOR = 512


@dataclass(frozen=True)
class Write:
    node: int
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Insert:
    node: int
    offset: int
    count: int


@dataclass(frozen=True)
class Sync:
    node: int


@dataclass(frozen=True)
class Name:
    """A name for a file or directory: new, or moved here from another one in the directory."""

    node: int
    """The directory."""
    name: str
    target: int
    moved_from: str | None = None


@dataclass(frozen=True)
class Remove:
    node: int
    name: str


@dataclass(frozen=True)
class Mark:
    """Something that happened outside the disk, such as a call that returned."""

    text: str
    node: int = -1


@dataclass(frozen=True)
class Tree:
    """Directories and files by number; the root is 0."""

    names: dict[int, dict[str, int]]
    contents: dict[int, bytes]

    def files(self):
        """Content by path; the path of an empty directory ends with a slash."""
        found = {}
        waiting = [("", 0)]
        while waiting:
            path, node = waiting.pop()
            if self.names.get(node) or node == 0:
                inside = self.names[node].items()
                waiting += [(f"{path}/{name}".lstrip("/"), child) for name, child in inside]
            else:
                found[path + "/" * (node in self.names)] = self.contents.get(node, b"")
        return found


class RecordingDisk(PosixDisk):
    """The machine's disk below one directory, writing down every effect on it.

    Args:
        root: the directory; what it holds at the beginning is taken to be settled.
        unnamed: whether this file system has unnamed files.
        inserts: whether it can shift data.
    """

    def __init__(self, root, *, unnamed=True, inserts=True):
        self.log = []
        self.start = Tree({}, {})
        self._unnamed = unnamed
        self._inserts = inserts
        self._numbers = itertools.count()
        self._by_inode = {}
        self._names = {}
        self._scan(os.fspath(root))

    def mark(self, text):
        self.log.append(Mark(text))

    def create_unnamed(self, directory):
        fd = super().create_unnamed(directory) if self._unnamed else None
        if fd is not None:
            self._number(os.fstat(fd), new=True)
        return fd

    def create(self, directory, name):
        fd = super().create(directory, name)
        self._name(directory, name, self._number(os.fstat(fd), new=True))
        return fd

    def make_directory(self, directory, name):
        super().make_directory(directory, name)
        node = self._number(os.stat(name, dir_fd=directory), new=True)
        self.start.names[node] = {}  # harmless before it has a name
        self._name(directory, name, node)

    def write(self, fd, parts, offset):
        taken = super().write(fd, parts, offset)
        self.log.append(Write(self._of(fd), offset, b"".join(parts)[:taken]))
        return taken

    def copy(self, source_fd, source_offset, fd, offset, count):
        copied = super().copy(source_fd, source_offset, fd, offset, count)
        if copied:
            self.log.append(Write(self._of(fd), offset, os.pread(fd, copied, offset)))
        return copied

    def insert(self, fd, offset, count):
        done = self._inserts and super().insert(fd, offset, count)
        if done:
            self.log.append(Insert(self._of(fd), offset, count))
        return done

    def sync(self, fd):
        # Only written down: no power is going to fail in earnest.
        self.log.append(Sync(self._of(fd)))

    def link(self, fd, directory, name):
        super().link(fd, directory, name)
        self._name(directory, name, self._of(fd))

    def rename(self, directory, old, new):
        super().rename(directory, old, new)
        target = self._names.pop((self._of(directory), old))
        self._name(directory, new, target, moved_from=old)

    def unlink(self, directory, name):
        super().unlink(directory, name)
        self.log.append(Remove(self._of(directory), name))

    def remove_directory(self, directory, name):
        super().remove_directory(directory, name)
        self.log.append(Remove(self._of(directory), name))

    def _name(self, directory, name, target, moved_from=None):
        node = self._of(directory)
        self._names[node, name] = target
        self.log.append(Name(node, name, target, moved_from))

    def _of(self, fd):
        return self._number(os.fstat(fd))

    def _number(self, status, *, new=False):
        """Our number of an inode; the system gives the numbers of deleted files again."""
        key = status.st_dev, status.st_ino
        if new or key not in self._by_inode:
            self._by_inode[key] = next(self._numbers)
        return self._by_inode[key]

    def _scan(self, path):
        node = self._number(os.stat(path))
        if not os.path.isdir(path):
            with open(path, "rb") as file:
                self.start.contents[node] = file.read()
            return node
        self.start.names[node] = {
            name: self._scan(os.path.join(path, name)) for name in os.listdir(path)
        }
        self._names.update(((node, n), child) for n, child in self.start.names[node].items())
        return node


@dataclass(frozen=True)
class CrashState:
    """What is on the disk after power failed: the log up to there, and the fate of the unsettled.

    A fate is True for done, False for not done, or what there is of a write: its first byte, its
    end, and whether the file has the length it would have with all of it.
    """

    log: tuple
    fates: dict
    files: dict[str, bytes] = field(repr=False)

    @property
    def marks(self):
        return [operation.text for operation in self.log if isinstance(operation, Mark)]

    def __str__(self):
        lines = [
            f"  {self.fates.get(n, 'settled')!s:>20}  {operation}"
            for n, operation in enumerate(self.log)
        ]
        return "\n".join(["power failed after", *lines])


def crash_states(start, log, *, at_most, seed):
    """States a power loss may leave: all of them where they are few, else a sample."""
    choose = random.Random(seed).choice
    share = max(2, at_most // (len(log) + 1))
    for end in range(len(log) + 1):
        done = tuple(log[:end])
        fates = {n: _fates(op) for n, op in enumerate(done) if not _settled(op, done[n:])}
        if math.prod(map(len, fates.values())) <= share:
            chosen = itertools.product(*fates.values())
        else:
            extremes = [[True] * len(fates), [False] * len(fates)]
            sample = ([choose(some) for some in fates.values()] for _ in range(share - 2))
            chosen = itertools.chain(extremes, sample)
        for fate in chosen:
            happened = dict(zip(fates, fate, strict=True))
            yield CrashState(done, happened, replay(start, done, happened))


def _settled(operation, later):
    return isinstance(operation, (Mark, Sync)) or Sync(operation.node) in later


def _fates(operation):
    if not isinstance(operation, Write):
        return [True, False]
    size = len(operation.data)
    first = SECTOR - operation.offset % SECTOR
    cuts = range(first, size, SECTOR)
    torn = [(0, cut, longer) for cut in cuts for longer in (True, False)]
    return [True, False, (0, 0, True), *torn, *((cut, size, True) for cut in cuts)]


def replay(start, log, fates=None):
    """The files after these operations, each done as its fate says; all of it if there is none."""
    fates = fates or {}
    tree = Tree({node: dict(names) for node, names in start.names.items()}, dict(start.contents))
    for n, operation in enumerate(log):
        fate = fates.get(n, True)
        if fate is not False:
            _do(tree, operation, fate)
    return tree.files()


def _do(tree, operation, fate):
    match operation:
        case Write(node, offset, data):
            first, end, longer = (0, len(data), True) if fate is True else fate
            content = bytearray(tree.contents.get(node, b""))
            reach = offset + (len(data) if longer else end)
            content.extend(bytes(max(0, reach - len(content))))
            content[offset + first : offset + end] = data[first:end]
            tree.contents[node] = bytes(content)
        case Insert(node, offset, count):
            content = tree.contents.get(node, b"")
            if offset < len(content):
                tree.contents[node] = content[:offset] + bytes(count) + content[offset:]
        case Name(node, name, target, moved_from):
            tree.names[node].pop(moved_from, None)
            tree.names[node][name] = target
        case Remove(node, name):
            tree.names[node].pop(name, None)
