"""Where each tensor of a new file goes: arithmetic over specs."""

import itertools
import json

import pytest

from weighlock.errors import LayoutError
from weighlock.formats.placement import Planned, Streamed
from weighlock.limits import Limits
from weighlock.tensors.spec import TensorSpec

SPECS = [
    TensorSpec("flags", "BOOL", (3,)),
    TensorSpec("half", "BF16", (5,)),
    TensorSpec("codes", "F4", (6,)),
    TensorSpec("double", "F64", (2,)),
    TensorSpec("nothing", "F32", (0,)),
    TensorSpec("single", "F32", (3,)),
    TensorSpec("number", "I64", ()),
]


def parsed(header):
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    return json.loads(header[8:])


def planned(specs=SPECS, metadata=None):
    return Planned(list(specs), metadata or {}, Limits())


def test_every_planned_tensor_starts_on_its_element_size_and_data_on_64_bytes():
    for count in range(len(SPECS)):
        placement = planned(SPECS[count:] + SPECS[:count])
        assert placement.data_start % 64 == 0
        taken = []
        for spec in SPECS:
            offset = placement.place(spec)
            assert offset % max(1, spec.dtype.bits // 8) == 0
            taken.append((offset, offset + spec.nbytes))
        taken.sort()
        assert taken[0][0] == placement.data_start
        assert taken[-1][1] == placement.total_bytes
        for (_, end), (begin, _) in itertools.pairwise(taken):
            assert end == begin


def test_the_planned_header_says_where_they_are_in_the_order_given():
    placement = planned(metadata={"step": "7"})
    header = parsed(placement.header({"step": "7"}))
    assert list(header) == ["__metadata__", *(spec.name for spec in SPECS)]
    assert header["__metadata__"] == {"step": "7"}
    for spec in SPECS:
        begin, end = header[spec.name]["data_offsets"]
        assert placement.place(spec) == placement.data_start + begin
        assert end - begin == spec.nbytes
        assert header[spec.name]["dtype"] == spec.dtype.value
        assert header[spec.name]["shape"] == list(spec.shape)


def test_the_planned_header_keeps_its_length_whether_torch_tensors_come_or_not():
    placement = planned()
    assert len(placement.header({})) == placement.data_start
    assert len(placement.header({"format": "pt"})) == placement.data_start
    assert placement.lacking({"format": "pt"}) == 0


def test_what_was_not_announced_has_no_place():
    placement = planned()
    with pytest.raises(LayoutError, match="'other' was not announced"):
        placement.place(TensorSpec("other", "F32", (3,)))
    with pytest.raises(LayoutError, match=r"announced as F32 \[3\], but is F32 \[4\]"):
        placement.place(TensorSpec("single", "F32", (4,)))
    with pytest.raises(LayoutError, match=r"announced as F32 \[3\], but is I32 \[3\]"):
        placement.place(TensorSpec("single", "I32", (3,)))


def test_what_was_announced_and_not_written_is_missing():
    placement = planned()
    assert placement.missing({spec.name for spec in SPECS}) == []
    assert placement.missing({"half", "codes", "double", "single", "number"}) == [
        "flags",
        "nothing",
    ]


def test_a_name_announced_twice_is_refused():
    with pytest.raises(LayoutError, match="'half' is named twice"):
        planned([*SPECS, TensorSpec("half", "F32", (1,))])


def test_no_tensors_at_all():
    placement = planned([])
    assert placement.data_bytes == 0
    assert parsed(placement.header({})) == {}


def test_streamed_tensors_are_laid_end_to_end_as_they_come():
    placement = Streamed(1000, Limits())
    assert placement.data_start == 1024
    position = 1024
    for spec in SPECS:
        assert placement.place(spec) == position
        position += spec.nbytes
    assert placement.total_bytes == position
    assert placement.missing(set()) == []
    header = parsed(placement.header({}))
    assert list(header) == [spec.name for spec in SPECS]
    assert len(placement.header({})) == 1024


def test_a_streamed_header_that_does_not_fit_says_how_much_it_lacks():
    placement = Streamed(0, Limits())
    assert placement.data_start == 64
    for spec in SPECS:
        placement.place(spec)
    lacking = placement.lacking({"step": "7"})
    assert lacking > 0
    assert lacking % 64 == 0
    with pytest.raises(LayoutError, match="header of 7 tensors takes"):
        placement.header({"step": "7"})
    placement.moved(lacking)
    assert placement.lacking({"step": "7"}) == 0
    assert len(placement.header({"step": "7"})) == placement.data_start == 64 + lacking


def test_a_header_beyond_the_format_s_bound_is_refused():
    with pytest.raises(LayoutError, match="100 are allowed"):
        Planned(SPECS, {}, Limits(header_bytes=100))
    placement = Streamed(0, Limits(header_bytes=100))
    for spec in SPECS:
        placement.place(spec)
    with pytest.raises(LayoutError, match="100 are allowed"):
        placement.lacking({})
