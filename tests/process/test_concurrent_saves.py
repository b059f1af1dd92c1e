"""A11: two processes save the same path again and again, and a reader never sees half a file.

Which of the two is there when is chance; that it is one of them, whole, is not.
"""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

import weighlock
from weighlock.errors import SourceChanged

SAVES = """
import select, sys
import numpy as np
import weighlock

path, seed, least, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
turn = 0
while turn < least or not select.select([0], [], [], 0)[0]:  # until told that it is enough
    shape = (seed * 50 + turn % 7, 401)  # of several lengths, so that a mixture shows
    weighlock.save(
        path,
        {"a": np.full(shape, seed, np.int32), "b": np.full(shape[0], turn, np.int64)},
        metadata={"seed": str(seed), "turn": str(turn)},
        **options,
    )
    turn += 1
"""
PATIENCE_S = 60


@contextlib.contextmanager
def two_savers(path, least, stdin=subprocess.PIPE, **options):
    """Two processes that save to one path until their stdin is at its end."""
    savers = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES, path, str(seed), str(least), repr(options)],
            stdin=stdin,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    try:
        yield savers
    finally:
        for saver in savers:
            saver.kill()
            saver.communicate(timeout=PATIENCE_S)


def check(catalog):
    """Everything in the file is of one save."""
    seed, turn = int(catalog.metadata["seed"]), int(catalog.metadata["turn"])
    rows = seed * 50 + turn % 7
    assert np.array_equal(catalog["a"].load(), np.full((rows, 401), seed, np.int32))
    assert np.array_equal(catalog["b"].load(), np.full(rows, turn, np.int64))
    return seed


@pytest.mark.parametrize("durable", [False, True])
def test_a_reader_always_sees_one_complete_save_of_two_processes(tmp_path, durable):
    path = tmp_path / "model.safetensors"
    reads, changed, seen = 0, 0, set()
    with two_savers(path, 50, durable=durable) as savers:
        while reads < 300 or seen != {1, 2}:
            assert all(saver.poll() is None for saver in savers)
            if not path.exists():
                assert not seen  # once it is there it never goes away
                continue
            reads += 1
            # Any reader: who has the file open reads one version to its end.
            with open(path, "rb") as file:
                seen.add(check(weighlock.open(file.read())))
            # Our own reader also says so if another version took its place since it was opened.
            with weighlock.open(path) as catalog:
                try:
                    check(catalog)
                except SourceChanged:
                    changed += 1
        for saver in savers:
            _, errors = saver.communicate(timeout=PATIENCE_S)
            assert saver.returncode == 0, errors
    with weighlock.open(path) as catalog:
        check(catalog)
        assert int(catalog.metadata["turn"]) >= 49
    assert changed < reads
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_two_processes_that_save_shards_to_one_path_leave_one_of_them_whole(tmp_path):
    """The second one finds that the name is taken: an error, and the first one's files intact."""
    path = tmp_path / "model"
    with two_savers(path, 1, subprocess.DEVNULL, max_shard_bytes=50_000) as savers:
        errors = [saver.communicate(timeout=PATIENCE_S)[1] for saver in savers]
        codes = [saver.returncode for saver in savers]
    assert sorted(codes) == [0, 1], errors
    assert sum("DiskError" in error for error in errors) == 1
    with weighlock.open(path) as catalog:
        assert catalog["a"].load().max() == 1 + codes.index(0)
    assert os.listdir(tmp_path) == ["model"]
