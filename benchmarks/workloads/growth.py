"""How cost grows: with the size of a model, its tensors, its receivers, its contributors.

Three repeats of each say enough: what is looked for is a curve that is flat in memory and straight
in time. The pictures are drawn from these tables.
"""

import json
import os

from benchmarks.contender import Contender, Job, Workload
from benchmarks.owners import Owner
from benchmarks.threads import at_once
from benchmarks.workloads.mean import read_and_write

__all__ = ["ALL"]

_MB = 1_000_000
_TENSOR_BYTES = 8 << 20
_APART = 64 << 10


def _is_quick(job: Job):
    return job.model.hidden < 1000


def _file(job: Job, name, nbytes, count, seed=3):
    """A file of equal tensors of bf16, made once."""
    import numpy as np

    path = os.path.join(job.kept, f"{name}-{seed}.safetensors")
    if os.path.exists(path):
        return path
    each = nbytes // count // 2 * 2
    header, offset = {}, 0
    for number in range(count):
        entry = {"dtype": "BF16", "shape": [each // 2], "data_offsets": [offset, offset + each]}
        header[f"layers.{number}.weight"] = entry
        offset += each
    text = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    bits = rng.integers(0x3C00, 0x3FFF, (_TENSOR_BYTES + _APART) // 2, dtype=np.uint16)
    first = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            piece = memoryview(bits.view("u1"))[first : first + min(offset, _TENSOR_BYTES)]
            offset -= file.write(piece)
            first = (first + 64) % _APART  # no tensor is another again
    return path


def _sized(megabytes, count=None, files=1):
    """Files of that size, in so many tensors or in ones of 8 MiB."""

    def prepare(job: Job):
        import weighlock.combining.mean
        import weighlock.fetching.fetch
        import weighlock.formats.save  # noqa: F401

        nbytes = megabytes * (_MB // 100 if _is_quick(job) else _MB)
        tensors = count or max(1, nbytes // _TENSOR_BYTES)
        name = f"{megabytes}-in-{tensors}"
        return job, *(_file(job, name, nbytes, tensors, seed) for seed in range(3, 3 + files))

    return prepare


def _out(job: Job):
    return os.path.join(job.directory, "out")


def _data_of(path):
    """The bytes of a file's tensors, mapped."""
    import numpy as np

    file = np.memmap(path, np.uint8, "r")
    return file[8 + int(file[:8].view("<u8")[0]) :]


def _check_copy(job, prepared, result):
    """Names come in the order they had, and so do tensors."""
    import numpy as np

    path = prepared.path if isinstance(prepared, _Served) else prepared[1]
    assert np.array_equal(_data_of(path), _data_of(_out(job)))


def _check_mean(job, prepared, result):
    """Against float64, a piece of the midst."""
    first = _data_of(_out(job)).size // 4 * 2
    _check_piece(_out(job), [(path, first) for path in prepared[1:]], first)


def _check_mean_of_turned(job, prepared, result):
    _, path = prepared
    import weighlock

    with weighlock.open(path) as catalog:
        count, each = len(catalog), next(iter(catalog.values())).nbytes
    tensor = count // 2
    rows = [(path, (tensor + turn) % count * each) for turn in range(_TURNS)]
    _check_piece(_out(job), rows, tensor * each)


def _check_piece(out, rows, first):
    """Compare what lies from a byte on with the mean of what lies where rows say."""
    import numpy as np

    def floats(path, start):
        bits = np.ascontiguousarray(_data_of(path)[start : start + 100_000]).view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    weights = _weights(len(rows))
    total = sum(w * floats(*row) for w, row in zip(weights, rows, strict=True))
    expected = total / sum(weights)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 7)
    assert (np.abs(floats(out, first) - expected) <= 0.51 * ulp).all()


def _copied(prepared):
    import weighlock

    job, path = prepared
    with weighlock.open(path) as catalog:
        weighlock.save(_out(job), catalog.rename(str), durable=False)


def _weights(count):
    return range(1, count + 1)


def _averaged(prepared):
    import weighlock

    job, *paths = prepared
    weighlock.mean(paths, _weights(len(paths)), _out(job), durable=False).close()


def _averaged_turned(prepared):
    """Three contributors of one file, each with its tensors under the names of their neighbours.

    Three files of the largest size would leave no memory; so no byte is read twice in a row either.
    """
    import weighlock

    job, path = prepared
    with weighlock.open(path) as catalog:
        given = [_turned(catalog, turn) for turn in range(_TURNS)]
        weighlock.mean(given, _weights(_TURNS), _out(job), durable=False).close()


def _turned(catalog, turn):
    names = list(catalog)
    return catalog.rename({name: names[(n - turn) % len(names)] for n, name in enumerate(names)})


def _limit(prepared):
    """The same files read by two threads, and one written; nothing is done to the bytes."""
    job, *paths = prepared
    read_and_write(paths, _out(job), workers=2)


class _Served:
    """A file that another process serves."""

    def __init__(self, job, path):
        self.job = job
        self.path = path
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

    url = prepared.owner.address["url"]
    weighlock.fetch(url, into=_out(prepared.job), durable=False).close()


def _by_many(receivers):
    def run(prepared):
        import weighlock

        def receive(number):
            out = os.path.join(prepared.job.directory, f"out-{number}")
            weighlock.fetch(prepared.owner.address["url"], into=out, durable=False).close()
            assert os.path.getsize(out) >= _data_of(prepared.path).size
            os.unlink(out)

        at_once(receive, range(receivers))

    return run


def _opened(prepared):
    import weighlock

    with weighlock.open(prepared[1]) as catalog:
        return len(list(catalog.values()))


_TURNS = 3
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
                Contender(
                    f"convert, {size} MB", _copied, _sized(size), _check_copy, nbytes=size * _MB
                ),
                Contender(
                    f"fetch to disk, {size} MB",
                    _fetched,
                    _served(size),
                    _check_copy,
                    nbytes=size * _MB,
                ),
                Contender(
                    f"mean of three, {size} MB",
                    _averaged_turned,
                    _sized(size),
                    _check_mean_of_turned,
                    nbytes=_TURNS * size * _MB,
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
                    f"convert, {count:,} tensors",
                    _copied,
                    _sized(1000, count),
                    _check_copy,
                    nbytes=1000 * _MB,
                ),
                Contender(
                    f"fetch to disk, {count:,} tensors",
                    _fetched,
                    _served(1000, count),
                    _check_copy,
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
            contender
            for count in _CONTRIBUTORS
            for contender in (
                Contender(
                    f"limit: read and write, {count} contributors",
                    _limit,
                    _sized(_EACH, files=count),
                    nbytes=count * _EACH * _MB,
                ),
                Contender(
                    f"mean, {count} contributors",
                    _averaged,
                    _sized(_EACH, files=count),
                    _check_mean,
                    nbytes=count * _EACH * _MB,
                ),
            )
        ),
        memory_bars={f"mean, {_CONTRIBUTORS[-1]} contributors": 128},
        is_curve=True,
    ),
)
