"""The weighted mean of eight files of bf16, 600 MB each, into a ninth."""

import json
import os
import random
import threading

from benchmarks.contender import Bar, Contender, Job, Workload
from benchmarks.model import Model
from benchmarks.threads import at_once

__all__ = ["ALL", "read_and_write"]

_COUNT = 8
_WEIGHTS = (301, 117, 96, 205, 180, 77, 133, 507)
_FULL = Model(hidden=1024, layers=14, vocabulary=32_000)
_READ = 1 << 20
_NVFLARE = "NVFlare WeightedAggregationHelper, bf16 sums in memory"


def _model(job: Job):
    return _FULL if job.model.hidden > 1000 else job.model


def _contribution(array, number):
    """A model as training leaves it: signs and magnitudes of the others, other last bits."""
    return (array | (array & 1) << 15) ^ ((array >> 3) * (number * 7 + 1) & 31)


def _sources(job: Job):
    """The files, made once for all contenders."""
    place = os.path.join(job.kept, "contributors")
    paths = [os.path.join(place, f"{number}.safetensors") for number in range(_COUNT)]
    if not os.path.exists(place):
        import numpy as np

        os.makedirs(place + ".new")
        model = _model(job)
        plain = model.file(place + ".new")
        with open(plain, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            header = file.read(8 + length)
            bits = np.frombuffer(file.read(), np.uint16)
        for number in range(_COUNT):
            with open(f"{place}.new/{number}.safetensors", "wb") as file:
                file.write(header)
                file.write(_contribution(bits, np.uint16(number)))
        os.unlink(plain)
        os.rename(place + ".new", place)
    return paths


def _prepare(*modules):
    def prepare(job: Job):
        import importlib

        for name in modules:
            importlib.import_module(name)
        return _sources(job), os.path.join(job.directory, "out.safetensors"), job

    return prepare


def _header_of(path):
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _check(tolerance):
    """Compares a sample of every tensor with float64; `tolerance` in units of the last place."""

    def check(job, prepared, result):
        import numpy as np

        paths, out, _ = prepared
        files = [np.memmap(path, np.uint8, "r") for path in paths]
        header, start = _header_of(paths[0])
        if isinstance(result, dict):
            found = {name: tensor.view(_short()).numpy() for name, tensor in result.items()}
        elif result is not None:
            found = {name: ref.load() for name, ref in result.items()}
        else:
            there, there_start = _header_of(out)
            written = np.memmap(out, np.uint8, "r")
            found = {
                name: written[slice(*(there_start + o for o in entry["data_offsets"]))]
                for name, entry in there.items()
                if name != "__metadata__"
            }
        anywhere = random.Random(0)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            got = np.ascontiguousarray(found[name]).reshape(-1).view(np.uint8)
            for first in (0, 2 * anywhere.randrange((end - begin) // 2)):
                piece = slice(first, first + 20_000)
                rows = [_floats(file[start + begin : start + end][piece]) for file in files]
                weighted = sum(w * row for w, row in zip(_WEIGHTS, rows, strict=True))
                expected = weighted / sum(_WEIGHTS)
                ulp = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 7)
                assert (np.abs(_floats(got[piece]) - expected) <= tolerance * ulp).all(), name

    return check


def _short():
    import torch

    return torch.int16


def _floats(raw):
    import numpy as np

    return (
        (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16)
        .view(np.float32)
        .astype(np.float64)
    )


def read_and_write(paths, out, workers):
    """Read all files and write one, and nothing done to the bytes."""
    import numpy as np

    fds = [os.open(path, os.O_RDONLY) for path in paths]
    target = os.open(out, os.O_RDWR | os.O_CREAT)
    size = os.fstat(fds[0]).st_size
    starts = iter(range(0, size, _READ))
    taking = threading.Lock()

    def work(_):
        buffer = memoryview(np.empty(_READ, np.uint8))
        while True:
            with taking:
                start = next(starts, None)
            if start is None:
                return
            for fd in fds:
                got = os.preadv(fd, [buffer], start)
            os.pwrite(target, buffer[:got], start)

    at_once(work, range(workers))
    for fd in (*fds, target):
        os.close(fd)


def _limit(prepared, workers=1):
    paths, out, _ = prepared
    read_and_write(paths, out, workers)


def _weighlock(prepared):
    import weighlock

    paths, out, _ = prepared
    weighlock.mean(paths, _WEIGHTS, out).close()


def _prepare_by_numpy(job: Job):
    os.environ["WEIGHLOCK_COMPILED"] = "0"
    return _prepare("ml_dtypes", "weighlock.combining.mean")(job)


def _weighlock_in_memory(prepared):
    """The result where NVFlare's aggregator leaves it."""
    import weighlock

    paths, _, _ = prepared
    return weighlock.mean(paths, _WEIGHTS)


def _nvflare(prepared):
    """As its aggregator does with tensors kept on disk; the result stays in memory, as bf16."""
    from nvflare.app_common.aggregators.weighted_aggregation_helper import (
        WeightedAggregationHelper,
    )
    from nvflare.app_opt.pt.lazy_tensor_dict import _LazyRef

    paths, _, _ = prepared
    helper = WeightedAggregationHelper()
    names = [name for name in _header_of(paths[0])[0] if name != "__metadata__"]
    for path, weight in zip(paths, _WEIGHTS, strict=True):
        refs = {name: _LazyRef(path, name, None) for name in names}
        helper.add(refs, weight, path, 0)
    return helper.get_result()


def _torch_one_at_a_time(prepared):
    import torch
    from safetensors.torch import load_file, save_file

    paths, out, _ = prepared
    total = sum(_WEIGHTS)
    sums = {}
    for path, weight in zip(paths, _WEIGHTS, strict=True):
        for name, tensor in load_file(path).items():
            if name in sums:
                sums[name].add_(tensor, alpha=weight / total)
            else:
                sums[name] = tensor.float().mul_(weight / total)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in sums.items()}, out)


def _torch_all(prepared):
    import torch
    from safetensors.torch import load_file, save_file

    paths, out, _ = prepared
    models = [load_file(path) for path in paths]
    weights = torch.tensor(_WEIGHTS, dtype=torch.float32) / sum(_WEIGHTS)
    save_file(
        {
            name: torch.tensordot(weights, torch.stack([m[name] for m in models]).float(), 1).to(
                torch.bfloat16
            )
            for name in models[0]
        },
        out,
    )


ALL = (
    Workload(
        "mean",
        "Weighted mean of eight files of 600 MB",
        (
            Contender("limit: read eight, write one", _limit, _prepare("numpy")),
            Contender(
                "the same, two threads",
                lambda prepared: _limit(prepared, workers=2),
                _prepare("numpy"),
            ),
            Contender(
                _NVFLARE,
                _nvflare,
                _prepare("torch", "safetensors.torch", "nvflare.app_opt.pt.lazy_tensor_dict"),
                _check(16),
                ("nvflare", "torch"),
            ),
            Contender(
                "torch, one at a time",
                _torch_one_at_a_time,
                _prepare("torch", "safetensors.torch"),
                _check(1),
                ("torch", "safetensors"),
            ),
            Contender(
                "torch, all loaded",
                _torch_all,
                _prepare("torch", "safetensors.torch"),
                _check(1),
                ("torch", "safetensors"),
            ),
            Contender(
                "weighlock",
                _weighlock,
                _prepare("ml_dtypes", "weighlock.combining.mean"),
                _check(0.51),
            ),
            Contender(
                "weighlock, the result in memory",
                _weighlock_in_memory,
                _prepare("ml_dtypes", "weighlock.combining.mean"),
                _check(0.51),
            ),
            Contender(
                "weighlock, not compiled: sums by numpy",
                _weighlock,
                _prepare_by_numpy,
                _check(0.51),
            ),
        ),
        (
            Bar("weighlock", "limit: read eight, write one", 0.55),
            Bar("weighlock", "torch, all loaded", 5),
            Bar("weighlock", "torch, one at a time", 1.6),
            Bar("weighlock", _NVFLARE, 1.0),
            Bar("weighlock, the result in memory", _NVFLARE, 1.0),
        ),
        {"weighlock": 128},
        limits={"weighlock": "the same, two threads"},
        fills_memory=True,
    ),
)
