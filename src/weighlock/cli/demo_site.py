"""A site of the demo: a process of its own that receives messages, pulls, trains and pushes.

Messages come over its standard input, as they might over any channel; what it measured goes to its
standard output, a line of JSON for each.
"""

import json
import os
import resource
import sys
import time
from typing import BinaryIO

import weighlock
from weighlock.cli.demo_model import trained
from weighlock.errors import WeighlockError

__all__ = ["main", "peak_bytes", "receive", "send"]


def send(channel: BinaryIO, body: bytes) -> None:
    """A message into a pipe."""
    channel.write(len(body).to_bytes(8, "little") + body)
    channel.flush()


def receive(channel: BinaryIO) -> bytes | None:
    """The next message from a pipe; None at its end."""
    length = channel.read(8)
    return channel.read(int.from_bytes(length, "little")) if len(length) == 8 else None


def peak_bytes() -> int:
    """Most memory this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Serve messages until there are no more: `demo_site DIRECTORY HOST:PORT STEPS`."""
    directory, owner, steps = sys.argv[1:]
    access = weighlock.Access(allow=[owner])
    model: weighlock.Catalog | None = None
    while (body := receive(sys.stdin.buffer)) is not None:
        message = weighlock.unpack(body, access=access)
        task, before = message["task"], model
        pulled = _Meter()
        model = weighlock.resolve(
            task["model"],
            into=os.path.join(directory, f"round-{task['round']}"),
            base=before,
            progress=pulled.tell,
            durable=False,
        )
        assert model is not None  # noqa: S101
        pulled.stop()
        path = os.path.join(directory, f"trained-{task['round']}.safetensors")
        start = time.perf_counter()
        weighlock.save(path, trained(model, int(steps)), durable=False)
        training_s = time.perf_counter() - start
        with weighlock.open(path) as result:
            pushed = _Meter()
            weighlock.push(message["inbox"], result, progress=pushed.tell)
            pushed.stop()
        facts = {
            "message_bytes": len(body),
            "pulled_s": pulled.seconds,
            "pushed_bytes": pushed.bytes_done,
            "pushed_s": pushed.seconds,
            "training_s": training_s,
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(facts), flush=True)


class _Meter:
    """Bytes and seconds of one transfer."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds = 0.0
        self.bytes_done = 0

    def tell(self, done: int, total: int) -> None:
        self.bytes_done = done

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._start


if __name__ == "__main__":
    try:
        main()
    except (WeighlockError, OSError) as error:  # the server may be gone, or the disk full
        sys.exit(f"{os.path.basename(sys.argv[1])}: {error}")
