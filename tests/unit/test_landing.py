"""Landings: filled block by block, in any order, they hold what the source holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_samples import quick_collections

import weighlock
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import FormatError
from weighlock.formats.safetensors import arrange, build_header
from weighlock.sources.grid import BLOCK_BYTES, block_count, block_span, blocks_of
from weighlock.tensors.spec import TensorSpec
from weighlock.transfer.landing import FileLanding, MemoryLanding, PartLanding

__all__ = ["quick_collections"]  # a fixture of this module

CONTENT = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_BYTES + 12_345, np.uint8).tobytes()
SIZE = len(CONTENT)


class Arrays:
    """Memory for some spans."""

    def __init__(self, arrays):
        self.spans = sorted(arrays, key=lambda span: span.offset)
        self._buffers = [np.frombuffer(arrays[span], np.uint8) for span in self.spans]
        self.buffer = self._buffers.__getitem__


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A file of four blocks with many small tensors in one of them, its bytes and its spans."""
    random = np.random.default_rng(1)
    arrays = {"a": random.integers(0, 256, BLOCK_BYTES // 3, np.uint8)}
    arrays |= {f"s{n}": random.integers(0, 256, 1000 + n, np.uint8) for n in range(12)}
    arrays |= {
        "b": random.integers(0, 256, 2 * BLOCK_BYTES + 700_077, np.uint8),
        "c": np.arange(3.0),
    }
    path = tmp_path_factory.mktemp("landing") / "a.safetensors"
    weighlock.save(path, arrays, durable=False)
    with weighlock.open(path) as catalog:
        spans = {name: ref.span for name, ref in catalog.items()}
        specs = {name: ref.spec for name, ref in catalog.items()}
    return path.read_bytes(), spans, specs


def block_of(content, block):
    span = block_span(block, len(content))
    return memoryview(content)[span.offset : span.end]


def receive(place, content, block):
    """Do what a connection does: fill the views, then say that the block landed."""
    done = block_span(block, len(content)).offset
    for view in place.views(block):
        view[:] = content[done : done + len(view)]
        done += len(view)
    assert done == block_span(block, len(content)).end
    place.landed(block)


def fill(landing, content, order, ways):
    """Fill a landing in that order; each block over one of two places, or put as a whole."""
    places = [landing.place(), landing.place()]
    for block, way in zip(order, ways, strict=False):
        if way == 2:
            landing.put(block, block_of(content, block))
        else:
            receive(places[way], content, block)


orders = st.permutations(range(4))
manners = st.lists(st.integers(0, 2), min_size=4, max_size=4)


@settings(max_examples=15)  # four megabytes each
@given(orders, manners)
def test_memory_holds_the_tensors(model, order, ways):
    content, spans, _ = model
    buffers = {name: bytearray(span.length) for name, span in spans.items()}
    targets = Arrays({span: buffers[name] for name, span in spans.items()})
    landing = MemoryLanding(targets, len(content))
    assert list(landing.blocks) == [0, 1, 2, 3]
    fill(landing, content, order, ways)
    for name, span in spans.items():
        assert buffers[name] == content[span.offset : span.end]


@settings(max_examples=25)
@given(st.sets(st.sampled_from(["a", "s3", "s4", "s11", "b", "c"]), min_size=1), manners)
def test_some_tensors_need_only_their_blocks(model, names, ways):
    content, spans, _ = model
    chosen = sorted((spans[name] for name in names), key=lambda span: span.offset)
    arrays = {span: bytearray(span.length) for span in chosen}
    landing = MemoryLanding(Arrays(arrays), len(content))
    covered = {block for span in chosen for block in blocks_of(span)}
    assert list(landing.blocks) == sorted(covered)
    fill(landing, content, landing.blocks, ways)
    for span in chosen:
        assert arrays[span] == content[span.offset : span.end]


def test_large_tensor_is_received_straight_into_its_memory(model):
    content, spans, _ = model
    array = np.zeros(spans["b"].length, np.uint8)
    landing = MemoryLanding(Arrays({spans["b"]: array}), len(content))
    views = landing.place().views(1)
    assert len(views) == 1
    assert np.shares_memory(np.frombuffer(views[0], np.uint8), array)


@settings(max_examples=10)
@given(orders, manners, st.booleans())
def test_a_file_holds_the_file(tmp_path, model, order, ways, into_existing):
    content, _, _ = model
    path = tmp_path / "b.safetensors"
    if into_existing:
        path.write_bytes(b"old")
    file = ResumableFile(path, durable=False)
    landing = FileLanding(file, len(content))
    assert list(landing.blocks) == [0, 1, 2, 3]
    fill(landing, content, order, ways)
    landing.complete()
    file.commit()
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.safetensors"]
    path.unlink()


def test_a_file_is_no_model_until_its_landing_is_complete(tmp_path, model):
    content, _, _ = model
    file = ResumableFile(tmp_path / "b.safetensors", durable=False)
    landing = FileLanding(file, len(content))
    fill(landing, content, range(4), [2] * 4)
    with pytest.raises(FormatError):
        weighlock.open(file.temporary_path)
    landing.complete()
    weighlock.open(file.temporary_path).close()
    file.discard()


def test_what_an_earlier_attempt_wrote_can_be_looked_at(tmp_path, model):
    content, _, _ = model
    path = tmp_path / "b.safetensors"
    file = ResumableFile(path, durable=False)
    fill(FileLanding(file, len(content)), content, [0, 2], [2, 2])
    file.keep()
    file = ResumableFile(path, durable=False)
    landing = FileLanding(file, len(content))
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for block in (0, 2):
        assert landing.have(block, buffer, content[:8]) == block_of(content, block)
    assert landing.have(1, buffer, content[:8]) == bytes(BLOCK_BYTES)  # a hole
    assert landing.have(3, buffer, content[:8]) is None  # behind its end
    file.discard()


def test_adopted_file_that_was_longer_ends_where_the_new_one_does(tmp_path, model):
    content, _, _ = model
    path = tmp_path / "b.safetensors"
    file = ResumableFile(path, durable=False)
    file.write(len(content) + 5000, memoryview(b"longer"))
    file.keep()
    file = ResumableFile(path, durable=False)
    assert file.adopted_bytes == len(content) + 5006
    landing = FileLanding(file, len(content))
    fill(landing, content, range(4), [0] * 4)
    landing.complete()
    file.commit()
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_files_of_next_to_nothing(tmp_path, size):
    content = CONTENT[:size]
    file = ResumableFile(tmp_path / "b", durable=False)
    landing = FileLanding(file, size)
    fill(landing, content, range(block_count(size)), [0])
    landing.complete()
    file.commit()
    assert (tmp_path / "b").read_bytes() == content


@settings(max_examples=25)
@given(st.sets(st.sampled_from(["a", "s3", "s4", "s11", "b", "c"]), min_size=1), manners)
def test_a_part_is_a_file_of_its_own(tmp_path, model, names, ways):
    content, spans, specs = model
    ordered = sorted(names, key=lambda name: spans[name].offset)
    chosen = [TensorSpec(name, specs[name].dtype, specs[name].shape) for name in ordered]
    arrangement = arrange(chosen)
    header = build_header(chosen, arrangement.offsets)
    moves = [(spans[name], len(header) + arrangement.offsets[name]) for name in ordered]
    with AtomicFile(tmp_path / "part", durable=False) as file:
        landing = PartLanding(file, header, moves, len(content))
        fill(landing, content, landing.blocks, ways)
        landing.complete()
    with weighlock.open(tmp_path / "part") as catalog:
        assert set(catalog) == names
        for name, ref in catalog.items():
            found = b"".join(map(bytes, ref.pieces()))
            assert found == content[spans[name].offset : spans[name].end]
