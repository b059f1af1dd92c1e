"""Read every tensor of a file into memory that is the reader's own."""

import os

from benchmarks.contender import Bar, Contender, Job, Workload
from benchmarks.threads import at_once

__all__ = ["WORKLOAD", "check_arrays", "check_tensors", "two_threads"]


def _prepare_limit(job: Job):
    import numpy as np

    import weighlock.tensors.arrays  # noqa: F401

    fd = os.open(job.source, os.O_RDONLY)
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    offset, places = 8 + length, []
    for name, shape in job.model.shapes.items():
        places.append((name, shape, offset))
        offset += 2 * int(np.prod(shape))
    return fd, places


def _read(fd, places, result):
    import numpy as np

    from weighlock.tensors.arrays import empty  # memory as ours is had

    for name, shape, offset in places:
        array = empty(shape, np.dtype(np.uint16))
        view = memoryview(array.reshape(-1).view("u1"))
        done = 0
        while done < len(view):
            done += os.preadv(fd, [view[done:]], offset + done)
        result[name] = array


def _one_thread(prepared):
    result = {}
    _read(*prepared, result)
    return result


def two_threads(prepared):
    """The tensors dealt out by size, so that both threads read the same number of bytes."""
    fd, places = prepared
    result, load = {}, [0, 0]
    shares = [[], []]
    for place in sorted(places, key=lambda p: -p[1][0] * (p[1] + (1,))[1]):
        least = load.index(min(load))
        shares[least].append(place)
        load[least] += place[1][0] * (place[1] + (1,))[1]
    at_once(lambda share: _read(fd, share, result), shares)
    return result


def check_arrays(job, prepared, result):
    expected = job.model.arrays()
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        assert (result[name].view("u2").reshape(-1) == array.reshape(-1)).all(), name


def check_tensors(job, prepared, result):
    import torch

    check_arrays(job, prepared, {n: t.view(torch.uint16).numpy() for n, t in result.items()})


def _prepare_safetensors(job: Job):
    import safetensors.torch
    import torch  # noqa: F401

    return safetensors.torch, job.source


def _safetensors(prepared):
    module, path = prepared
    return {name: tensor.clone() for name, tensor in module.load_file(path).items()}


def _prepare_runai(job: Job):
    import logging

    from runai_model_streamer import SafetensorsStreamer

    logging.getLogger("runai_model_streamer").setLevel(logging.WARNING)
    return SafetensorsStreamer, job.source


def _runai(prepared):
    """Its tensors are the caller's: each has memory of its own, without a copy of ours."""
    streamer_of, path = prepared
    with streamer_of() as streamer:
        streamer.stream_file(path)
        return dict(streamer.get_tensors())


def _prepare_fastsafetensors(job: Job):
    import fastsafetensors
    import torch  # noqa: F401

    return fastsafetensors, job.source


def _fastsafetensors(prepared, clone):
    """Its tensors are views of one buffer for the whole file."""
    module, path = prepared
    loader = module.SafeTensorsFileLoader(module.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    if clone:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    buffers.close()
    loader.close()
    return tensors


def _prepare_weighlock(job: Job):
    import ml_dtypes  # noqa: F401

    import weighlock.formats.detect

    return weighlock, job.source


def _weighlock(prepared):
    weighlock, path = prepared
    return {name: ref.load() for name, ref in weighlock.open(path).items()}


def _weighlock_catalog(prepared):
    weighlock, path = prepared
    return weighlock.open(path).load()


WORKLOAD = Workload(
    "load",
    "Load every tensor into owned memory",
    (
        Contender("limit: preadv, 2 threads", two_threads, _prepare_limit, check_arrays),
        Contender("limit: preadv, 1 thread", _one_thread, _prepare_limit, check_arrays),
        Contender(
            "safetensors load_file + clone",
            _safetensors,
            _prepare_safetensors,
            check_tensors,
            ("safetensors", "torch"),
        ),
        Contender(
            "runai-model-streamer 0.17",
            _runai,
            _prepare_runai,
            check_tensors,
            ("runai_model_streamer", "torch"),
        ),
        Contender(
            "fastsafetensors 0.5, CPU, views of one buffer",
            lambda prepared: _fastsafetensors(prepared, clone=False),
            _prepare_fastsafetensors,
            check_tensors,
            ("fastsafetensors", "torch"),
        ),
        Contender(
            "fastsafetensors 0.5, CPU + clone",
            lambda prepared: _fastsafetensors(prepared, clone=True),
            _prepare_fastsafetensors,
            check_tensors,
            ("fastsafetensors", "torch"),
        ),
        Contender("weighlock, ref by ref", _weighlock, _prepare_weighlock, check_arrays),
        Contender(
            "weighlock, catalog.load()", _weighlock_catalog, _prepare_weighlock, check_arrays
        ),
    ),
    (
        Bar("weighlock, ref by ref", "limit: preadv, 2 threads", 0.85),
        Bar("weighlock, catalog.load()", "limit: preadv, 2 threads", 0.85),
        Bar("weighlock, catalog.load()", "safetensors load_file + clone", 1.4),
    ),
    limits={"weighlock, catalog.load()": "limit: preadv, 2 threads"},
    fills_memory=True,
)
