"""A long line in one machine: so much later each way, and no faster than so many bytes a second.

Two kinds. As root on Linux: a network namespace at the far end of two TUN devices, between which a
process carries packets, so that the kernel's own TCP meets the delay. Elsewhere a proxy that passes
bytes on late: requests and replies take as long, but either leg of TCP sees a short way.

    python -m benchmarks.line tun PID       carries packets to the namespace of that process
    python -m benchmarks.line proxy PORT    passes on to that port of this machine

Namespace and devices belong to the processes here, and are gone when these have ended.
"""

import contextlib
import fcntl
import functools
import ipaddress
import json
import os
import queue
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from urllib.parse import urlsplit

__all__ = ["DELAY_S", "RATE", "Far", "described", "reaches_kernel"]

DELAY_S = 0.025
"""Each way."""
RATE = 100_000_000
"""Bytes a second, each way."""
_ROOM_BYTES = 5_000_000
"""What may wait for its turn, as in a router that holds one round trip of the line's rate."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04
"""Checksums and segments are left to whoever comes last: several packets pass at once."""
_PACKET_BYTES = 10 + 65_535


class Line:
    """One direction. Pure: the clock is the caller's."""

    def __init__(self, rate=RATE, delay_s=DELAY_S, room_bytes=_ROOM_BYTES):
        self._rate, self._delay_s, self._room_s = rate, delay_s, room_bytes / rate
        self._free_at = 0.0

    def due(self, now, count):
        """When so many bytes that come now are at the other end; None if there is no room."""
        if self._free_at - now > self._room_s:
            return None
        self._free_at = max(self._free_at, now) + count / self._rate
        return self._free_at + self._delay_s


@functools.cache
def reaches_kernel():
    """Whether a namespace and TUN devices can be had here."""
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    try:
        os.close(_device("wl-probe"))
        subprocess.run(["unshare", "--net", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def described():
    """What the line is, for a report."""
    what = f"{2000 * DELAY_S:.0f} ms there and back, {RATE / 1e6:.0f} MB/s each way"
    if not reaches_kernel():
        return f"Path: a proxy in this machine ({what}); TCP itself sees no delay."
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        return (
            f"Path: two network namespaces joined by a line ({what}) that carries the kernel's "
            f"own TCP ({file.read().strip()}, in pieces of up to 64 KB)."
        )


def _addresses(number):
    """Of both ends of a line; set aside for measuring devices (RFC 2544), four for each."""
    first = int(ipaddress.ip_address("198.18.0.0")) + 4 * (number % 32768)
    return [str(ipaddress.ip_address(first + end)) for end in (1, 2)]


class Far:
    """The far end: where owners run, and how they are reached. Ends with its process."""

    def __init__(self):
        self._ends = []
        self.prefix, self.host = [], "127.0.0.1"
        if not reaches_kernel():
            return
        holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        holder.stdin.write(b"there\n")
        holder.stdin.flush()
        holder.stdout.readline()  # it has its namespace, and holds it until its input ends
        self.prefix = ["nsenter", "--net", f"--target={holder.pid}"]
        self.host = _addresses(holder.pid)[1]
        self._ends = [holder, _started("tun", holder.pid)[0]]

    def reached(self, address):
        """The address of an owner there, as it is seen from here."""
        if self.prefix:
            return address
        url = urlsplit(address.get("url", ""))
        end, told = _started("proxy", url.port or address["port"])
        self._ends.append(end)
        near = {"port": told["port"]}
        if url.port:
            near["url"] = url._replace(netloc=f"127.0.0.1:{told['port']}").geturl()
        return {**address, **near}


def _started(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.line", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    return process, json.loads(process.stdout.readline())


def _device(name):
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _carry(near, far):
    """Packets of either device to the other, each when it is due."""
    ways = {near: (far, Line(), deque()), far: (near, Line(), deque())}
    packet = bytearray(_PACKET_BYTES)
    while True:
        now = time.monotonic()
        for target, _, waiting in ways.values():
            while waiting and waiting[0][0] <= now:
                with contextlib.suppress(OSError):  # a device that takes nothing loses packets
                    os.write(target, waiting.popleft()[1])
        nexts = [waiting[0][0] - now for _, _, waiting in ways.values() if waiting]
        readable, _, _ = select.select(list(ways), [], [], max(0.0, min(nexts, default=1.0)))
        now = time.monotonic()
        for fd in readable:
            _, line, waiting = ways[fd]
            with contextlib.suppress(BlockingIOError):
                for _ in range(32):
                    count = os.readv(fd, [packet])
                    due = line.due(now, count)
                    if due is not None:
                        waiting.append((due, bytes(memoryview(packet)[:count])))


def _tun(pid):
    names = f"wl-near{os.getpid()}"[:15], f"wl-far{os.getpid()}"[:15]
    near, far = map(_device, names)
    there = ["nsenter", "--net", f"--target={pid}"]
    here_address, there_address = _addresses(int(pid))
    for command in (
        ["ip", "addr", "add", f"{here_address}/30", "dev", names[0]],
        ["ip", "link", "set", names[0], "up"],
        ["ip", "link", "set", names[1], "netns", pid],
        [*there, "ip", "addr", "add", f"{there_address}/30", "dev", names[1]],
        [*there, "ip", "link", "set", names[1], "up"],
        [*there, "ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    threading.Thread(target=_carry, args=(near, far), daemon=True).start()
    return {}


def _proxy(port):
    listener = socket.create_server(("127.0.0.1", 0))
    up, down = Line(), Line()
    lock = threading.Lock()

    def read(source, line, passed):
        while True:
            data = source.recv(65536)
            with lock:
                due = line.due(time.monotonic(), len(data))
            while due is None:  # a stream loses nothing: it waits
                time.sleep(0.001)
                with lock:
                    due = line.due(time.monotonic(), len(data))
            passed.put((due, data))
            if not data:
                return

    def write(target, passed):
        while True:
            due, data = passed.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)

    def accept():
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for source, target, line in ((near, far, up), (far, near, down)):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                passed = queue.Queue(_ROOM_BYTES // 65536)
                for work, given in ((read, (source, line, passed)), (write, (target, passed))):
                    threading.Thread(target=_quietly, args=(work, given), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return {"port": listener.getsockname()[1]}


def _quietly(work, given):
    with contextlib.suppress(OSError):  # a connection that is over
        work(*given)


def main():
    kind, given = sys.argv[1:]
    print(json.dumps(_tun(given) if kind == "tun" else _proxy(int(given))), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
