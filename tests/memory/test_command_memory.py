"""How much memory the command needs beyond starting: the same few buffers for a tensor of 4 GB."""

import shutil
from pathlib import Path

import pytest
from measuring import MB, in_memory, needs_room, peak_of_command, sparse

pytestmark = [pytest.mark.memory, pytest.mark.slow]

LARGE = 4_000 * MB
ALLOWED = 64 * MB


@pytest.fixture
def directory(tmp_path):
    """A directory for large files, removed at once: pytest keeps those of the last runs."""
    made = Path(in_memory(LARGE) or tmp_path)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def large(directory):
    """One tensor of 4 GB, all holes."""
    return sparse(directory / "large.safetensors", "F32", (1_000_000_000,), LARGE)


@pytest.fixture
def small(directory):
    """What starting costs is measured with this one."""
    return sparse(directory / "small.safetensors", "F32", (10,), 40)


def test_a_copy_of_one_tensor_of_4_gb(directory, large, small):
    needs_room(directory, LARGE)
    start = peak_of_command("convert", small, directory / "start", "--no-sync")
    peak = peak_of_command("convert", large, directory / "out", "--no-sync")
    assert (directory / "out").stat().st_size == large.stat().st_size
    assert peak - start <= ALLOWED


def test_a_copy_into_shards(directory, small):
    large = sparse(directory / "large.safetensors", "F32", (250_000_000,), 1_000 * MB)
    needs_room(directory, 1_000 * MB)
    options = ["--no-sync", "--max-shard-size", "100MB"]
    start = peak_of_command("convert", small, directory / "start", *options)
    assert peak_of_command("convert", large, directory / "out", *options) - start <= ALLOWED


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 500 * MB), ("f64", 2_000 * MB)])
def test_a_copy_in_another_dtype(directory, small, dtype, nbytes):
    large = sparse(directory / "large.safetensors", "F32", (250_000_000,), 1_000 * MB)
    needs_room(directory, nbytes)
    options = ["--no-sync", "--dtype", dtype]
    start = peak_of_command("convert", small, directory / "start", *options)
    assert peak_of_command("convert", large, directory / "out", *options) - start <= ALLOWED


@pytest.mark.parametrize("dtype", ["F32", "BF16", "C64"])
def test_looking_at_every_number(directory, small, dtype):
    width = {"F32": 4, "BF16": 2, "C64": 8}[dtype]
    nbytes = LARGE if dtype == "F32" else LARGE // 8
    large = sparse(directory / "large.safetensors", dtype, (nbytes // width,), nbytes)
    start = peak_of_command("verify", "--data", small)
    assert peak_of_command("verify", "--data", large) - start <= ALLOWED


def test_comparing_two(directory, large, small):
    start = peak_of_command("diff", small, small)
    assert peak_of_command("diff", large, large) - start <= ALLOWED


def test_comparing_two_that_differ_everywhere_and_in_dtype(directory, small):
    """Differences are counted, not collected."""
    import numpy as np

    import weighlock

    ones = np.ones(25_000_000, np.float32)
    weighlock.save(directory / "ones", {"weight": ones}, durable=False)
    zeros = sparse(directory / "zeros", "F32", ones.shape, ones.nbytes)
    doubles = sparse(directory / "doubles", "F64", ones.shape, 2 * ones.nbytes)
    start = peak_of_command("diff", small, small)
    assert peak_of_command("diff", directory / "ones", zeros) - start <= ALLOWED
    assert peak_of_command("diff", directory / "ones", doubles) - start <= ALLOWED


def test_listing_reads_the_header_only(directory, large, small):
    start = peak_of_command("info", small)
    assert peak_of_command("info", large) - start <= 16 * MB
