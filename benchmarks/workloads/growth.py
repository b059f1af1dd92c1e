"""How cost grows: with the size of a model, its tensors, its receivers, its contributors.

One repeat of each says enough: what is looked for is a curve that is flat in memory and straight in
time. The pictures are drawn from these tables.
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


def _sized(megabytes):
    def prepare(job: Job):
        import weighlock.combining.mean
        import weighlock.fetching.fetch
        import weighlock.formats.save  # noqa: F401

        nbytes = megabytes * (_MB // 100 if _is_quick(job) else _MB)
        path = _file(job, f"size-{megabytes}", nbytes, max(1, nbytes // _TENSOR_BYTES))
        return job, path

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


def _served(megabytes):
    def prepare(job: Job):
        return _Served(*_sized(megabytes)(job))

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


def _many(count):
    def prepare(job: Job):
        import weighlock.formats.detect  # noqa: F401

        count_here = count // 10 if _is_quick(job) else count
        return _file(job, f"tensors-{count}", count_here * 1024, count_here)

    return prepare


def _opened(path):
    import weighlock

    with weighlock.open(path) as catalog:
        return len(list(catalog.values()))


def _contributors(count):
    def prepare(job: Job):
        job, path = _sized(64)(job)
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

ALL = (
    Workload(
        "growth-size",
        "Growth with the size of a model",
        tuple(
            contender
            for size in _SIZES
            for contender in (
                Contender(f"convert, {size} MB", _copied, _sized(size)),
                Contender(f"fetch to disk, {size} MB", _fetched, _served(size)),
                Contender(f"mean of three, {size} MB", _averaged, _sized(size)),
            )
        ),
        memory_bars={f"fetch to disk, {_SIZES[-1]} MB": 64, f"mean of three, {_SIZES[-1]} MB": 128},
        beside_bars={f"fetch to disk, {_SIZES[-1]} MB": 64},
        is_curve=True,
    ),
    Workload(
        "growth-tensors",
        "Growth with the number of tensors",
        tuple(Contender(f"open, {count:,} tensors", _opened, _many(count)) for count in _COUNTS),
        is_curve=True,
    ),
    Workload(
        "growth-receivers",
        "Growth with the number of receivers",
        tuple(
            Contender(f"64 MB each to {count} receivers", _by_many(count), _served(64))
            for count in _RECEIVERS
        ),
        beside_bars={f"64 MB each to {_RECEIVERS[-1]} receivers": 64},
        is_curve=True,
    ),
    Workload(
        "growth-contributors",
        "Growth with the number of contributors",
        tuple(
            Contender(f"mean of {count} of 64 MB", _averaged_many, _contributors(count))
            for count in _CONTRIBUTORS
        ),
        memory_bars={f"mean of {_CONTRIBUTORS[-1]} of 64 MB": 128},
        is_curve=True,
    ),
)
