"""Arrays that share memory, as places to receive into: none may end as a mixture of two tensors."""

import numpy as np
import pytest
import torch

import weighlock
from weighlock.errors import LayoutError

COUNT = 1 << 20
"""Elements of float32: several blocks, over several connections."""


@pytest.fixture(scope="module")
def url():
    with weighlock.Server() as server:
        ones, twos = np.full(COUNT, 1, np.float32), np.full(COUNT, 2, np.float32)
        yield server.share({"a": ones, "b": twos}).url


@pytest.fixture(params=["fetch", "load_into"])
def load(request, url):
    def fetch(out):
        return weighlock.fetch(url, out=out)

    def load_into(out):
        with weighlock.open(url) as catalog:
            return catalog.load_into(out)

    return {"fetch": fetch, "load_into": load_into}[request.param]


def test_arrays_that_partly_share_memory_are_refused(load):
    memory = np.zeros(COUNT + 10, np.float32)
    with pytest.raises(LayoutError, match=r"'a' and 'b' share 4,194,264 bytes of memory"):
        load({"a": memory[:COUNT], "b": memory[10:]})
    tensor = torch.from_numpy(memory)
    with pytest.raises(LayoutError, match="share"):
        load({"a": tensor[5 : COUNT + 5], "b": memory[:COUNT]})
    assert not memory.any()


def test_arrays_whose_elements_share_memory_are_refused(load):
    other = np.zeros(COUNT, np.float32)
    one = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (COUNT,), (0,), writeable=True)
    with pytest.raises(LayoutError, match="tensor 'a' cannot hold it: its elements share memory"):
        load({"a": one, "b": other})
    with pytest.raises(LayoutError, match="tensor 'b' cannot hold it"):
        load({"a": other, "b": torch.zeros(1).expand(COUNT)})


def test_neighbours_and_columns_are_places_of_their_own(load):
    memory = np.zeros(2 * COUNT, np.float32)
    load({"a": memory[:COUNT], "b": memory[COUNT:]})
    assert (memory == np.repeat([1, 2], COUNT)).all()
    columns = np.zeros((COUNT, 2), np.float32)
    load({"a": columns[:, 0], "b": columns[:, 1]})
    assert (columns == [1, 2]).all()


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_two_tensors_for_one_place_one_counts_whole(load, names):
    """Tied parameters of which two were saved: the same ones most often, and never a mixture."""
    for _ in range(5):
        tied = torch.nn.Parameter(torch.zeros(COUNT))
        load(dict.fromkeys(names, tied))
        assert len(torch.unique(tied.detach())) == 1
