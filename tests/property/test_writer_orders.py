"""What a file holds does not depend on how its tensors came; and the reference reads every file."""

import itertools
import json

import numpy as np
import pytest
import safetensors
from hypothesis import assume, given
from hypothesis import strategies as st

import weighlock
from property.strategies import DTYPES, WHOLE, f4_of, metadata, names, shapes, steady
from weighlock import DType, Writer
from weighlock.tensors.spec import TensorSpec


@st.composite
def arrays(draw, dtypes=(*WHOLE, DType.F4), max_tensors=6):
    """Arrays by name, of any dtype that numpy can hold."""
    found = {}
    for name in draw(st.lists(names, max_size=max_tensors, unique=True)):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(shapes(dtype))
        seed = draw(st.integers(0, 1000))
        raw = np.random.default_rng(seed).bytes(TensorSpec("t", dtype, shape).nbytes)
        if dtype is DType.BOOL:
            raw = bytes(byte & 1 for byte in raw)
        elements = f4_of(raw) if dtype is DType.F4 else raw
        found[name] = np.frombuffer(elements, np.uint8).view(dtype.numpy).reshape(shape)
    return found


def specs_of(tensors):
    return [TensorSpec(name, DType.of(a.dtype), a.shape) for name, a in tensors.items()]


def file_bytes_of(array):
    """The bytes of an array in a file."""
    if DType.of(array.dtype) is not DType.F4:
        return array.tobytes()
    codes = array.view(np.uint8).reshape(-1)
    return (codes[0::2] & 15 | codes[1::2] << 4).tobytes()


def reference(path):
    return {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for name, t in safetensors.deserialize(path.read_bytes())
    }


def meant(tensors):
    return {
        spec.name: (spec.dtype.value, spec.shape, file_bytes_of(array))
        for spec, array in zip(specs_of(tensors), tensors.values(), strict=True)
    }


def assume_no_aliases(beside, tensors):
    """Metadata of which no entry could be taken for another name of a tensor: it is refused."""
    assume(not tensors.keys() & set(beside.values()))


@steady(80)
@given(st.data())
def test_any_order_and_any_partition_give_the_same_bytes(tmp_path, data):
    tensors = data.draw(arrays())
    beside = data.draw(metadata)
    assume_no_aliases(beside, tensors)
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weighlock.save(path, tensors, metadata=beside, durable=False)
    order = data.draw(st.permutations(list(tensors)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    with (
        weighlock.open(path) as catalog,
        Writer(other, specs_of(tensors), metadata=beside, durable=False) as writer,
    ):
        for first, last in itertools.pairwise([0, *cuts, len(order)]):
            group = order[first:last]
            how = data.draw(st.sampled_from(["write", "copy", "copy all"]))
            if how == "copy all":
                writer.copy_all([catalog[name] for name in group])
            for name in group:
                if how == "write":
                    writer.write(name, tensors[name])
                elif how == "copy":
                    writer.copy(name, catalog[name])
    assert other.read_bytes() == path.read_bytes()


@steady(60)
@given(st.data())
def test_iterables_with_specs_give_the_same_bytes(tmp_path, data):
    tensors = data.draw(arrays())
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weighlock.save(path, tensors, durable=False)
    order = data.draw(st.permutations(list(tensors.items())))
    weighlock.save(other, iter(order), specs_of(tensors), durable=False)
    assert other.read_bytes() == path.read_bytes()


@steady(150)
@given(arrays(), metadata, st.booleans())
def test_every_file_is_read_by_the_reference(tmp_path, tensors, beside, streamed):
    assume_no_aliases(beside, tensors)
    path = tmp_path / "t.safetensors"
    source = iter(tensors.items()) if streamed else tensors
    weighlock.save(path, source, metadata=beside, durable=False)
    assert reference(path) == meant(tensors)
    with safetensors.safe_open(path, "np") as file:
        assert (file.metadata() or {}) == beside
        assert set(file.keys()) == set(tensors)


@steady(60)
@given(arrays(), metadata, st.integers(1, 700))
def test_streamed_header_fits_whatever_room_was_kept(tmp_path, tensors, beside, room):
    path = tmp_path / "t.safetensors"
    with Writer(path, metadata=beside, header_bytes=room, durable=False) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    assert reference(path) == meant(tensors)
    content = path.read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0


@steady(60)
@given(arrays(), metadata)
def test_what_is_written_is_read_back(tmp_path, tensors, beside):
    assume_no_aliases(beside, tensors)
    path = tmp_path / "t.safetensors"
    weighlock.save(path, tensors, metadata=beside, durable=False)
    with weighlock.open(path) as catalog:
        assert list(catalog) == list(tensors)
        assert dict(catalog.metadata) == beside
        for name, array in tensors.items():
            assert catalog[name].load().tobytes() == array.tobytes()


@steady(40)
@given(arrays(), st.integers(1, 200), st.booleans())
def test_shards_hold_the_same_tensors(tmp_path_factory, tensors, most, streamed):
    path = tmp_path_factory.mktemp("shards") / "model"
    source = iter(tensors.items()) if streamed else tensors
    weighlock.save(path, source, max_shard_bytes=most, durable=False)
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in meant(tensors).values())
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        part = reference(file)
        lengths = [len(raw) for _, _, raw in part.values() if raw]
        assert len(lengths) <= 1 or sum(lengths) <= most
        assert all(index["weight_map"][name] == file.name for name in part)
        found |= part
    assert found == meant(tensors)
    with weighlock.open(path) as catalog:
        assert {name: ref.load().tobytes() for name, ref in catalog.items()} == {
            name: array.tobytes() for name, array in tensors.items()
        }


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_packed])
@steady(30)
@given(data=st.data())
def test_packed_tensors_are_copied_as_they_are(tmp_path, dtype, data):
    from hostile.make import entry, file_bytes

    shape = data.draw(shapes(dtype))
    count = TensorSpec("t", dtype, shape).nbytes
    raw = data.draw(st.binary(min_size=count, max_size=count))
    content = file_bytes({"t": entry(dtype.value, shape, (0, count))}, raw)
    path = tmp_path / "t.safetensors"
    weighlock.save(path, weighlock.open(content), durable=False)
    assert reference(path) == {"t": (dtype.value, shape, raw)}
