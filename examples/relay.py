"""A server sends a message to a worker through a relay, over plain sockets; the weights do not.

Three processes. The relay unpacks the message, adds its own small note and a tensor of its own, and
packs it again: refs it does not touch travel on unchanged, so its memory stays flat however large
the model is. The worker pulls the weights straight from the server, and the relay's tensor from the
relay.

    python examples/relay.py [MEGABYTES]
"""

import multiprocessing
import resource
import socket
import sys

import numpy as np

import weighlock

LOCAL = weighlock.Access(allow=["127.0.0.1"])  # whom refs of messages may dial here


def send(sock, parts):
    """Length, then the buffers as they are: tensors that ride along are not copied."""
    sock.sendall(sum(memoryview(part).nbytes for part in parts).to_bytes(8, "little"))
    for part in parts:
        sock.sendall(part)


def receive(sock):
    """What `send` sent."""
    length = int.from_bytes(exactly(sock, 8), "little")
    return exactly(sock, length)


def exactly(sock, count):
    """So many bytes."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the other side is gone")
        view = view[got:]
    return data


def peak_mb():
    """The most memory this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024  # of bytes or of KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def serve(sock, megabytes):
    """The owner of the model: offers it, and waits until the worker has it."""
    rng = np.random.default_rng(0)
    weights = {f"layer.{n}": rng.random((megabytes // 4, 131_072)) for n in range(4)}
    with weighlock.Server() as server:
        packed = server.pack({"round": 3, "weights": weights}, receivers=["worker"])
        print(f"server: {megabytes} MB of weights, a message of {len(packed.body):,} bytes")
        send(sock, packed.parts)
        outcome = packed.share.wait(timeout_s=60)
        print(f"server: worker has {outcome.receivers['worker'].state}")


def relay(upstream, downstream):
    """Passes the message on, with something of its own; touches no weights."""
    before = peak_mb()
    message = weighlock.unpack(receive(upstream))
    message["note"] = "by the relay"
    message["mask"] = np.ones(1_000_000, np.uint8)
    with weighlock.Server() as server:
        packed = server.pack(message)
        send(downstream, packed.parts)
        receive(downstream)  # the worker is done
    print(f"relay: peak memory {peak_mb():.0f} MB, {peak_mb() - before:.0f} MB more than at start")


def work(sock):
    """Decides when, what and where to fetch."""
    message = weighlock.unpack(receive(sock), access=LOCAL)
    first = message["weights"]["layer.0"][0, :3]  # three numbers: only their block travels
    message = weighlock.resolve(message)
    total = sum(array.nbytes for array in message["weights"].values())
    print(f"worker: {total / 2**20:.0f} MB here, starting with {first.round(3).tolist()},")
    print(f"worker: round {message['round']}, {message['note']}, mask of {message['mask'].sum():,}")
    send(sock, [b"done"])


def main():
    """Three processes and two pairs of sockets."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    server_end, relay_up = socket.socketpair()
    relay_down, worker_end = socket.socketpair()
    spawn = multiprocessing.get_context("spawn")  # each starts with nothing of the others' memory
    processes = [
        spawn.Process(target=serve, args=(server_end, megabytes)),
        spawn.Process(target=relay, args=(relay_up, relay_down)),
        spawn.Process(target=work, args=(worker_end,)),
    ]
    for process in processes:
        process.start()
    for end in (server_end, relay_up, relay_down, worker_end):
        end.close()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
