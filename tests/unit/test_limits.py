"""Every bound: its default, its error, and the place where it holds."""

import dataclasses
import json

import numpy as np
import pytest
from unit_samples import encode

import weighlock
from weighlock.errors import HeaderError, LimitExceeded, LocalProtocolError
from weighlock.limits import Limits

SMALL = encode({"weight": ("F32", (1, 1), b"\0" * 4), "bias": ("F32", (1,), b"\0" * 4)})


def test_limits_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().tensors = 5


def test_every_limit_is_a_positive_number_with_a_reason():
    for field in dataclasses.fields(Limits):
        assert field.default > 0
    assert Limits().header_bytes == 100_000_000  # the format's own bound


def test_what_is_allowed_passes():
    Limits(tensors=2).check("tensors", 2, "tensors")


def test_the_error_says_what_was_asked_and_how_to_allow_it():
    with pytest.raises(LimitExceeded, match=r"Limits\(tensors=3\)") as caught:
        Limits(tensors=2).check("tensors", 3, "a.safetensors: tensors in the header")
    error = caught.value
    assert (error.limit, error.asked, error.allowed) == ("tensors", 3, 2)
    assert "a.safetensors" in str(error)


@pytest.mark.parametrize(
    ("limits", "limit", "asked"),
    [
        (Limits(tensors=1), "tensors", 2),
        (Limits(name_bytes=5), "name_bytes", 6),
        (Limits(rank=1), "rank", 2),
    ],
)
def test_a_file_beyond_a_limit_is_refused(limits, limit, asked):
    weighlock.open(SMALL)
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(SMALL, limits)
    assert (caught.value.limit, caught.value.asked) == (limit, asked)


def test_names_are_measured_in_bytes_as_the_file_holds_them():
    content = encode({"größe": ("U8", (1,), b"\0")})
    assert list(weighlock.open(content, Limits(name_bytes=7))) == ["größe"]
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(content, Limits(name_bytes=6))
    assert caught.value.asked == 7


def test_a_header_longer_than_allowed_is_refused_before_it_is_read():
    with pytest.raises(HeaderError, match="at most 16 are allowed"):
        weighlock.open(SMALL, Limits(header_bytes=16))


def test_a_model_of_too_many_files_is_refused(tmp_path):
    arrays = {f"layer{n}": np.zeros(4, np.float32) for n in range(3)}
    weighlock.save(tmp_path / "model", arrays, durable=False, max_shard_bytes=16)
    weighlock.open(tmp_path / "model", Limits(shards=3))
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(tmp_path / "model", Limits(shards=2))
    assert (caught.value.limit, caught.value.asked) == ("shards", 3)
    with pytest.raises(LimitExceeded) as caught:
        weighlock.open(tmp_path / "model", Limits(tensors=2))
    assert caught.value.limit == "tensors"


def test_an_index_longer_than_allowed_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {}}) + " " * 100)
    with pytest.raises(HeaderError, match="64 are allowed"):
        weighlock.open(path, Limits(header_bytes=64))


def test_a_header_beyond_the_limit_is_not_written_either(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(weighlock.WeighlockError, match="header"):
        weighlock.save(path, {"a" * 200: np.zeros(1)}, limits=Limits(header_bytes=64))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["3", None, True, [1]])
def test_a_limit_is_a_number(value):
    with pytest.raises(TypeError, match="patience_s must be a number, not "):
        Limits(patience_s=value)


@pytest.mark.parametrize("value", [-3, -0.5, float("nan"), float("-inf")])
def test_a_limit_is_not_negative(value):
    with pytest.raises(LocalProtocolError, match=r"patience_s=.*: must be at least 0"):
        Limits(patience_s=value)
    with pytest.raises(LocalProtocolError, match="tensors="):
        dataclasses.replace(Limits(), tensors=value)


def test_limits_are_taken_as_numpy_and_floats_write_them():
    limits = Limits(patience_s=np.float32(1.5), tensors=np.int64(7), memory_bytes=1e9, idle_s=0)
    assert (limits.patience_s, limits.tensors, limits.idle_s) == (1.5, 7, 0)
    assert Limits(head_s=float("inf")).head_s == float("inf")
