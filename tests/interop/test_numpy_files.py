"""npy and npz: what numpy writes reads as numpy reads it, lazily, by ranges too."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

import weighlock
from process.plain_server import PlainServer
from suites.counting import CountingSource
from weighlock.errors import FormatError, UnsupportedDType
from weighlock.formats.scanning import scan_source
from weighlock.sources.local import BytesSource

RANDOM = np.random.default_rng(5)
ARRAYS = {
    "b1": np.array([True, False, True]),
    **{c: np.arange(-2, 10).astype(c).reshape(3, 4) for c in ("i1", "<i2", "<i4", "<i8")},
    **{c: np.arange(12).astype(c).reshape(2, 6) for c in ("u1", "<u2", "<u4", "<u8")},
    **{c: RANDOM.standard_normal((2, 3, 4)).astype(c) for c in ("<f2", "<f4", "<f8")},
    **{c: (RANDOM.standard_normal(5) * (1 + 2j)).astype(c) for c in ("<c8", "<c16")},
    **{c: np.arange(12).astype(c).reshape(4, 3) for c in (">i2", ">f4", ">u8", ">c8", ">f8")},
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((3, 0), np.float32),
    "fortran": np.asfortranarray(RANDOM.standard_normal((5, 7, 3))),
    "fortran row": np.asfortranarray(RANDOM.standard_normal((1, 7))),
    "fortran big": np.asfortranarray(np.arange(20).astype(">f4").reshape(4, 5)),
}


def saved(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_is_what_numpy_saved(array):
    with weighlock.open(saved(array)) as catalog:
        ref = catalog["tensor"]
        loaded = ref.load()
        assert loaded.dtype == array.dtype.newbyteorder("<")
        assert loaded.shape == array.shape
        np.testing.assert_array_equal(loaded, array)
        assert b"".join(map(bytes, ref.pieces(64))) == np.ascontiguousarray(loaded).tobytes()
        if array.ndim > 1 and array.size:
            np.testing.assert_array_equal(ref[1:, ..., 0], array[1:, ..., 0])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header(version):
    buffer = io.BytesIO()
    array = np.arange(6.0).reshape(2, 3)
    np.lib.format.write_array(buffer, array, version=version)
    with weighlock.open(buffer.getvalue()) as catalog:
        np.testing.assert_array_equal(catalog["tensor"].load(), array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_an_archive_is_what_numpy_saved(tmp_path, save):
    path = tmp_path / "arrays.npz"
    named = {f"a/{name}.x": array for name, array in ARRAYS.items()} | {"W": np.ones(2), "w": ZEROS}
    save(path, **named)
    with np.load(path) as reference, weighlock.open(path) as catalog:
        assert list(catalog) == reference.files
        for name in reference.files:
            np.testing.assert_array_equal(catalog[name].load(), reference[name])
        copy = pickle.loads(pickle.dumps(catalog))
        np.testing.assert_array_equal(copy["W"].load(), [1, 1])
        catalog.check()


ZEROS = np.zeros((2, 2))


@pytest.mark.parametrize(
    "before", ["meta.json", "arrays/", "x" * 600 + ".json", "x" * 600 + ".npy"], ids=len
)
def test_an_archive_of_arrays_may_begin_with_anything(before):
    array = np.arange(6.0).reshape(2, 3)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(before, saved(array) if before.endswith(".npy") else b"")
        archive.writestr("w.npy", saved(array))
        archive.writestr("W.npy", saved(array + 1))
    catalog = weighlock.open(buffer.getvalue())
    names = ["w", "W"]
    if before.endswith(".npy"):
        names.insert(0, before.removesuffix(".npy"))
    else:
        assert catalog.notes == (f"member {before!r} is no array and left out",)
    assert list(catalog) == names
    assert np.array_equal(catalog["W"].load(), array + 1)


def test_a_directory_of_one_archive_opens_it(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    with weighlock.open(tmp_path) as catalog:
        assert list(catalog) == ["x"]


def test_what_is_no_number_is_left_out_and_named(tmp_path):
    path = tmp_path / "mixed.npz"
    np.savez(
        path,
        a=np.ones(3),
        text=np.array(["ab", "c"]),
        raw=np.array([b"ab"]),
        when=np.array(["2020-01-01"], "M8[D]"),
        objects=np.array([{}, []], object),
        record=np.zeros(3, [("x", "f4"), ("y", "i4", (2,))]),
    )
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
    with weighlock.open(path) as catalog:
        assert list(catalog) == ["a"]
        assert set(catalog.unreadable) == {"text", "raw", "when", "objects", "record"}
        assert "pickle" in catalog.unreadable["objects"]
        assert "structures" in catalog.unreadable["record"]
        assert any("readme.txt" in note for note in catalog.notes)
    with pytest.raises(UnsupportedDType, match="pickle"):
        weighlock.open(saved(np.array([{}], object), allow_pickle=True))


def test_an_archive_of_nothing_but_texts_is_a_catalog_of_nothing():
    with weighlock.open(archived(text=np.array(["a"]))) as catalog:
        assert (list(catalog), list(catalog.unreadable)) == ([], ["text"])


def test_two_arrays_in_one_file_give_the_first_and_a_note():
    with weighlock.open(saved(np.arange(3.0)) + saved(np.ones(2))) as catalog:
        np.testing.assert_array_equal(catalog["tensor"].load(), np.arange(3.0))
        assert any("bytes follow" in note for note in catalog.notes)


def test_a_slice_reads_its_rows_only(tmp_path):
    array = np.arange(1000 * 256, dtype=np.float32).reshape(1000, 256)
    for content, name in ((saved(array), "tensor"), (archived(a=array), "a")):
        source = CountingSource(BytesSource(content))
        with weighlock.open(source) as catalog:
            source.taken()
            np.testing.assert_array_equal(catalog[name][7:9], array[7:9])
            ((_, length),) = source.taken()
            assert length == 2 * 256 * 4


def archived(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_opening_by_url_takes_one_request_for_an_array_and_few_for_an_archive():
    array = np.arange(400_000, dtype=np.float32)
    files = {
        "/a.npy": saved(array),
        "/a.npz": archived(**{f"w{n}": array + n for n in range(4)}),
    }
    with PlainServer(files) as server:
        with weighlock.open(server.url("a.npy")) as catalog:
            assert len(server.asked("/a.npy")) == 1
            np.testing.assert_array_equal(catalog["tensor"][-5:], array[-5:])
            assert len(server.asked("/a.npy")) == 2
        with weighlock.open(server.url("a.npz")) as catalog:
            # The start, the end, the directory, and the head of each member but the first.
            assert len(server.asked("/a.npz")) <= 3 + 3
            before = len(server.asked("/a.npz"))
            np.testing.assert_array_equal(catalog["w3"][-5:], array[-5:] + 3)
            assert len(server.asked("/a.npz")) == before + 1


def test_commands_read_archives_of_arrays(tmp_path, weighlock_command):
    source, target = tmp_path / "a.npz", tmp_path / "a.safetensors"
    np.savez_compressed(source, x=np.asfortranarray(np.arange(12.0).reshape(3, 4)), y=np.ones(2))
    assert weighlock_command("convert", source, target).returncode == 0
    with weighlock.open(target) as catalog:
        np.testing.assert_array_equal(catalog["x"].load(), np.arange(12.0).reshape(3, 4))
    assert weighlock_command("diff", source, target).returncode == 0
    assert weighlock_command("verify", "--data", source).returncode == 0
    content = bytearray(source.read_bytes())
    content[content.index(b"y.npy") + 40] ^= 1
    source.write_bytes(content)
    assert weighlock_command("verify", "--data", source).returncode == 1


class Evil:
    def __reduce__(self):
        return os.system, ("touch /nowhere/at/all",)


@pytest.mark.parametrize("kind", ["npy", "npz", "deflated", "structure"])
def test_a_scan_finds_the_pickles_in_arrays_of_objects(kind):
    objects = np.array([Evil()], object)
    if kind == "structure":
        objects = np.array([(1, Evil())], [("n", "i4"), ("o", "O")])
    buffer = io.BytesIO()
    if kind in ("npy", "structure"):
        np.save(buffer, objects, allow_pickle=True)
    else:
        {"npz": np.savez, "deflated": np.savez_compressed}[kind](buffer, x=np.ones(3), o=objects)
    found = {(f.module, f.name): f.known for f in scan_source(BytesSource(buffer.getvalue()))}
    assert found["posix", "system"] is False
    with (
        pytest.raises(FormatError)
        if kind in ("npy", "structure")
        else weighlock.open(buffer.getvalue())
    ):
        weighlock.open(buffer.getvalue())


def test_a_scan_of_numbers_finds_nothing():
    looks_like_a_pickle = np.frombuffer(pickle.dumps(Evil()).ljust(64, b"."), np.uint8)
    for content in (saved(looks_like_a_pickle), archived(x=looks_like_a_pickle)):
        assert list(scan_source(BytesSource(content))) == []
