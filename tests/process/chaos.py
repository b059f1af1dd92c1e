"""A proxy that spoils what passes it: by byte, by connection, by reply. Never by chance.

`Chaos` is one thread with one event loop, and has as many proxies as a test asks for. Each has
rules for either direction, the same for all connections or told by the number of the connection.
"""

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Rules:
    """What happens to one direction of one connection. Bytes are counted from its start."""

    latency_s: float = 0.0
    """Every piece comes so much later."""
    bytes_per_s: float | None = None
    slice_bytes: int = _CHUNK_BYTES
    """Passed on at a time."""
    drop: bool = False
    """Everything is swallowed."""
    cut: int | None = None
    """After so many bytes the connection is closed on both sides, in order."""
    reset: int | None = None
    """After so many bytes it is reset on both sides."""
    hang: int | None = None
    """After so many bytes nothing more passes, until `Proxy.release`."""
    trickle: int | None = None
    """After so many bytes one more comes now and then: twenty in a second."""
    corrupt: int | None = None
    """This byte is changed."""
    mask: int = 1
    """How it is changed."""
    repeats: bool = False
    """So is every byte at a multiple of it."""

    @property
    def ends_at(self) -> int | None:
        """The byte before which something stops."""
        found = [at for at in (self.cut, self.reset, self.hang) if at is not None]
        return min(found, default=None)


ORDERLY = Rules()


@dataclass
class Passed:
    """What one connection has passed on."""

    up: int = 0
    down: int = 0


@dataclass
class Proxy:
    """One way to one upstream. What a test sets counts for connections made afterwards."""

    port: int
    upstream: tuple[str, int]
    up: Rules | Callable[[int], Rules] = ORDERLY
    down: Rules | Callable[[int], Rules] = ORDERLY
    hold_replies: frozenset[int] = frozenset()
    """Numbers of replies, over all connections, that stay in the proxy; so does all after them."""
    drop_replies: frozenset[int] = frozenset()
    """Numbers of replies that are swallowed; their connection is closed then."""
    duplicate: str = ""
    """"swallow": each request is sent twice and its second reply swallowed; "pass": not even."""
    spoiled: bytes | None = None
    """The reply to the first request that holds this is lost, or held if `spoils_by` says so."""
    spoils_by: str = "lose"
    has_spoiled: bool = False
    receive_bytes: int | None = None
    """Size of the receive buffer towards the upstream: how much the kernel takes ahead."""
    passed: list[Passed] = field(default_factory=list)
    """By connection, in the order in which they came."""
    replies: int = 0
    """Replies seen so far, if replies are looked at."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    severed: bool = False
    loop: asyncio.AbstractEventLoop | None = None

    def of(self, url: str) -> str:
        """The same URL by way of this proxy."""
        return urlsplit(url)._replace(netloc=f"127.0.0.1:{self.port}").geturl()

    @property
    def down_bytes(self) -> int:
        """Bytes of replies that came through, over all connections."""
        return sum(passed.down for passed in self.passed)

    def release(self) -> None:
        """What hangs goes on."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.released.set)

    def sever(self) -> None:
        """What hangs is cut, with all that is still on its way."""
        self.severed = True
        self.release()

    @property
    def looks_at_frames(self) -> bool:
        return bool(self.hold_replies or self.drop_replies or self.duplicate or self.spoiled)


class Chaos:
    """The thread of the proxies; as a context manager it ends with all of them."""

    def __enter__(self) -> "Chaos":
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos")
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def proxy(self, url: str, **how) -> Proxy:
        """A proxy before the server of a URL."""
        parts = urlsplit(url)
        proxy = Proxy(0, (parts.hostname, parts.port), loop=self._loop, **how)
        self._call(self._listen(proxy))
        return proxy

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self, proxy: Proxy) -> None:
        server = await asyncio.start_server(
            lambda reader, writer: self._connected(proxy, reader, writer),
            "127.0.0.1",
            0,
            limit=_CHUNK_BYTES,
        )
        proxy.port = server.sockets[0].getsockname()[1]
        self._servers.append(server)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # some still have bytes that nobody takes
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    async def _connected(self, proxy, reader, writer) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        passage = _Passage(proxy, reader, writer)
        try:
            await passage.run()
        except asyncio.CancelledError:
            pass  # the end of the test; start_server would complain of a cancelled task
        finally:
            self._tasks.discard(task)
            self._writers += passage.writers


class _Passage:
    """One connection through a proxy."""

    def __init__(self, proxy: Proxy, reader, writer) -> None:
        self._proxy = proxy
        self._client = reader, writer
        self._passed = Passed()
        self._spoils = False
        self.writers = [writer]
        number = len(proxy.passed)
        proxy.passed.append(self._passed)
        self._up = proxy.up(number) if callable(proxy.up) else proxy.up
        self._down = proxy.down(number) if callable(proxy.down) else proxy.down

    async def run(self) -> None:
        reader, writer = self._client
        pumps: list[asyncio.Task] = []
        try:
            upstream, to_upstream = await self._dial()
            self.writers.append(to_upstream)
            framed = self._proxy.looks_at_frames
            pumps = [
                asyncio.create_task(self._pump(source, target, rules, way))
                for source, target, rules, way in (
                    (self._requests(reader) if framed else _raw(reader), to_upstream, self._up, 0),
                    (self._replies(upstream) if framed else _raw(upstream), writer, self._down, 1),
                )
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # nobody listens there
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in self.writers:
                each.close()

    async def _dial(self):
        sock = socket.socket()
        try:
            if self._proxy.receive_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._proxy.receive_bytes)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, self._proxy.upstream)
            return await asyncio.open_connection(sock=sock, limit=_CHUNK_BYTES)
        except BaseException:
            sock.close()
            raise

    async def _pump(self, source: AsyncIterator[bytes], target, rules: Rules, way: int) -> None:
        done = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if rules.ends_at == 0:
                await self._stop(rules)
            async for chunk in source:
                if rules.drop:
                    continue
                while chunk:
                    length = min(len(chunk), rules.slice_bytes)
                    if rules.ends_at is not None and done < rules.ends_at:
                        length = min(length, rules.ends_at - done)
                    if rules.trickle is not None:
                        length = min(length, max(1, rules.trickle - done))
                        await asyncio.sleep(0.05 if done >= rules.trickle else 0)
                    if rules.latency_s:
                        await asyncio.sleep(rules.latency_s)
                    piece, chunk = _corrupted(chunk[:length], done, rules), chunk[length:]
                    done += length
                    if way:  # counted before: who has the last byte may look at once
                        self._passed.down = done
                    else:
                        self._passed.up = done
                    target.write(piece)
                    await target.drain()
                    if rules.bytes_per_s is not None:
                        await asyncio.sleep(length / rules.bytes_per_s)
                    if done == rules.ends_at:
                        await self._stop(rules)

    async def _stop(self, rules: Rules) -> None:
        """What the rules have for this byte; goes on only if it was a pause."""
        if rules.hang is not None:
            await self._proxy.released.wait()
            if not self._proxy.severed:
                return
        if rules.reset is not None or self._proxy.severed:
            for writer in self.writers:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
        raise ConnectionError("cut")

    async def _requests(self, reader) -> AsyncIterator[bytes]:
        while True:
            frame = await _frame(reader)
            if self._proxy.spoiled is not None and self._proxy.spoiled in frame:
                self._spoils = not self._proxy.has_spoiled
            yield frame
            if self._proxy.duplicate:
                yield frame

    async def _replies(self, reader) -> AsyncIterator[bytes]:
        proxy = self._proxy
        while True:
            frame = await _frame(reader)
            number = proxy.replies
            proxy.replies += 1
            if self._spoils:
                self._spoils, proxy.has_spoiled = False, True
                if proxy.spoils_by == "lose":
                    raise ConnectionError("the reply was lost")
                await proxy.released.wait()
            if number in proxy.drop_replies:
                raise ConnectionError("the reply was lost")
            if number in proxy.hold_replies:
                await proxy.released.wait()
                if proxy.severed:
                    raise ConnectionError("the reply was lost")
            yield frame
            if proxy.duplicate == "swallow":
                await _frame(reader)


async def _raw(reader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(_CHUNK_BYTES):
        yield chunk


async def _frame(reader) -> bytes:
    """A whole request or reply: its head, and the body its length announces."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    return head + await reader.readexactly(int(found[1]) if found else 0)


def _corrupted(piece: bytes, start: int, rules: Rules) -> bytes:
    if rules.corrupt is None:
        return piece
    first = rules.corrupt
    if rules.repeats and start > first:
        first = -(-start // rules.corrupt) * rules.corrupt
    hit = range(first, start + len(piece), rules.corrupt or 1) if rules.repeats else [first]
    spoiled = bytearray(piece)
    for at in hit:
        if start <= at < start + len(piece):
            spoiled[at - start] ^= rules.mask
    return bytes(spoiled)
