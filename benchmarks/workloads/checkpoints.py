"""PyTorch checkpoints, ZIP and legacy: one tensor of them, all of them, and as safetensors."""

import os

from benchmarks.contender import Bar, Contender, Job, Workload
from benchmarks.workloads.convert import copy_file_range, prepare_paths, same_tensors
from benchmarks.workloads.load_all import check_arrays, check_tensors, two_threads

__all__ = ["ALL"]

_WEIGHLOCK_ONE = """
import sys
import weighlock
array = weighlock.open(sys.argv[1])[sys.argv[2]].load()
assert array.dtype.name == "bfloat16" and array.ndim == 2
"""

_TORCH_ONE = """
import sys
import torch
tensor = torch.load(sys.argv[1], mmap=MMAP, weights_only=True)[sys.argv[2]].clone()
assert tensor.dtype == torch.bfloat16 and tensor.ndim == 2
"""


_LIMIT_ONE = """
import os
import sys
import numpy as np
fd = os.open(sys.argv[1], os.O_RDONLY)
array = np.empty(8 << 20, np.uint8)
assert os.preadv(fd, [memoryview(array)], 0)
"""


def _prepare_limit(job: Job):
    """Places for as many bytes as the tensors have, from the start of the file on."""
    import numpy as np

    import weighlock.tensors.arrays  # noqa: F401

    offset, places = 0, []
    for name, shape in job.model.shapes.items():
        places.append((name, shape, offset))
        offset += 2 * int(np.prod(shape))
    return os.open(job.source, os.O_RDONLY), places


def _read_one(prepared):
    import numpy as np

    fd, places = prepared
    shape = next(shape for name, shape, _ in places if name == _name(prepared))
    array = np.empty(shape, np.uint16)
    os.preadv(fd, [memoryview(array.reshape(-1).view("u1"))], 0)


def _prepare_torch(job: Job):
    import safetensors.torch  # noqa: F401
    import torch

    return (*prepare_paths(job), torch)


def _prepare_weighlock(job: Job):
    import ml_dtypes  # noqa: F401

    import weighlock.formats.detect
    import weighlock.formats.save

    return (*prepare_paths(job), weighlock)


def _name(prepared):
    return "model.layers.0.self_attn.q_proj.weight"


def _torch_one(mmap):
    def run(prepared):
        source, _, torch = prepared
        return torch.load(source, mmap=mmap, weights_only=True)[_name(prepared)].clone()

    return run


def _weighlock_one(prepared):
    source, _, weighlock = prepared
    return weighlock.open(source)[_name(prepared)].load()


def _check_one(job, prepared, result):
    wanted = job.model.arrays()[_name(prepared)]
    found = result if hasattr(result, "itemsize") and hasattr(result, "strides") else None
    if found is None:
        import torch

        found = result.view(torch.uint16).numpy()
    assert (found.view("u2") == wanted).all()


def _torch_all(prepared):
    source, _, torch = prepared
    return torch.load(source, weights_only=True)


def _weighlock_all(prepared):
    source, _, weighlock = prepared
    return weighlock.open(source).load()


def _torch_convert(mmap):
    def run(prepared):
        from safetensors.torch import save_file

        source, target, torch = prepared
        save_file(torch.load(source, mmap=mmap, weights_only=True), target)

    return run


def _weighlock_convert(prepared):
    source, target, weighlock = prepared
    weighlock.save(target, weighlock.open(source))


def _check_size(job, prepared, result):
    assert os.path.getsize(prepared[1]) >= job.model.nbytes


_TORCH = ("torch", "safetensors")


def _workloads(kind, mmap, one_script_bar, one_bar, convert_bars):
    torch_load = "torch.load(mmap)" if mmap else "torch.load"
    limit = Contender("limit: copy_file_range", copy_file_range, prepare_paths, _check_size)
    script = _TORCH_ONE.replace("MMAP", str(mmap))
    return (
        Workload(
            f"open-one-{kind}",
            f"A fresh process opens a {kind} checkpoint and loads one 8 MB tensor",
            (
                Contender("limit: numpy + preadv of 8 MB", None, script=_LIMIT_ONE),
                Contender(torch_load, None, needs=("torch",), script=script),
                Contender("weighlock", None, script=_WEIGHLOCK_ONE),
            ),
            (Bar("weighlock", torch_load, one_script_bar),),
            limits={"weighlock": "limit: numpy + preadv of 8 MB"},
            source=kind,
        ),
        Workload(
            f"one-{kind}",
            f"Open a {kind} checkpoint and load one 8 MB tensor, imports excluded",
            (
                Contender("limit: preadv of 8 MB", _read_one, _prepare_limit),
                Contender(torch_load, _torch_one(mmap), _prepare_torch, _check_one, _TORCH),
                Contender("weighlock", _weighlock_one, _prepare_weighlock, _check_one),
            ),
            (Bar("weighlock", torch_load, one_bar),),
            limits={"weighlock": "limit: preadv of 8 MB"},
            fills_memory=True,
            source=kind,
        ),
        Workload(
            f"load-{kind}",
            f"Load every tensor of a {kind} checkpoint",
            (
                Contender("limit: preadv of as many bytes, 2 threads", two_threads, _prepare_limit),
                Contender("torch.load", _torch_all, _prepare_torch, check_tensors, _TORCH),
                Contender("weighlock", _weighlock_all, _prepare_weighlock, check_arrays),
            ),
            (Bar("weighlock", "torch.load", 2.5),),
            limits={"weighlock": "limit: preadv of as many bytes, 2 threads"},
            fills_memory=True,
            source=kind,
        ),
        Workload(
            f"convert-{kind}",
            f"Convert a {kind} checkpoint to safetensors",
            (
                limit,
                Contender(
                    f"{torch_load} + save_file",
                    _torch_convert(mmap),
                    _prepare_torch,
                    same_tensors,
                    _TORCH,
                ),
                Contender("weighlock", _weighlock_convert, _prepare_weighlock, same_tensors),
            ),
            tuple(Bar("weighlock", peer, ratio) for peer, ratio in convert_bars),
            {"weighlock": 64},
            limits={"weighlock": "limit: copy_file_range"},
            fills_memory=True,
            source=kind,
        ),
    )


ALL = (
    *_workloads(
        "zip",
        True,
        5.0,
        1.0,
        (("limit: copy_file_range", 0.9), ("torch.load(mmap) + save_file", 1.0)),
    ),
    *_workloads("legacy", False, 5.0, 50.0, (("torch.load + save_file", 2.3),)),
)
