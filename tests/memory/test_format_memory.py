"""Converting what lies in chunks or in columns takes the same few buffers as anything else."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from measuring import MB, in_memory, peak_of_command

from interop.make_dcp import grid, write_dcp

pytestmark = [pytest.mark.memory, pytest.mark.slow]

SHAPE = (5_000, 10_000)
LARGE = 200 * MB
ALLOWED = 64 * MB


@pytest.fixture
def directory(tmp_path):
    """A directory for large files, removed at once: pytest keeps those of the last runs."""
    made = Path(in_memory(LARGE) or tmp_path)
    yield made
    shutil.rmtree(made)


def rows(path):
    write_dcp(path, {"a": (torch.zeros(SHAPE), grid(SHAPE, (2_000, 4_000), ()))})


def columns(path):
    write_dcp(path, {"a": (torch.zeros(SHAPE), grid(SHAPE, (), (3_000, 7_000)))})


def fortran(path):
    with open(path, "wb") as file:
        np.savez(file, a=np.zeros(SHAPE, np.float32, order="F"))


@pytest.mark.parametrize("make", [rows, columns, fortran])
def test_a_copy_of_200_mb(directory, make):
    write_dcp(directory / "small", {"a": (torch.zeros(4), grid((4,), (2,)))})
    make(directory / "large")
    start = peak_of_command("convert", directory / "small", directory / "start", "--no-sync")
    peak = peak_of_command("convert", directory / "large", directory / "out", "--no-sync")
    assert (directory / "out").stat().st_size > LARGE
    assert peak - start <= ALLOWED
