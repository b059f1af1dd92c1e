"""How much memory the library adds to what it is given: a few buffers, whatever the tensors."""

import shutil

import pytest
from measuring import MB, added_by, needs_room, sparse

pytestmark = pytest.mark.memory


@pytest.fixture
def directory(tmp_path):
    """A directory for large files, emptied at once: pytest keeps those of the last runs."""
    needs_room(tmp_path, 1_000 * MB)
    yield tmp_path
    shutil.rmtree(tmp_path)


SAVES = {
    "a mapping": """
arrays = {f"t{n}": np.ones((25, 1_000_000), np.float32) for n in range(3)}
with measured():
    weighlock.save(f"{directory}/out", arrays, durable=False)
""",
    "a generator of arrays that exist": """
arrays = {f"t{n}": np.ones((25, 1_000_000), np.float32) for n in range(3)}
with measured():
    weighlock.save(f"{directory}/out", iter(arrays.items()), durable=False)
""",
    "a transposed array": """
array = np.ones((5_000, 10_000), np.float32).T
with measured():
    weighlock.save(f"{directory}/out", {"a": array}, durable=False)
""",
    "a transposed bfloat16 array": """
array = np.ones((10_000, 10_000), np.uint16).view(DType.BF16.numpy).T
with measured():
    weighlock.save(f"{directory}/out", {"a": array}, durable=False)
""",
    "an array of the other byte order": """
array = np.ones(50_000_000, ">f4")
with measured():
    weighlock.save(f"{directory}/out", {"a": array}, durable=False)
""",
    "an array that repeats one number": """
array = np.broadcast_to(np.float32(1), (50_000, 1_000))
with measured():
    weighlock.save(f"{directory}/out", {"a": array}, durable=False)
""",
    "4-bit numbers": """
array = np.ones((10_000, 20_000), np.uint8).view(DType.F4.numpy)
with measured():
    weighlock.save(f"{directory}/out", {"a": array}, durable=False)
""",
    "many small arrays": """
arrays = {f"t{n}": np.ones(1000, np.float32) for n in range(20_000)}
with measured():
    weighlock.save(f"{directory}/out", arrays, durable=False)
""",
    "shards": """
arrays = {f"t{n}": np.ones((10, 1_000_000), np.float32) for n in range(5)}
with measured():
    weighlock.save(f"{directory}/out", arrays, durable=False, max_shard_bytes=50_000_000)
""",
    "a file whose header outgrew its room": """
array = np.ones(50_000_000, np.float32)
with measured():
    with weighlock.Writer(f"{directory}/out", header_bytes=0, durable=False) as writer:
        writer.write("a" * 1000, array)
""",
}


@pytest.mark.parametrize("case", SAVES)
def test_saving_from_memory_adds_at_most_32_mb(case, directory):
    assert max(added_by(SAVES[case], directory)) <= 32 * MB


@pytest.mark.slow
def test_saving_torch_tensors_adds_at_most_32_mb(directory):
    script = """
import torch

torch.set_num_threads(1)
weighlock.save(f"{directory}/small", {"a": torch.ones(2, 3).T}, durable=False)
for make in (
    lambda: {f"t{n}": torch.ones(10, 1_000_000) for n in range(3)},
    lambda: {"a": torch.ones(5_000, 10_000).T},
    lambda: {"a": torch.ones(1_000).expand(50_000, 1_000)},
    lambda: {"a": torch.ones(20_000_000, dtype=torch.complex64).conj()},
):
    tensors = make()
    with measured():
        weighlock.save(f"{directory}/out", tensors, durable=False)
    del tensors
"""
    added = added_by(script, directory)
    assert len(added) == 4
    assert max(added) <= 32 * MB


REFS = {
    "a catalog": "weighlock.save(f'{directory}/out', catalog, durable=False)",
    "a generator": "weighlock.save(f'{directory}/out', pairs, durable=False)",
    "a generator with specs": "weighlock.save(f'{directory}/out', pairs, specs, durable=False)",
    "a generator into shards": (
        "weighlock.save(f'{directory}/out', pairs, durable=False, max_shard_bytes=10**8)"
    ),
    "casts": "weighlock.save(f'{directory}/out', casts, durable=False)",
}


@pytest.mark.parametrize("case", REFS)
def test_saving_refs_adds_at_most_32_mb(case, directory):
    sparse(directory / "in", "F32", (3_000, 25_000), 300 * MB)
    script = f"""
from weighlock.tensors.convert import CastRef

catalog = weighlock.open(f"{{directory}}/in")
pairs = ((name, ref) for name, ref in catalog.items())
specs = [ref.spec for ref in catalog.values()]
casts = {{name: CastRef.of(ref, DType.BF16) for name, ref in catalog.items()}}
with measured():
    {REFS[case]}
"""
    assert max(added_by(script, directory)) <= 32 * MB


LOADS = {
    "an array": """
target = np.ones((20_000, 2_500), np.float32)
with measured():
    ref.load(out=target)
""",
    "a scattered array": """
target = np.ones((2_500, 20_000), np.float32).T
with measured():
    ref.load(out=target)
""",
    "a catalog into arrays": """
target = np.ones((20_000, 2_500), np.float32)
with measured():
    catalog.load_into({"weight": target})
""",
    "a catalog into arrays of another dtype": """
target = np.ones((20_000, 2_500), np.float64)
with measured():
    catalog.load_into({"weight": target}, cast=True)
""",
    "one row": """
with measured():
    ref[5]
""",
    "a column": """
with measured():
    ref[:, 7]
""",
    "every tenth element of every row": """
with measured():
    for first in range(0, 20_000, 1_000):
        ref[first : first + 1_000, ::10]
""",
    "its pieces": """
with measured():
    for piece in ref.pieces():
        pass
""",
}


@pytest.mark.parametrize("case", LOADS)
def test_loading_adds_at_most_32_mb_to_its_target(case, directory):
    sparse(directory / "in", "F32", (20_000, 2_500), 200 * MB)
    script = f"""
catalog = weighlock.open(f"{{directory}}/in")
ref = catalog["weight"]
{LOADS[case]}
"""
    assert max(added_by(script, directory)) <= 32 * MB


SHAPES = [(1, 25_000_000), (2, 12_500_000), (25_000_000,), (12_500_000, 2)]


def test_casting_into_arrays_holds_no_whole_row(directory):
    for shape in SHAPES:
        sparse(directory / f"{shape[0]}", "F32", shape, 100 * MB)
    script = f"""
for shape in {SHAPES}:
    target = np.ones(shape, np.float64)
    catalog = weighlock.open(f"{{directory}}/{{shape[0]}}")
    with measured():
        catalog.load_into({{"weight": target}}, cast=True)
"""
    assert [added <= 64 * MB for added in added_by(script, directory)] == [True] * len(SHAPES)


@pytest.mark.slow
def test_casting_into_tensors_holds_no_whole_row(directory):
    for shape in SHAPES:
        sparse(directory / f"{shape[0]}", "F32", shape, 100 * MB)
    script = f"""
import torch

torch.set_num_threads(1)
weighlock.open(f"{{directory}}/1").select().load_into({{}})
for shape in {SHAPES}:
    target = torch.ones(shape, dtype=torch.float64)
    catalog = weighlock.open(f"{{directory}}/{{shape[0]}}")
    with measured():
        catalog.load_into({{"weight": target}}, cast=True)
"""
    assert [added <= 64 * MB for added in added_by(script, directory)] == [True] * len(SHAPES)


def test_loading_takes_its_own_array_and_no_more(directory):
    sparse(directory / "in", "F32", (20_000, 2_500), 200 * MB)
    script = """
catalog = weighlock.open(f"{directory}/in")
with measured():
    catalog["weight"].load()
"""
    (added,) = added_by(script, directory)
    assert 190 * MB <= added <= 232 * MB


def test_opening_many_tensors_takes_little(directory):
    script = """
arrays = {f"model.layers.{n}.weight": np.zeros(1, np.uint8) for n in range(20_000)}
weighlock.save(f"{directory}/in", arrays, durable=False)
with measured():
    catalog = weighlock.open(f"{directory}/in")
    list(catalog.values())
"""
    assert max(added_by(script, directory)) <= 64 * MB


@pytest.mark.parametrize("mib", [4, 5, 6, 7.9, 33])
def test_tensors_that_are_loaded_take_their_own_size(directory, mib):
    """Whatever is reserved so that they begin on huge pages is never touched."""
    each, count = int(mib * 1024 * 1024), int(200 // mib)
    (added,) = added_by(
        f"""
path = f"{{directory}}/model.safetensors"
arrays = {{f"t{{n}}": np.ones({each}, np.uint8) for n in range({count})}}
weighlock.save(path, arrays, durable=False)
del arrays
catalog = weighlock.open(path)
with measured():
    arrays = catalog.load()
""",
        directory,
    )
    assert added < each * count * 1.05 + 8 * MB
