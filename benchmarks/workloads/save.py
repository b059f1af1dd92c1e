"""Save a model that is in memory: from a dict, and from a generator of its tensors."""

import json
import os

from benchmarks.contender import Bar, Contender, Job, Workload

__all__ = ["FROM_GENERATOR", "FROM_MEMORY"]


def _prepare(job: Job):
    return job, job.model.tensors(), os.path.join(job.directory, "out.safetensors")


def _check(job, prepared, result):
    """Every tensor of the file equals the one in memory, read by the reference implementation."""
    import torch
    from safetensors import safe_open

    _, tensors, path, *_ = prepared
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor), name


def _prepare_limit(job: Job):
    return job, job.model.arrays(), os.path.join(job.directory, "out.safetensors")


def _check_size(job, prepared, result):
    assert os.path.getsize(prepared[2]) > job.model.nbytes


def _write(prepared):
    _, arrays, path = prepared
    header, offset = {}, 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        done, view = 0, memoryview(array.reshape(-1).view("u1"))
        while done < len(view):
            done += os.write(fd, view[done:])
    os.close(fd)


def _safetensors(prepared):
    from safetensors.torch import save_file

    save_file(prepared[1], prepared[2], metadata={"format": "pt"})


def _torch(prepared):
    import torch

    torch.save(prepared[1], prepared[2])


def _weighlock(prepared):
    import weighlock

    weighlock.save(prepared[2], prepared[1])


def _generator(tensors):
    yield from tensors.items()


def _metas(prepared):
    return [(name, "BF16", shape) for name, shape in prepared[0].model.shapes.items()]


def _prepare_trinity(job):
    # Importing trinity.utils pulls in ray and more; the saver itself needs torch only.
    import importlib.util

    spec = importlib.util.find_spec("trinity")
    path = os.path.join(spec.submodule_search_locations[0], "utils", "stream_saver.py")
    module = importlib.util.module_from_spec(
        found := importlib.util.spec_from_file_location("stream_saver", path)
    )
    found.loader.exec_module(module)
    return (*_PEER(job), module.save_safetensors_streaming)


def _trinity(prepared):
    *_, save = prepared
    save(_generator(prepared[1]), prepared[2], _metas(prepared))


def _weighlock_specs(prepared):
    import weighlock

    weighlock.save(prepared[2], _generator(prepared[1]), specs=_metas(prepared))


def _weighlock_no_specs(prepared):
    import weighlock

    weighlock.save(prepared[2], _generator(prepared[1]))


def _imported(prepare, *names):
    """The preparation, with modules imported: their import is not part of the work."""

    def prepared(job):
        import importlib

        for name in names:
            importlib.import_module(name)
        return prepare(job)

    return prepared


_WEIGHLOCK = _imported(_prepare, "torch", "ml_dtypes", "weighlock.formats.save")
_PEER = _imported(_prepare, "torch", "safetensors.torch")

FROM_MEMORY = Workload(
    "save",
    "Save a state dict",
    (
        Contender("limit: write", _write, _prepare_limit, _check_size, ("numpy",)),
        Contender("safetensors save_file", _safetensors, _PEER, _check, ("safetensors", "torch")),
        Contender("torch.save", _torch, _prepare, _check_size, ("torch",)),
        Contender("weighlock", _weighlock, _WEIGHLOCK, _check, ("torch",)),
    ),
    (Bar("weighlock", "safetensors save_file", 0.95),),
    {"weighlock": 32},
    limits={"weighlock": "limit: write"},
)

FROM_GENERATOR = Workload(
    "save-generator",
    "Save tensors that come from a generator",
    (
        Contender("limit: write", _write, _prepare_limit, _check_size, ("numpy",)),
        Contender(
            "Trinity-RFT stream_saver", _trinity, _prepare_trinity, _check, ("trinity", "torch")
        ),
        Contender("weighlock, specs known", _weighlock_specs, _WEIGHLOCK, _check, ("torch",)),
        Contender("weighlock, no specs", _weighlock_no_specs, _WEIGHLOCK, _check, ("torch",)),
    ),
    (
        Bar("weighlock, specs known", "Trinity-RFT stream_saver", 2.2),
        Bar("weighlock, no specs", "Trinity-RFT stream_saver", 2.2),
    ),
    {"weighlock, specs known": 32, "weighlock, no specs": 32},
    limits=dict.fromkeys(("weighlock, specs known", "weighlock, no specs"), "limit: write"),
    fills_memory=True,
)
