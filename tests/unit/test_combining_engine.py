"""Several threads, of which one fails."""

import threading

import numpy as np
import pytest

import weighlock
from waiting import until
from weighlock.errors import SourceError
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.spec import TensorSpec


class Broken(ArrayRef):
    """It lies nowhere in order, and cannot be gathered; others wait for that meanwhile."""

    def memory(self):
        return None

    def pieces(self, max_bytes=1000):
        until(lambda: sum(t.name == "weighlock-combine" for t in threading.enumerate()) == 3)
        raise SourceError("cannot be gathered")


def test_what_cannot_be_laid_down_is_named_whoever_comes_first():
    """Of 20 attempts some gave a thread that waited the next block of rows that are not there."""
    array = np.zeros((3000, 1000), np.float32)
    catalog = weighlock.Catalog({"w": Broken(TensorSpec("w", "F32", array.shape), array)})
    for _ in range(20):
        with pytest.raises(SourceError, match=r"^b: tensor 'w': cannot be gathered"):
            weighlock.mean({"a": {"w": array}, "b": catalog}, threads=4)
