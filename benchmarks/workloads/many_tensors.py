"""A checkpoint of very many small tensors: reading its pickle, and opening it."""

import io
import os
import pickle
import zipfile

from benchmarks.contender import Contender, Job, Workload

__all__ = ["ALL"]

_OPCODES_EACH = 32
"""Opcodes torch.save writes for one tensor, about: 3.2 million for 100,000 of them."""


def _pickle_of(job: Job):
    """The pickle of the checkpoint, as bytes."""
    with zipfile.ZipFile(job.source) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


class _Inert:
    """What a peer gets instead of whatever the pickle names: taken and made, never run."""

    def __init__(self, *arguments):
        self.arguments = arguments


class _InertUnpickler(pickle._Unpickler):
    """The standard library's machine in Python, with nothing to call."""

    def find_class(self, module, name):
        return _Inert

    def persistent_load(self, pid):
        return _Inert(pid)


def _unpickle(raw):
    return _InertUnpickler(io.BytesIO(raw)).load()


def _decode(raw):
    import pickletools

    return sum(1 for _ in pickletools.genops(raw))


def _prepare_weighlock_pickle(job: Job):
    import weighlock.formats.inert_pickle  # noqa: F401

    return _pickle_of(job)


def _weighlock_pickle(raw):
    from weighlock.formats.inert_pickle import Feed, read_pickle

    return read_pickle(Feed(raw)).value


def _check_opcodes(job, raw, count):
    assert count >= _OPCODES_EACH * job.model.many


def _check_names(job, raw, value):
    assert len(value) == job.model.many


def _prepare_torch(job: Job):
    import torch

    return job, torch


def _prepare_weighlock(job: Job):
    import weighlock.formats.detect

    return job, weighlock


def _torch_open(prepared):
    job, torch = prepared
    return torch.load(job.source, mmap=True, weights_only=True)


def _weighlock_open(prepared):
    job, weighlock = prepared
    return weighlock.open(job.source)


def _check_opened(job, prepared, opened):
    assert len(opened) == job.model.many
    last = opened[f"layers.{job.model.many - 1}.weight"]
    values = last.load() if hasattr(last, "load") else last.numpy()
    assert (values == job.model.many - 1).all()
    assert os.path.getsize(job.source) > 128 * job.model.many


ALL = (
    Workload(
        "opcodes",
        "Read the pickle of a checkpoint of 100,000 tensors: 3.2 million opcodes",
        (
            Contender("pickletools.genops (decodes only)", _decode, _pickle_of, _check_opcodes),
            Contender("pickle._Unpickler, inert", _unpickle, _pickle_of, _check_names),
            Contender("weighlock", _weighlock_pickle, _prepare_weighlock_pickle, _check_names),
        ),
        cpu_bars={"weighlock": 3.2},
        source="many",
    ),
    Workload(
        "open-many",
        "Open a checkpoint of 100,000 tensors",
        (
            Contender("torch.load(mmap)", _torch_open, _prepare_torch, _check_opened, ("torch",)),
            Contender("weighlock", _weighlock_open, _prepare_weighlock, _check_opened),
        ),
        memory_bars={"weighlock": 300},
        cpu_bars={"weighlock": 5.0},
        source="many",
    ),
)
