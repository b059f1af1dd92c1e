"""What goes out of a socket, whatever the kernel takes at a time."""

import errno
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from unit_samples import sample

from conftest import needs_strace
from weighlock.errors import TransferTimeout
from weighlock.tensors.arrays import byte_view
from weighlock.transfer.pieces import Several, views_of
from weighlock.transfer.sending import Sender


class Reluctant(socket.socket):
    """A socket that takes little at a time, as the kernel may."""

    most = 0

    def sendmsg(self, buffers, *rest):
        return super().send(b"".join(buffers)[: self.most])


def several(sizes):
    arrays = tuple(sample("BF16", (size,), number) for number, size in enumerate(sizes))
    return Several(arrays, sum(array.nbytes for array in arrays))


def joined(piece):
    return b"".join(views_of(piece))


@pytest.mark.parametrize("most", [1, 7, 100, 333, 2000])
def test_several_arrays_arrive_whole_and_in_order(most):
    piece = several([50, 1, 1, 500, 3, 0, 25, 1000])
    ours, theirs = socket.socketpair()
    with closing(Reluctant(fileno=ours.detach())) as sock, theirs:
        sock.most = most
        assert _sent(piece, sock, theirs) == joined(piece)


def test_more_than_the_kernel_holds_arrives_too():
    piece = several([30_000, 7] * 50)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert _sent(piece, ours, theirs) == joined(piece)


@pytest.mark.parametrize("start", [0, 1, 99, 100, 101, 150, 1199])
@pytest.mark.parametrize("length", [1, 100, 101, 1100])
def test_a_part_of_several_is_theirs_where_they_lie(start, length):
    piece = several([50, 25, 0, 525])
    length = min(length, piece.length - start)
    part = piece.part(start, length)
    assert joined(part) == joined(piece)[start : start + length]
    assert part.length == length
    lying = [byte_view(array) for array in piece.buffers]
    assert all(any(np.shares_memory(a, b) for b in lying) for a in part.buffers if a.nbytes)


def test_a_peer_that_takes_nothing_is_given_up():
    ours, theirs = socket.socketpair()
    piece = several([30_000] * 100)  # more than the kernel holds for whoever does not read
    with ours, theirs, pytest.raises(TransferTimeout, match="took nothing"):
        Sender(ours, 0.05).send_step(piece, 0)


def _sent(piece, sock, other):
    """What comes out at the other end."""
    received = []
    reading = threading.Thread(target=lambda: received.append(_all(other)))
    reading.start()
    sender, done = Sender(sock, 5.0), 0
    while done < piece.length:
        done += sender.send_step(piece, done)
    assert done == piece.length
    sock.shutdown(socket.SHUT_WR)
    reading.join()
    return received[0]


def _all(sock):
    found = b""
    while more := sock.recv(1 << 16):
        found += more
    return found


FAILS = """
import socket, sys
from weighlock.errors import SourceError
from weighlock.sources.local import FileSource
from weighlock.transfer.pieces import FilePart
from weighlock.transfer.sending import Sender
ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
theirs.connect(ours.getsockname())
connection, _ = ours.accept()
source = FileSource(sys.argv[1])
try:
    Sender(connection, 5.0).send_step(FilePart(source, 0, 1000), 0)
except SourceError as error:
    print(error.errno, error)
for each in (source, connection, theirs, ours):
    each.close()
"""


@needs_strace
def test_a_disk_that_fails_is_no_broken_connection(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    fault = ("strace", "-f", "-qq", "-o", os.devnull, "-e", "inject=sendfile:error=EIO")
    done = subprocess.run(
        [*fault, sys.executable, "-c", FAILS, path], capture_output=True, text=True, timeout=60
    )
    told = f"{errno.EIO} {path}: cannot be read from byte 0 on: Input/output error\n"
    assert done.stdout == told, done.stderr
