"""What rounds cost: to offer a model, and to pull one of which the last is already here."""

import os

from benchmarks.contender import Contender, Job, Workload
from benchmarks.owners import bf16, make_arrays
from benchmarks.threads import at_once
from benchmarks.workloads.transfer import LARGE, Lazily, check, fetch, prepare, raw_to_disk

__all__ = ["ALL"]

_CHANGED = 20
"""One tensor of so many is another in the new round: 5 %."""

_MOST_PULLED = 0.07
"""Of the bytes of the model, if 5 % of it changed."""

_BLOCK = 1 << 20


def _is_changed(number):
    return number % _CHANGED == _CHANGED - 1


def _with_base(kind):
    """The other side, and a file of the round before."""

    def begin(job: Job):
        import weighlock

        prepared = prepare(kind, LARGE)(job)
        arrays = make_arrays(prepared.sizes.count, prepared.sizes.nbytes)
        for number, array in enumerate(arrays.values()):
            if _is_changed(number):
                array ^= 1
        path = os.path.join(job.directory, "before.safetensors")
        weighlock.save(path, bf16(arrays), durable=False)
        prepared.base = path
        return prepared

    return begin


def _limit(prepared):
    """Copy the file of the round before in the kernel, and receive over it what is another."""
    from blake3 import blake3

    source = os.open(prepared.base, os.O_RDONLY)
    size = prepared.sizes.nbytes
    start = os.fstat(source).st_size - prepared.sizes.total
    target = os.open(prepared.path, os.O_RDWR | os.O_CREAT)
    done = 0
    while done < prepared.sizes.total:
        done += os.copy_file_range(source, target, prepared.sizes.total - done, start + done, done)
    os.close(source)
    for number in filter(_is_changed, range(prepared.sizes.count)):
        _receive(prepared.owner.address, number * size, size, target, blake3)
    return Lazily(target, size // 2, prepared.sizes.count)


def _receive(address, start, length, fd, blake3):
    import socket

    with socket.create_connection((address["host"], address["port"])) as sock:
        sock.sendall(start.to_bytes(8, "little") + length.to_bytes(8, "little"))
        buffer = memoryview(bytearray(min(length, _BLOCK)))
        for offset in range(start, start + length, len(buffer)):
            view, done = buffer[: start + length - offset], 0
            while done < len(view):
                got = sock.recv_into(view[done:])
                if not got:
                    raise ConnectionError
                done += got
            blake3(view).digest()
            os.pwrite(fd, view, offset)


def _second(prepared):
    return fetch(prepared, into=prepared.path, base=prepared.base, on_pulled=prepared.pulled.append)


def _check_second(job, prepared, result):
    check(job, prepared, result)
    changed = sum(map(_is_changed, range(prepared.sizes.count))) / prepared.sizes.count
    most = max(_MOST_PULLED, changed + 0.02) * prepared.sizes.total + 2 * _BLOCK
    assert sum(prepared.pulled) <= most, f"{sum(prepared.pulled):,} bytes travelled"


def _in_memory(job: Job):
    import blake3  # noqa: F401

    import weighlock.sharing.server

    sizes = LARGE.of(job)
    return weighlock.Server(), bf16(make_arrays(sizes.count, sizes.nbytes))


def _hash(prepared):
    """Every block of 1 MiB, on two threads."""
    from blake3 import blake3

    views = [memoryview(array.view("u1")) for array in prepared[1].values()]

    def work(mine):
        for view in mine:
            for start in range(0, len(view), _BLOCK):
                blake3(view[start : start + _BLOCK]).digest()

    at_once(work, (views[::2], views[1::2]))


def _share(prepared):
    server, tensors = prepared
    return server.share(tensors)


def _check_share(job, prepared, share):
    assert share.size > sum(array.nbytes for array in prepared[1].values())
    share.revoke()


_SHARE = Workload(
    "share",
    "Offer 2 GB in memory: what its owner hashes before anybody pulls",
    (
        Contender("limit: BLAKE3 of every block, 2 threads", _hash, _in_memory),
        Contender("weighlock, server.share", _share, _in_memory, _check_share),
    ),
    memory_bars={"weighlock, server.share": 64},
    cpu_bars={"weighlock, server.share": 0.25 * LARGE.total / 1e9},
    limits={"weighlock, server.share": "limit: BLAKE3 of every block, 2 threads"},
)

_SECOND = Workload(
    "second-round",
    "Fetch 2 GB to a file on tmpfs, of which 5 % changed since the round before",
    (
        Contender(
            "limit: copy_file_range, raw sockets + BLAKE3 for what changed",
            _limit,
            _with_base("raw"),
            check,
        ),
        Contender(
            "raw sockets + BLAKE3 + pwrite, all of it", raw_to_disk, prepare("raw", LARGE), check
        ),
        Contender(
            "weighlock, all of it",
            lambda prepared: fetch(prepared, into=prepared.path),
            prepare("weighlock", LARGE),
            check,
        ),
        Contender("weighlock, base=", _second, _with_base("weighlock"), _check_second),
    ),
    memory_bars={"weighlock, base=": 64},
    beside_bars={"weighlock, base=": 64},
)

ALL = (_SHARE, _SECOND)
