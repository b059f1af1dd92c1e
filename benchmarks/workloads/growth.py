"""How cost grows: with the size of a model, its tensors, its receivers, its contributors.

Three repeats of each say enough: what is looked for is a curve that is flat in memory and straight
in time. The pictures are drawn from these tables.
"""

import json
import os
import threading

from benchmarks.contender import Contender, Job, Workload
from benchmarks.owners import Owner

__all__ = ["ALL"]

_MB = 1_000_000
_TENSOR_BYTES = 8 << 20


def _is_quick(job: Job):
    return job.model.hidden < 1000


def _file(job: Job, name, nbytes, count):
    """A file of equal tensors of bf16, made once."""
    import numpy as np

    path = os.path.join(os.path.dirname(job.source), f"{name}.safetensors")
    if os.path.exists(path):
        return path
    each = nbytes // count // 2 * 2
    header, offset = {}, 0
    for number in range(count):
        entry = {"dtype": "BF16", "shape": [each // 2], "data_offsets": [offset, offset + each]}
        header[f"layers.{number}.weight"] = entry
        offset += each
    text = json.dumps(header).encode()
    bits = np.random.default_rng(3).integers(0x3C00, 0x3FFF, 4 << 20, dtype=np.uint16)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            offset -= file.write(memoryview(bits.view("u1"))[: min(offset, bits.nbytes)])
    return path


def _sized(megabytes, count=None):
    """A file of that size, in so many tensors or in ones of 8 MiB."""

    def prepare(job: Job):
        import weighlock.combining.mean
        import weighlock.fetching.fetch
        import weighlock.formats.save  # noqa: F401

        nbytes = megabytes * (_MB // 100 if _is_quick(job) else _MB)
        tensors = count or max(1, nbytes // _TENSOR_BYTES)
        return job, _file(job, f"{megabytes}-in-{tensors}", nbytes, tensors)

    return prepare


def _copied(prepared):
    import weighlock

    job, path = prepared
    with weighlock.open(path) as catalog:
        weighlock.save(os.path.join(job.directory, "out"), catalog.rename(str), durable=False)


def _averaged(prepared):
    import weighlock

    job, path = prepared
    out = os.path.join(job.directory, "out")
    weighlock.mean([path, path, path], [1, 2, 3], out, durable=False).close()


class _Served:
    """A file that another process serves."""

    def __init__(self, job, path):
        self.job = job
        self.owner = Owner("weighlock-file", 0, 0, path)

    @property
    def pids(self):
        return [self.owner.pid]


def _served(megabytes, count=None):
    def prepare(job: Job):
        return _Served(*_sized(megabytes, count)(job))

    return prepare


def _fetched(prepared):
    import weighlock

    out = os.path.join(prepared.job.directory, "out")
    weighlock.fetch(prepared.owner.address["url"], into=out, durable=False).close()


def _by_many(receivers):
    def run(prepared):
        import weighlock

        def receive(number):
            out = os.path.join(prepared.job.directory, f"out-{number}")
            weighlock.fetch(prepared.owner.address["url"], into=out, durable=False).close()
            os.unlink(out)

        threads = [threading.Thread(target=receive, args=(n,)) for n in range(receivers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def _opened(prepared):
    import weighlock

    with weighlock.open(prepared[1]) as catalog:
        return len(list(catalog.values()))


def _contributors(count):
    def prepare(job: Job):
        job, path = _sized(_EACH)(job)
        return job, path, count

    return prepare


def _averaged_many(prepared):
    import weighlock

    job, path, count = prepared
    out = os.path.join(job.directory, "out")
    weighlock.mean([path] * count, list(range(1, count + 1)), out, durable=False).close()


_SIZES = (250, 500, 1000, 2000, 4000)
_COUNTS = (100, 1000, 10_000, 100_000)
_RECEIVERS = (1, 2, 4, 8, 16, 32)
_CONTRIBUTORS = (2, 4, 8, 16, 32, 64)
_EACH = 64
"""Megabytes of each receiver, or contributor."""

ALL = (
    Workload(
        "growth-size",
        "Growth with the size of a model",
        tuple(
            contender
            for size in _SIZES
            for contender in (
                Contender(f"convert, {size} MB", _copied, _sized(size), nbytes=size * _MB),
                Contender(f"fetch to disk, {size} MB", _fetched, _served(size), nbytes=size * _MB),
                Contender(
                    f"mean of three, {size} MB", _averaged, _sized(size), nbytes=3 * size * _MB
                ),
            )
        ),
        memory_bars={f"fetch to disk, {_SIZES[-1]} MB": 64, f"mean of three, {_SIZES[-1]} MB": 128},
        beside_bars={f"fetch to disk, {_SIZES[-1]} MB": 64},
        is_curve=True,
    ),
    Workload(
        "growth-tensors",
        "Growth with the number of tensors: 1 GB in all",
        tuple(
            contender
            for count in _COUNTS
            for contender in (
                Contender(
                    f"open, {count:,} tensors", _opened, _sized(1000, count), nbytes=1000 * _MB
                ),
                Contender(
                    f"convert, {count:,} tensors", _copied, _sized(1000, count), nbytes=1000 * _MB
                ),
                Contender(
                    f"fetch to disk, {count:,} tensors",
                    _fetched,
                    _served(1000, count),
                    nbytes=1000 * _MB,
                ),
            )
        ),
        is_curve=True,
    ),
    Workload(
        "growth-receivers",
        f"Growth with the number of receivers: {_EACH} MB to each",
        tuple(
            Contender(
                f"fetch to disk, {count} receivers",
                _by_many(count),
                _served(_EACH),
                nbytes=count * _EACH * _MB,
            )
            for count in _RECEIVERS
        ),
        beside_bars={f"fetch to disk, {_RECEIVERS[-1]} receivers": 64},
        is_curve=True,
    ),
    Workload(
        "growth-contributors",
        f"Growth with the number of contributors: {_EACH} MB of each",
        tuple(
            Contender(
                f"mean, {count} contributors",
                _averaged_many,
                _contributors(count),
                nbytes=count * _EACH * _MB,
            )
            for count in _CONTRIBUTORS
        ),
        memory_bars={f"mean, {_CONTRIBUTORS[-1]} contributors": 128},
        is_curve=True,
    ),
)
