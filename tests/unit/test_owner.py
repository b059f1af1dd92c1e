"""Names of temporaries: hidden, unique, and telling whose they are."""

import os
import re

import pytest

from weighlock.disk.owner import MARK, temporary_name


def test_a_name_is_hidden_marked_and_says_whose_it_is():
    name = temporary_name("model.safetensors")
    assert name.startswith(".model.safetensors")
    pattern = rf"{re.escape(MARK)}(\d+)-(\d+)-([0-9a-f]+)-([0-9a-f]{{16}})$"
    pid, start, _, _ = re.search(pattern, name).groups()
    assert int(pid) == os.getpid()
    with open("/proc/self/stat") as status:
        assert status.read().rpartition(")")[2].split()[19] == start


def test_no_two_are_the_same():
    assert len({temporary_name("a") for _ in range(1000)}) == 1000


@pytest.mark.parametrize("name", ["a", "a" * 255, "ü" * 127, "😀" * 63, "\udcff" * 255])
def test_a_name_is_never_too_long_for_a_file(name):
    made = temporary_name(name)
    assert len(os.fsencode(made)) <= 255
    assert "/" not in made
