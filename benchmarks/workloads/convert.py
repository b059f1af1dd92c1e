"""Write a file's tensors into another file, unchanged."""

import os

from benchmarks.contender import Bar, Contender, Job, Workload

__all__ = ["WORKLOAD", "copy_file_range", "prepare_paths", "same_tensors"]


def prepare_paths(job: Job):
    return job.source, os.path.join(job.directory, "out.safetensors")


def same_tensors(job, prepared, result):
    expected = job.model.arrays()
    path = prepared[1]
    with open(path, "rb") as file:
        import json

        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, array in expected.items():
            begin, end = header[name]["data_offsets"]
            file.seek(8 + length + begin)
            assert file.read(end - begin) == array.tobytes(), name


def copy_file_range(prepared):
    source, target = (
        os.open(prepared[0], os.O_RDONLY),
        os.open(prepared[1], os.O_RDWR | os.O_CREAT),
    )
    size, done = os.fstat(source).st_size, 0
    while done < size:
        done += os.copy_file_range(source, target, size - done)
    os.close(source)
    os.close(target)


def _pread_write(prepared):
    source, target = (
        os.open(prepared[0], os.O_RDONLY),
        os.open(prepared[1], os.O_RDWR | os.O_CREAT),
    )
    buffer = memoryview(bytearray(1 << 20))
    while got := os.readv(source, [buffer]):
        os.write(target, buffer[:got])
    os.close(source)
    os.close(target)


def _prepare_weighlock(job: Job):
    import weighlock.formats.detect
    import weighlock.formats.save

    return (*prepare_paths(job), weighlock)


def _weighlock(prepared):
    source, target, weighlock = prepared
    weighlock.save(target, weighlock.open(source))


def _prepare_safetensors(job: Job):
    import safetensors.torch
    import torch  # noqa: F401

    return (*prepare_paths(job), safetensors.torch)


def _safetensors(prepared):
    source, target, module = prepared
    module.save_file(module.load_file(source), target)


WORKLOAD = Workload(
    "convert",
    "Copy a file's tensors into a new file",
    (
        Contender("limit: copy_file_range", copy_file_range, prepare_paths, same_tensors),
        Contender("pread + write, 1 MiB", _pread_write, prepare_paths, same_tensors),
        Contender(
            "safetensors load_file + save_file",
            _safetensors,
            _prepare_safetensors,
            same_tensors,
            ("safetensors", "torch"),
        ),
        Contender("weighlock", _weighlock, _prepare_weighlock, same_tensors),
    ),
    (Bar("weighlock", "limit: copy_file_range", 0.9),),
    {"weighlock": 64},
)
