"""B13: any bytes are a catalog or an error of ours, within bounds; what opens can be read."""

import contextlib
import io
import os

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import weighlock
from hostile.make import entry, file_bytes, four_floats
from hostile.make_gguf import sample as gguf_sample
from hostile.watching import bounded, watched
from property.strategies import edited, files, steady
from weighlock.errors import FormatError, LimitExceeded

MOST_LOADED = 1_000_000


def read_all(content):
    """Open bytes and read all of it that is not huge; True if it was a catalog.

    Raises whatever is neither `FormatError` nor a limit that was really passed.
    """
    try:
        catalog = weighlock.open(content)
        for name, ref in catalog.items():
            assert ref.name == name
            if ref.nbytes > MOST_LOADED:
                continue
            assert sum(len(piece) for piece in ref.pieces(64)) == ref.nbytes
            if ref.dtype.bits != 6:
                assert ref.load().shape == ref.shape
                assert ref[...].shape == ref.shape
    except (FormatError, LimitExceeded) as error:
        refusal = error
    else:
        return True
    assert str(refusal).isprintable()
    assert isinstance(refusal, FormatError) or refusal.asked > refusal.allowed
    return False


def saved_by_torch(**options):
    buffer = io.BytesIO()
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    torch.save({"model": state, "epoch": 3}, buffer, **options)
    return buffer.getvalue()


def saved_by_numpy(save, *arrays, **named):
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


GOLDENS = {
    "gguf": gguf_sample()[0],
    "npy": saved_by_numpy(np.save, np.asfortranarray(np.ones((2, 3)))),
    "npz": saved_by_numpy(np.savez_compressed, a=np.ones(3, ">f4"), b=np.eye(2, dtype="f2")),
    "safetensors": file_bytes(
        {
            "__metadata__": {"format": "pt", "tied": "b"},
            "a": entry("F32", (2, 2), (0, 16)),
            "b": entry("BF16", (3,), (16, 22)),
            "c": entry("F4", (2, 2), (22, 24)),
            "d": entry("F6_E2M3", (4,), (24, 27)),
            "e": entry("BOOL", (), (27, 28)),
            "f": entry("I64", (0, 3), (28, 28)),
        },
        bytes(range(28)),
    ),
    "torch": saved_by_torch(),
    "torch legacy": saved_by_torch(_use_new_zipfile_serialization=False),
}


@pytest.fixture(scope="module", autouse=True)
def _warm():
    for content in GOLDENS.values():
        assert read_all(content)
    for content in (b"", b"\x08", file_bytes("{]"), file_bytes(b'{"\xff"}')):
        assert not read_all(content)
    "".encode("cp437")  # the names in a ZIP archive: the standard library imports it on first use


def check(content):
    with bounded(content, most_loaded=3 * MOST_LOADED), watched() as seen:
        read_all(content)
    assert seen == []
    # Opening alone holds no tensor, however large those are that the header speaks of.
    with bounded(content), contextlib.suppress(FormatError, LimitExceeded):
        weighlock.open(content)


@steady(100)
@given(st.binary(max_size=600))
@example(b"\0" * 8)
@example(b"\xff" * 16)
@example(b"PK\x03\x04")
@example(b"\x80\x02.")
def test_any_bytes(content):
    check(content)


@steady(100)
@given(
    st.sampled_from(
        [b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95", b"<", b"GGUF\x03\0\0\0", b"\x93NUMPY\1\0"]
    ),
    st.binary(max_size=300),
)
def test_any_bytes_behind_a_known_beginning(beginning, content):
    check(beginning + content)


@steady(100)
@given(st.binary(max_size=300), st.binary(max_size=20))
def test_any_bytes_as_header(header, data):
    check(file_bytes(header, data))
    check(file_bytes(b"{" + header + b"}", data))


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["F32", "F4", "dtype", "shape", "data_offsets", "__metadata__"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner
        )
    ),
    max_leaves=12,
)


@steady(100)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), _json), st.binary(max_size=9)
)
def test_any_json_as_header(header, data):
    check(file_bytes(header, data))


@steady(100)
@given(files())
def test_every_valid_file_is_read(file):
    header, data = file
    assert read_all(file_bytes(header, data))


@steady(250)
@given(st.data())
def test_valid_file_after_a_few_edits_of_its_header(data):
    header, tensors = data.draw(files())
    check(data.draw(edited(file_bytes(header, tensors))))


@steady(150)
@pytest.mark.parametrize("golden", GOLDENS)
@given(data=st.data())
def test_golden_file_after_a_few_edits_anywhere(golden, data):
    check(data.draw(edited(GOLDENS[golden], keep_length=False)))


@pytest.mark.parametrize("golden", GOLDENS)
def test_golden_file_cut_at_every_byte(golden):
    for length in range(len(GOLDENS[golden])):
        with watched() as seen:
            assert not read_all(GOLDENS[golden][:length])
        assert seen == []


@pytest.mark.parametrize("bit", [0x01, 0x20, 0x80])
def test_safetensors_header_with_every_byte_flipped(bit):
    content = GOLDENS["safetensors"]
    for place in range(8 + int.from_bytes(content[:8], "little")):
        check(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])


@steady(40)
@given(st.binary(max_size=200))
def test_bytes_and_file_are_judged_alike(tmp_path, content):
    path = tmp_path / "x.safetensors"
    for text in (content, file_bytes(b"{" + content + b"}"), four_floats() + content):
        path.write_bytes(text)
        before = os.listdir("/proc/self/fd")
        try:
            with weighlock.open(path) as catalog:
                found = sorted(catalog)
        except FormatError as error:
            found = type(error)
        try:
            expected = sorted(weighlock.open(text))
        except FormatError as error:
            expected = type(error)
        assert found == expected
        assert os.listdir("/proc/self/fd") == before
