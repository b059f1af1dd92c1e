"""The other direction, and many at once: a push beside a fetch, eight receivers, slow ones."""

import os
from dataclasses import dataclass, field

from benchmarks.contender import Bar, Contender, Job, Workload
from benchmarks.owners import Owner, make_arrays
from benchmarks.receivers import Receivers
from benchmarks.workloads.transfer import Sizes, check, prepare, raw_to_disk

__all__ = ["ALL"]

_TENSOR_BYTES = 32 << 20


@dataclass
class _Prepared:
    job: Job
    owner: Owner
    count: int
    nbytes: int
    tensors: object = None
    receivers: list = field(default_factory=list)

    @property
    def pids(self):
        """The other side, whose CPU and memory count too."""
        return self.owner.pids

    @property
    def workers(self):
        """Who receives, where that are processes of their own."""
        return [pid for each in self.receivers for pid in each.pids]

    @property
    def url(self):
        address = self.owner.address
        if "url" not in address:
            return f"raw:{address['host']}:{address['port']}:{self.count}:{self.nbytes}"
        if "ref" in address:
            return f"nvflare:{address['ref']}:{address['url']}"
        return f"curl:{address['url']}" if "pids" in address else address["url"]


def _sizes(job, count):
    quick = job.model.hidden < 1000
    return (4, 1 << 18) if quick else (count, _TENSOR_BYTES)


def _prepare(kind, count, *, arrays=False, file=False, receivers=()):
    def prepare(job):
        import blake3  # noqa: F401

        import weighlock
        import weighlock.fetching.fetch
        import weighlock.fetching.push

        chosen, nbytes = _sizes(job, count)
        owner = Owner(kind, chosen, nbytes, job.directory)
        prepared = _Prepared(job, owner, chosen, nbytes)
        if arrays or file:
            prepared.tensors = _bf16(make_arrays(chosen, nbytes))
        if file:
            path = os.path.join(job.directory, "source.safetensors")
            weighlock.save(path, prepared.tensors, durable=False)
            prepared.tensors = weighlock.open(path)
        for each in receivers:
            prepared.receivers.append(Receivers(prepared.url, job.directory, **each))
        return prepared

    return prepare


def _bf16(arrays):
    import ml_dtypes

    return {name: array.view(ml_dtypes.bfloat16) for name, array in arrays.items()}


def _fetch(prepared):
    import weighlock

    path = os.path.join(prepared.job.directory, "out.safetensors")
    return weighlock.fetch(prepared.url, into=path, durable=False)


def _share_and_fetch(prepared):
    prepared.owner.go_on()
    return _fetch(prepared)


def _push(prepared):
    import weighlock

    weighlock.push(prepared.url, prepared.tensors)
    return weighlock.open(os.path.join(prepared.job.directory, "in", "a.safetensors"))


def _check(job, prepared, result):
    import numpy as np

    expected = make_arrays(prepared.count, prepared.nbytes)
    assert set(result) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(result[name].load().view("u2").reshape(-1), array), name


_PUSH = Workload(
    "push",
    "Push 1 GB in tensors of 32 MB to a file on tmpfs; its sender hashes within the time",
    (
        Contender(
            "raw sockets + BLAKE3 + pwrite, 4 connections",
            raw_to_disk,
            prepare("raw", Sizes(32, _TENSOR_BYTES)),
            check,
        ),
        Contender(
            "raw sockets + BLAKE3 at both ends + pwrite, 4 connections",
            raw_to_disk,
            prepare("raw-hashing", Sizes(32, _TENSOR_BYTES)),
            check,
        ),
        Contender("fetch to a file", _fetch, _prepare("weighlock", 32), _check),
        Contender(
            "share, then fetch to a file",
            _share_and_fetch,
            _prepare("weighlock-later", 32),
            _check,
        ),
        Contender("push from memory", _push, _prepare("inbox", 32, arrays=True), _check),
        Contender("push from a file", _push, _prepare("inbox", 32, file=True), _check),
    ),
    (
        Bar("push from memory", "fetch to a file", 0.9),
        Bar("push from memory", "share, then fetch to a file", 0.9),
    ),
    beside_bars={"push from memory": 64, "push from a file": 64},
    limits={"push from memory": "raw sockets + BLAKE3 at both ends + pwrite, 4 connections"},
)


def _one_by_one(prepared):
    (one,) = prepared.receivers
    for _ in range(8):
        one.begin()
        one.wait()


def _at_once(prepared):
    for each in prepared.receivers:
        each.begin()
    prepared.receivers[0].wait()  # the others are the slow ones


_EIGHT = Workload(
    "receivers-8",
    "Fetch 512 MB to files eight times: one after another, and by eight receivers at once",
    (
        Contender(
            "raw sockets + BLAKE3 + pwrite, eight at once",
            _at_once,
            _prepare("raw", 16, receivers=[{"count": 8}]),
        ),
        Contender(
            "NVFlare 2.9 download_tensors_to_disk, eight at once",
            _at_once,
            _prepare("nvflare-8", 16, receivers=[{"count": 8}]),
            needs=("nvflare", "torch"),
        ),
        Contender(
            "nginx + curl, eight at once",
            _at_once,
            _prepare("nginx", 16, receivers=[{"count": 8}]),
            programs=("nginx", "curl"),
        ),
        Contender("one by one", _one_by_one, _prepare("weighlock", 16, receivers=[{"count": 1}])),
        Contender("eight at once", _at_once, _prepare("weighlock", 16, receivers=[{"count": 8}])),
    ),
    (Bar("eight at once", "one by one", 0.8),),
    beside_bars={"eight at once": 64},
)

_FAST = {"count": 16, "connections": 1}
_SLOW = {"count": 16, "connections": 1, "rate": 1_000_000}

_HALF_SLOW = Workload(
    "receivers-32",
    "Fetch 64 MB by 16 receivers, alone and beside 16 that read at 1 MB/s",
    (
        Contender("16 alone", _at_once, _prepare("weighlock", 2, receivers=[_FAST])),
        Contender(
            "16 beside 16 slow ones", _at_once, _prepare("weighlock", 2, receivers=[_FAST, _SLOW])
        ),
    ),
    (Bar("16 beside 16 slow ones", "16 alone", 0.8),),
    beside_bars={"16 beside 16 slow ones": 64},
)

ALL = (_PUSH, _EIGHT, _HALF_SLOW)
