"""Which tensor goes into which shard."""

import pytest

from weighlock.formats.shards import split
from weighlock.tensors.spec import TensorSpec


def specs(*sizes):
    return [TensorSpec(f"t{n}", "U8", (size,)) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], [[]]),
        ([5], [[5]]),
        ([5, 5], [[5, 5]]),
        ([5, 6], [[5], [6]]),
        ([10], [[10]]),
        ([11], [[11]]),
        ([3, 11, 3], [[3], [11], [3]]),
        ([4, 4, 4, 4], [[4, 4], [4, 4]]),
        ([0, 10, 0], [[0, 10, 0]]),
        ([11, 0, 1], [[11], [0, 1]]),
        ([20, 20], [[20], [20]]),
    ],
)
def test_consecutive_tensors_share_a_shard_while_they_fit(sizes, groups):
    found = [[spec.nbytes for spec in group] for group in split(specs(*sizes), 10)]
    assert [group for group in found if group] == [group for group in groups if group]
    assert [size for group in found for size in group] == sizes
    assert all(sum(group) <= 10 or len([size for size in group if size]) == 1 for group in found)
