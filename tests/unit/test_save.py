"""Saving mappings, catalogs and iterators, into one file or several."""

import json

import numpy as np
import pytest
import torch
from unit_samples import header_of, quick_collections, same_bits, sample

import weighlock
from weighlock.errors import (
    DiskError,
    HeaderError,
    LayoutError,
    LocalProtocolError,
    NoSpace,
    UnsupportedDType,
    WeighlockError,
)
from weighlock.tensors.ref import ArrayRef

__all__ = ["quick_collections"]  # a fixture of this module

ARRAYS = {
    "embed": sample("BF16", (8, 4)),
    "layer.0": sample("F32", (4, 4)),
    "layer.1": sample("F32", (4, 4), seed=1),
    "step": np.array(3, np.int64),
    "nothing": np.zeros(0, np.float16),
}
SPECS = [(name, array.dtype, array.shape) for name, array in ARRAYS.items()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model"


def names_in(directory):
    return sorted(entry.name for entry in directory.iterdir())


def assert_holds(path, arrays, metadata=None):
    with weighlock.open(path) as catalog:
        assert list(catalog) == list(arrays)
        for name, array in arrays.items():
            assert same_bits(catalog[name].load(), array), name
        if metadata is not None:
            assert dict(catalog.metadata) == metadata


FORMS = {
    "mapping": lambda: (ARRAYS, None),
    "mapping with specs": lambda: (ARRAYS, SPECS),
    "iterator": lambda: (iter(ARRAYS.items()), None),
    "iterator with specs": lambda: (iter(ARRAYS.items()), SPECS),
    "list": lambda: (list(ARRAYS.items()), None),
    "refs": lambda: ({name: ArrayRef.of(name, array) for name, array in ARRAYS.items()}, None),
    "refs from elsewhere": lambda: (
        ((name, ArrayRef.of("other", array)) for name, array in ARRAYS.items()),
        iter(SPECS),
    ),
    "catalog": lambda: (weighlock.Catalog({n: ArrayRef.of(n, a) for n, a in ARRAYS.items()}), None),
}
every_form = pytest.mark.parametrize("form", FORMS)
one_or_several = pytest.mark.parametrize("sharded", [{}, {"max_shard_bytes": 100}], ids=repr)


@every_form
@one_or_several
def test_every_form_gives_the_same_tensors(path, form, sharded):
    tensors, specs = FORMS[form]()
    weighlock.save(path, tensors, specs, durable=False, **sharded)
    assert_holds(path, ARRAYS)
    assert names_in(path.parent) == ["model"]


@one_or_several
def test_an_iterator_in_another_order_than_its_specs(path, sharded):
    turned = [(name, ARRAYS[name]) for name in reversed(ARRAYS)]
    weighlock.save(path, iter(turned), SPECS, durable=False, **sharded)
    assert_holds(path, ARRAYS)


def gives(*pairs):
    return lambda: iter(pairs)


A, B = ("a", np.ones(3, np.float32)), ("b", np.ones(2, np.float32))
TWO = [("a", "F32", (3,)), ("b", "F32", (2,))]


class Module:
    """As torch's: some can be iterated, over modules."""

    def state_dict(self):
        return dict((A, B))

    def __iter__(self):
        return iter(())


def breaking():
    yield A
    raise RuntimeError("the iterator broke")


WRONG = {
    "too few": (gives(A), TWO, LayoutError, "'b'"),
    "none": (gives(), TWO, LayoutError, "'a'"),
    "too many": (gives(A, B, ("c", B[1])), TWO, LayoutError, "'c'"),
    "wrong name": (gives(A, ("c", B[1])), TWO, LayoutError, "'c'"),
    "wrong shape": (gives(A, ("b", A[1])), TWO, LayoutError, r"'b' was announced as F32 \[2\]"),
    "wrong dtype": (gives(A, ("b", np.ones(2))), TWO, LayoutError, "'b' was announced as F32"),
    "twice": (gives(A, A, B), TWO, LayoutError, "'a'"),
    "twice without specs": (gives(A, A), None, LayoutError, "'a'"),
    "not a tensor": (gives(A, ("b", "text")), None, LayoutError, "'b' is a str"),
    "not a name": (gives(A, (7, B[1])), None, LayoutError, "7"),
    "a type the format lacks": (
        gives(A, ("b", np.ones(2, np.complex128))),
        None,
        WeighlockError,
        "'b'",
    ),
    "no pair": (gives(A, B[1]), None, LayoutError, "a ndarray came where a pair"),
    "no tensors": (lambda: 42, None, LayoutError, "a int is no mapping"),
    "a text": (lambda: "ab", None, LayoutError, "a str is no mapping"),
    "a module": (Module, None, LayoutError, r"a Module .* pass its state_dict\(\)"),
    "specs twice": (gives(A, B), [*TWO, TWO[0]], LayoutError, "'a'"),
    "breaks off": (breaking, TWO, RuntimeError, "the iterator broke"),
    "breaks off without specs": (breaking, None, RuntimeError, "the iterator broke"),
}


@pytest.mark.parametrize("case", WRONG)
@one_or_several
def test_what_is_wrong_is_refused_by_name_and_leaves_the_destination(path, case, sharded, no_leaks):
    make, specs, error, says = WRONG[case]
    if not sharded:
        path.write_bytes(b"before")
    with pytest.raises(error, match=says):
        weighlock.save(path, make(), specs, **sharded)
    if sharded:
        assert names_in(path.parent) == []
    else:
        assert names_in(path.parent) == ["model"]
        assert path.read_bytes() == b"before"


@pytest.mark.parametrize("value", [np.ones(2, np.complex128), torch.ones(2).to(torch.complex128)])
def test_double_complex_numbers_have_no_place_in_the_format(path, value):
    with pytest.raises(WeighlockError, match="'phase'"):
        weighlock.save(path, {"phase": value})
    assert names_in(path.parent) == []


def test_a_file_is_replaced_by_another(path):
    weighlock.save(path, {"old": np.ones(3)}, durable=False)
    weighlock.save(path, ARRAYS, durable=False)
    assert_holds(path, ARRAYS)


def test_a_catalog_can_be_saved_over_the_file_it_lies_in(path):
    weighlock.save(path, ARRAYS, durable=False)
    with weighlock.open(path) as catalog:
        part = catalog.select("layer.*").rename(lambda name: f"model.{name}")
        weighlock.save(path, part, durable=False)
    assert_holds(path, {f"model.{name}": ARRAYS[name] for name in ("layer.0", "layer.1")})


def test_a_link_is_replaced_not_followed(path):
    target = path.parent / "target"
    target.write_bytes(b"before")
    path.symlink_to(target)
    weighlock.save(path, ARRAYS, durable=False)
    assert target.read_bytes() == b"before"
    assert not path.is_symlink()


def test_the_mode_of_a_new_file_is_that_of_any_new_file(path):
    weighlock.save(path, ARRAYS, durable=False)
    (path.parent / "plain").write_bytes(b"")
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def test_names_no_encoding_knows_are_paths_too(tmp_path):
    """Names of files are bytes: what is not UTF-8 comes to Python as lone surrogates."""
    path = tmp_path / b"\xff\xfe.safetensors".decode(errors="surrogateescape")
    weighlock.save(path, ARRAYS, durable=False)
    assert_holds(path, ARRAYS)
    weighlock.save(f"{path}.d", ARRAYS, durable=False, max_shard_bytes=100)
    assert_holds(f"{path}.d", ARRAYS)


def test_the_longest_name_a_file_can_have(tmp_path):
    for name in ("a" * 255, "ü" * 127):
        weighlock.save(tmp_path / name, {"a": np.ones(3)}, durable=False)
        assert_holds(tmp_path / name, {"a": np.ones(3)})


def test_metadata(path):
    weighlock.save(path, ARRAYS, metadata={"step": "7"}, durable=False)
    assert_holds(path, ARRAYS, {"step": "7"})
    with pytest.raises(HeaderError, match="'step' is 8"):
        weighlock.save(path, ARRAYS, metadata={"step": 8}, durable=False)
    assert_holds(path, ARRAYS, {"step": "7"})


def test_a_catalog_keeps_its_own_metadata_unless_other_is_given(path):
    weighlock.save(path, ARRAYS, metadata={"step": "7"}, durable=False)
    with weighlock.open(path) as catalog:
        weighlock.save(path.parent / "kept", catalog, durable=False)
        weighlock.save(path.parent / "other", catalog, metadata={"a": "b"}, durable=False)
        weighlock.save(path.parent / "none", catalog, metadata={}, durable=False)
    assert_holds(path.parent / "kept", ARRAYS, {"step": "7"})
    assert_holds(path.parent / "other", ARRAYS, {"a": "b"})
    assert_holds(path.parent / "none", ARRAYS, {})


def test_metadata_survives_shards_and_back(path):
    weighlock.save(path, ARRAYS, metadata={"step": "7"}, durable=False, max_shard_bytes=100)
    with weighlock.open(path) as catalog:
        weighlock.save(path.parent / "one", catalog, durable=False)
    assert_holds(path.parent / "one", ARRAYS, {"step": "7"})


def test_progress_counts_every_byte(path):
    total = sum(array.nbytes for array in ARRAYS.values())
    for options in ({}, {"max_shard_bytes": 100}):
        steps = []
        where = path.parent / f"model{len(options)}"
        weighlock.save(where, ARRAYS, durable=False, progress=steps.append, **options)
        assert sum(steps) == total
        with weighlock.open(where) as catalog:
            steps.clear()
            weighlock.save(path, catalog, durable=False, progress=steps.append)
            assert sum(steps) == total


# Tied tensors.


def tied_arrays():
    array = sample("F32", (4, 6))
    return {"embed": array, "other": array[:2], "head": array, "copy": array.copy()}


def tied_tensors():
    tensor = torch.arange(24.0).reshape(4, 6)
    return {
        "embed": torch.nn.Parameter(tensor),
        "other": tensor[:2],
        "head": tensor,
        "copy": tensor.clone(),
    }


def tied_refs():
    return {name: ArrayRef.of("anything", array) for name, array in tied_arrays().items()}


TIED = {"numpy": tied_arrays, "torch": tied_tensors, "refs": tied_refs}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("sharded", [{}, {"max_shard_bytes": 100}, {"max_shard_bytes": 1}])
def test_tied_tensors_are_written_once_or_once_for_each_name(path, kind, sharded):
    for tied, nbytes, metadata in [("copy", 336, {}), ("alias", 240, {"head": "embed"})]:
        tensors = TIED[kind]()
        where = path.parent / tied
        weighlock.save(where, tensors, tied=tied, durable=False, **sharded)
        with weighlock.open(where) as catalog:
            assert set(catalog) == set(tensors)
            assert catalog.nbytes == nbytes
            assert same_bits(catalog["head"].load(), catalog["embed"].load())
            assert same_bits(catalog["other"].load(), catalog["embed"][:2])
            same = catalog["head"].identity() == catalog["embed"].identity()
            assert same == (tied == "alias")
            if not sharded:
                pt = {"format": "pt"} if kind == "torch" else {}
                assert dict(catalog.metadata) == metadata | pt


@pytest.mark.parametrize("sharded", [{}, {"max_shard_bytes": 100}])
def test_tied_tensors_stay_tied_or_not_from_file_to_file(path, sharded):
    weighlock.save(path, tied_arrays(), tied="alias", durable=False, **sharded)
    with weighlock.open(path) as catalog:
        weighlock.save(path.parent / "alias", catalog, tied="alias", durable=False)
        weighlock.save(path.parent / "copy", catalog, durable=False)
        assert catalog.nbytes == 240
    with weighlock.open(path.parent / "alias") as catalog:
        assert catalog.nbytes == 240
        assert dict(catalog.metadata) == {"head": "embed"}
    with weighlock.open(path.parent / "copy") as catalog:
        assert catalog.nbytes == 336
        assert dict(catalog.metadata) == {}


def test_a_name_left_out_does_not_come_back_as_an_alias(path):
    weighlock.save(path, tied_arrays(), tied="alias", durable=False)
    with weighlock.open(path) as catalog:
        part = catalog.select("embed", "other")
        weighlock.save(path.parent / "part", part, durable=False)
        kept_alias = catalog.select("head")
        weighlock.save(path.parent / "head", kept_alias, durable=False)
    with weighlock.open(path.parent / "part") as catalog:
        assert sorted(catalog) == ["embed", "other"]
    with weighlock.open(path.parent / "head") as catalog:
        assert sorted(catalog) == ["head"]


def test_a_name_changed_does_not_come_back_as_an_alias(path):
    weighlock.save(path, tied_arrays(), tied="alias", durable=False)
    for tied in ("copy", "alias"):
        with weighlock.open(path) as catalog:
            renamed = catalog.rename({"head": "lm_head"})
            weighlock.save(path.parent / tied, renamed, tied=tied, durable=False)
        with weighlock.open(path.parent / tied) as catalog:
            assert sorted(catalog) == ["copy", "embed", "lm_head", "other"]
            assert same_bits(catalog["lm_head"].load(), catalog["embed"].load())


def test_two_byte_orders_of_one_memory_are_not_tied(path):
    array = np.arange(4, dtype="<f4")
    swapped = array.view(">f4")
    weighlock.save(path, {"a": array, "b": swapped}, tied="alias", durable=False)
    assert_holds(path, {"a": array, "b": swapped.astype("<f4")})


def test_empty_tensors_are_never_tied(path):
    empty = np.zeros((0, 3), np.float32)
    weighlock.save(path, {"a": empty, "b": empty}, tied="alias", durable=False)
    assert_holds(path, {"a": empty, "b": empty}, {})


def test_an_alias_that_the_metadata_would_hide_is_refused(path):
    array = np.ones(3)
    with pytest.raises(LayoutError, match="'head' is tied to 'embed', but the metadata"):
        weighlock.save(path, {"embed": array, "head": array}, metadata={"head": "x"}, tied="alias")
    with pytest.raises(LayoutError, match="'format' is tied"):
        weighlock.save(path, {"embed": array, "format": array}, tied="alias")
    assert names_in(path.parent) == []


def test_an_iterator_cannot_be_tied(path):
    with pytest.raises(LayoutError, match="needs a mapping"):
        weighlock.save(path, iter(ARRAYS.items()), tied="alias")


# Shards.


@pytest.mark.parametrize("specs", [SPECS, None])
def test_shards_are_named_and_indexed_as_is_the_custom(path, specs):
    weighlock.save(path, iter(ARRAYS.items()), specs, durable=False, max_shard_bytes=100)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert names_in(path) == [*shards, "model.safetensors.index.json"]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 64 + 64 + 64 + 8},
        "weight_map": {
            "embed": shards[0],
            "layer.0": shards[1],
            "layer.1": shards[2],
            "step": shards[2],
            "nothing": shards[2],
        },
    }
    for shard in shards:
        header, _ = header_of(path / shard)
        assert all(index["weight_map"][name] == shard for name in header)


@pytest.mark.parametrize("specs", [True, False])
def test_a_tensor_larger_than_a_shard_has_one_of_its_own(path, specs):
    arrays = {"a": np.zeros(1), "large": np.zeros(100), "b": np.zeros(1), "c": np.zeros(1)}
    announced = [(n, "F64", a.shape) for n, a in arrays.items()] if specs else None
    weighlock.save(path, iter(arrays.items()), announced, durable=False, max_shard_bytes=16)
    with weighlock.open(path) as catalog:
        assert [list(shard) for shard in catalog.shards().values()] == [
            ["a"],
            ["large"],
            ["b", "c"],
        ]


@pytest.mark.parametrize("tensors", [{}, iter(())], ids=["mapping", "iterator"])
def test_no_tensors_are_one_empty_shard(path, tensors):
    weighlock.save(path, tensors, durable=False, max_shard_bytes=100)
    assert names_in(path)[0] == "model-00001-of-00001.safetensors"
    with weighlock.open(path) as catalog:
        assert len(catalog) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_shard_must_hold_something(path, size):
    with pytest.raises(LocalProtocolError, match="max_shard_bytes"):
        weighlock.save(path, ARRAYS, max_shard_bytes=size)
    assert names_in(path.parent) == []


def test_shards_go_to_a_new_or_empty_directory_only(path, no_leaks):
    path.mkdir()
    weighlock.save(path, ARRAYS, durable=False, max_shard_bytes=100)
    assert_holds(path, ARRAYS)
    before = names_in(path)
    with pytest.raises(DiskError, match="not an empty directory"):
        weighlock.save(path, ARRAYS, max_shard_bytes=100)
    assert names_in(path) == before
    file = path.parent / "file"
    file.write_bytes(b"before")
    with pytest.raises(DiskError, match="not an empty directory"):
        weighlock.save(file, ARRAYS, max_shard_bytes=100)
    assert file.read_bytes() == b"before"


def test_shards_that_cannot_fit_are_refused_before_any_work(path, no_leaks):
    with pytest.raises(NoSpace, match="bytes are needed"):
        weighlock.save(path, iter(()), [("a", "U8", (1 << 55,))], max_shard_bytes=1 << 30)
    assert names_in(path.parent) == []


FEW_DESCRIPTORS = """
import resource, sys
import numpy as np
import weighlock

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
arrays = {f"t{n}": np.full(10, n) for n in range(200)}
specs = [(name, "I64", (10,)) for name in arrays]
where = sys.argv[1]
weighlock.save(f"{where}/mapping", arrays, durable=False, max_shard_bytes=80)
weighlock.save(f"{where}/iterator", iter(arrays.items()), durable=False, max_shard_bytes=80)
weighlock.save(f"{where}/in-order", iter(arrays.items()), specs, durable=False, max_shard_bytes=80)
for name in ("mapping", "iterator", "in-order"):
    catalog = weighlock.open(f"{where}/{name}")
    assert len(catalog.shards()) == 200
    for _ in range(2):
        for n in range(200):
            assert (catalog[f"t{n}"].load() == n).all()
    kept = list(catalog.values())
    assert len({int(ref.load()[0]) for ref in kept}) == 200
    catalog.close()
print("fine")
"""


def test_two_hundred_shards_need_few_descriptors(tmp_path, run_python):
    assert run_python(FEW_DESCRIPTORS, tmp_path).stdout == "fine\n"


def test_shards_say_what_is_wrong_and_not_where_they_were_staged(path):
    def wrong(tensors):
        with pytest.raises(LayoutError) as caught:
            weighlock.save(path, tensors, specs=SPECS, max_shard_bytes=64)
        assert not path.exists()
        return str(caught.value)

    pairs = list(ARRAYS.items())
    assert wrong([*pairs, pairs[0]]) == "tensor 'embed' came twice"  # its shard is finished
    assert wrong([pairs[0], pairs[0]]) == "tensor 'embed' came twice"
    assert wrong(pairs[1:]) == f"{path}: tensor 'embed' was never written"
    assert wrong([]) == f"{path}: tensor 'embed' and 4 more was never written"


def test_another_way_to_write_tied_tensors_is_refused(path):
    with pytest.raises(LayoutError, match="tied='once'"):
        weighlock.save(path, ARRAYS, tied="once")
    assert not path.exists()


def test_a_dtype_that_cannot_be_announced_is_refused_by_name(path):
    with pytest.raises(UnsupportedDType, match="tensor 'a': dtype 'F99'"):
        weighlock.save(path, {}, specs=[("a", "F99", (2,))])
    assert not path.exists()


def test_a_last_tensor_larger_than_a_shard_is_followed_by_no_empty_one(tmp_path):
    arrays = {"a": np.zeros(4, np.float32), "b": np.zeros(100, np.float32)}
    for name, tensors in (("mapped", arrays), ("streamed", iter(arrays.items()))):
        weighlock.save(tmp_path / name, tensors, durable=False, max_shard_bytes=40)
        shards = [path.name for path in (tmp_path / name).glob("*.safetensors")]
        assert sorted(shards) == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]


def test_many_names_of_which_one_is_there_twice(path):
    """Looking for it must not take a look at all others for each."""
    specs = [(f"t{number}", "u8", (1,)) for number in (*range(20_000), 19_999)]
    with pytest.raises(LayoutError, match="'t19999' is named twice"):
        weighlock.save(path, iter(()), specs, max_shard_bytes=100)


def test_metadata_that_would_be_read_as_another_name_is_refused(path):
    tensors = {"w": np.zeros(2, np.float32)}
    with pytest.raises(LayoutError, match=r"'best_layer' is 'w', the name of a tensor"):
        weighlock.save(path, tensors, metadata={"best_layer": "w"})
    assert not path.exists()
    weighlock.save(path, tensors, metadata={"best_layer": "layer w", "format": "w"})
    assert list(weighlock.open(path)) == ["w"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_name_that_readers_would_refuse_is_not_written(path, is_streamed):
    tensors = {"n" * 5000: np.zeros(2, np.float32)}
    given = iter(tensors.items()) if is_streamed else tensors
    with pytest.raises(weighlock.errors.LimitExceeded, match=r"5,000 asked, 4,096 allowed"):
        weighlock.save(path, given)
    assert not path.exists()
    weighlock.save(path, tensors, limits=weighlock.Limits(name_bytes=8192))
    assert list(weighlock.open(path, limits=weighlock.Limits(name_bytes=8192))) == list(tensors)


@pytest.mark.parametrize("order", [["b"], ["a", "c"], ["a", "b", "b"], []])
def test_an_order_of_other_names_is_refused(path, order):
    with pytest.raises(LayoutError, match="data_order must name every tensor"):
        weighlock.Writer(path, [("a", "f32", (2,)), ("b", "f32", (2,))], data_order=order)


def test_specs_may_be_a_mapping_of_the_same_names(path):
    specs = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}
    weighlock.save(path, iter(ARRAYS.items()), specs)
    with weighlock.open(path) as catalog:
        assert list(catalog) == list(ARRAYS)
        weighlock.save(path.parent / "again", iter(ARRAYS.items()), catalog)


def test_sizes_are_numbers(path):
    with pytest.raises(TypeError, match="max_shard_bytes must be a whole number, not '5GB'"):
        weighlock.save(path, ARRAYS, max_shard_bytes="5GB")


def test_texts_of_a_sharded_model_are_the_catalogs(tmp_path):
    tensors = {"a": np.arange(3.0), "b": np.arange(4.0)}
    weighlock.save(tmp_path / "m", tensors, metadata={"author": "me"}, max_shard_bytes=24)
    with weighlock.open(tmp_path / "m") as catalog:
        assert dict(catalog.metadata) == {"author": "me", "total_size": "56"}
        weighlock.save(tmp_path / "one", catalog)
    with weighlock.open(tmp_path / "one") as catalog:
        assert dict(catalog.metadata) == {"author": "me"}


@pytest.mark.parametrize("count", [70_000, 150_000])
def test_what_is_written_beside_tensors_can_be_read(tmp_path, count):
    one = np.ones(3)
    texts = {f"key {number}": "text" for number in range(count)}
    weighlock.save(tmp_path / "texts", {"a": one}, metadata=texts, durable=False)
    with weighlock.open(tmp_path / "texts") as catalog:
        assert len(catalog.metadata) == count
    names = {f"k{number}": one for number in range(count)}
    weighlock.save(tmp_path / "names", names, tied="alias", durable=False)
    with weighlock.open(tmp_path / "names") as catalog:
        assert len(catalog) == count


def test_more_beside_tensors_than_readers_take_is_refused(tmp_path):
    texts = {str(number): "" for number in range(300_000)}
    with pytest.raises(HeaderError, match="metadata of 300,000 entries"):
        weighlock.save(tmp_path / "texts", {"a": np.ones(3)}, metadata=texts)
    assert not list(tmp_path.iterdir())
