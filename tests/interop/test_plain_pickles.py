"""What pickle.dump wrote of arrays, tensors and modules opens as what it was; nothing runs."""

import os
import pickle
import struct
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch

import weighlock
from hostile.watching import watched
from process.plain_server import PlainServer
from weighlock.errors import FormatError, LayoutError, LimitExceeded, TruncatedFile, WeighlockError
from weighlock.formats.torch_names import is_known
from weighlock.limits import Limits

ARRAY = np.arange(12.0).reshape(3, 4)
TENSOR = torch.arange(12.0).reshape(3, 4)
THINGS = {
    "arrays": {"c": ARRAY, "f": np.asfortranarray(ARRAY), "big endian": ARRAY.astype(">i4")},
    "an ordered dict": OrderedDict(b=ARRAY > 3, a=np.float16(2.5)),
    "nested": {"layers": [{"w": ARRAY[:, ::2], "empty": np.empty((0, 2), np.int8)}], "epoch": 3},
    "tensors": {"w": TENSOR, "t": TENSOR.T, "b": TENSOR.bfloat16(), "s": torch.tensor(7)},
    "both": {"w": torch.nn.Parameter(TENSOR), "n": ARRAY},
}


def flat(thing, path=()):
    if isinstance(thing, (dict, list)):
        for key, value in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield from flat(value, (*path, str(key)))
    elif not isinstance(thing, int):
        yield ".".join(path), thing


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("thing", THINGS.values(), ids=THINGS)
def test_tensors_are_what_they_were(thing, protocol, no_leaks):
    with weighlock.open(pickle.dumps(thing, protocol)) as catalog:
        wanted = dict(flat(thing))
        assert list(catalog) == list(wanted)
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(catalog[name].torch(), value.detach()), name
            else:
                assert np.array_equal(catalog[name].load(), value), name
                assert catalog[name].load().dtype == np.asarray(value).dtype.newbyteorder("=")
        assert catalog.extras.get("epoch") == (3 if "epoch" in thing else None)


def python2_string(raw, code):
    if code == "STRING":
        return b"S" + repr(raw).removeprefix("b").encode() + b"\n"
    if code == "SHORT_BINSTRING":
        return b"U" + bytes([len(raw)]) + raw
    return b"T" + struct.pack("<I", len(raw)) + raw


def python2_array(array, code):
    """What numpy wrote where bytes and text were one type."""
    kind = b"cnumpy\ndtype\n(U\x02" + array.dtype.str[1:].encode() + b"K\0K\x01tR"
    kind += b"(K\x03U\x01<NNNI-1\nI-1\nK\0tb"
    data = python2_string(array.tobytes(), code)
    if array.shape == ():
        return b"cnumpy.core.multiarray\nscalar\n(" + kind + data + b"tR"
    shape = b"(" + b"".join(b"I%d\n" % size for size in array.shape) + b"t"
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\x01btR"
    return made + b"(K\x01" + shape + kind + b"\x89" + data + b"tb"


@pytest.mark.parametrize("code", ["STRING", "SHORT_BINSTRING", "BINSTRING"])
def test_arrays_of_python_2_are_read_whatever_their_bytes_are(code):
    arrays = {
        "not text": np.array([1.5, -2], "f4"),
        "zeros": np.zeros((2, 3), "f8"),
        "ascii": np.frombuffer(b"0123456789abcdef", "<i4"),
        "utf-8": np.frombuffer("äöüß€€xx".encode(), "u1"),
        "number": np.asarray(np.float64(0)),
    }
    if code != "SHORT_BINSTRING":
        arrays["long"] = np.zeros(1000, "f4")
        arrays["long utf-8"] = np.frombuffer(("é" * 1000).encode(), "<i2")
    pairs = [(python2_string(name.encode(), code), array) for name, array in arrays.items()]
    raw = b"".join(name + python2_array(array, code) for name, array in pairs)
    raw = b"\x80\x02}(" + raw + b"u."
    wanted = pickle.loads(raw, encoding="latin1")
    catalog = weighlock.open(raw)
    assert list(catalog) == list(arrays)
    assert catalog.unreadable == {}
    for name, value in wanted.items():
        assert np.array_equal(catalog[name].load(), value), name
        assert catalog[name].load().dtype == value.dtype


def test_an_array_of_python_2_of_another_length_is_refused():
    array = np.frombuffer(("é" * 1000).encode(), "<i2")
    raw = b"\x80\x02" + python2_array(array, "BINSTRING") + b"."
    for size in (999, 1001, 500):
        with pytest.raises(LayoutError, match=f"takes {2 * size:,} bytes, [12],000 are there"):
            weighlock.open(raw.replace(b"I1000\n", b"I%d\n" % size))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", "BF16"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    ],
)
def test_arrays_of_types_that_numpy_lacks(name, dtype, protocol):
    array = np.arange(1, 13).reshape(3, 4).astype(getattr(ml_dtypes, name))
    thing = {"c": array, "f": np.asfortranarray(array), "number": array[0, 1]}
    catalog = weighlock.open(pickle.dumps(thing, protocol))
    assert list(catalog) == ["c", "f", "number"]
    for key, ref in catalog.items():
        assert ref.dtype == dtype
        assert ref.load().tobytes() == thing[key].tobytes()
    assert catalog.extras == {"number": 2.0}
    assert all(is_known(*name) for name in catalog.globals if name[0] == "ml_dtypes")


def test_arrays_of_types_that_nothing_else_has_are_named():
    array = np.zeros(3, ml_dtypes.int4)
    catalog = weighlock.open(pickle.dumps({"a": array, "w": ARRAY}, 4))
    assert list(catalog) == ["w"]
    assert list(catalog.unreadable) == ["a"]


def test_one_array_one_tensor_and_a_module():
    assert np.array_equal(weighlock.open(pickle.dumps(ARRAY))["tensor"].load(), ARRAY)
    assert torch.equal(weighlock.open(pickle.dumps(TENSOR))["tensor"].torch(), TENSOR)
    module = torch.nn.Linear(2, 3)
    catalog = weighlock.open(pickle.dumps(module))
    assert list(catalog) == ["weight", "bias"]
    assert torch.equal(catalog["bias"].torch(), module.bias.detach())


def test_commands_and_urls(tmp_path, weighlock_command):
    path, target = tmp_path / "weights.pkl", tmp_path / "out.safetensors"
    path.write_bytes(pickle.dumps(THINGS["both"]))
    assert weighlock_command("convert", path, target).returncode == 0
    assert weighlock_command("diff", path, target).returncode == 0
    with PlainServer({"/x.pkl": path.read_bytes()}) as server:
        fetched = weighlock.fetch(server.url("x.pkl"))
        assert torch.equal(fetched["w"].torch(), TENSOR)
        assert np.array_equal(dict(weighlock.stream(server.url("x.pkl")))["n"], ARRAY)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /nowhere/at/all",)


open_catalog = weighlock.open  # imported before anything is watched


def test_code_in_it_is_inert_and_found(tmp_path):
    raw = pickle.dumps({"w": ARRAY, "evil": Evil(), "t": TENSOR})
    with watched(tmp_path) as seen:
        catalog = open_catalog(raw)
        assert catalog["w"].load().tobytes() == ARRAY.tobytes()
    assert seen == []
    assert ("posix", "system") in catalog.globals
    assert "posix.system" in str(catalog.extras["evil"])


def test_what_follows_is_noted():
    catalog = weighlock.open(pickle.dumps(ARRAY) + b"more")
    assert any("4 bytes follow" in note for note in catalog.notes)


WHOLE = pickle.dumps({"w": ARRAY, "t": TENSOR}, 4)


def test_what_holds_nothing_is_refused():
    for thing in ({"a": 1}, [1, "x"], Evil(), {}):
        for protocol in range(6):
            with pytest.raises(FormatError):
                weighlock.open(pickle.dumps(thing, protocol))
    with pytest.raises(FormatError, match="without tensors or arrays"):
        weighlock.open(pickle.dumps({"a": 1}))


def test_what_is_cut_off_too_long_or_points_outside_is_refused():
    for end in range(2, len(WHOLE) - 1, 7):
        with pytest.raises(WeighlockError):
            weighlock.open(WHOLE[:end])
    with pytest.raises(LimitExceeded, match="bytes of the pickle"):
        weighlock.open(WHOLE, Limits(pickle_bytes=len(WHOLE) - 1))
    with pytest.raises(FormatError):
        weighlock.open(b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.")


def test_a_storage_that_does_not_lie_in_it_is_refused(tmp_path):
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if isinstance(obj, torch.storage.UntypedStorage | torch.storage.TypedStorage):
                return "storage", torch.FloatStorage, "0", "cpu", 12
            return None

    with open(tmp_path / "x.pkl", "wb") as file:
        Pickler(file, 2).dump({"w": TENSOR})
    with pytest.raises(TruncatedFile, match=r"x\.pkl: tensor 'w': storage '0' does not lie"):
        weighlock.open(tmp_path / "x.pkl")


def test_every_changed_byte_is_a_catalog_or_an_error_of_ours():
    for place in range(0, len(WHOLE), 3):
        for value in (0, 0xFF, WHOLE[place] ^ 1):
            changed = bytearray(WHOLE)
            changed[place] = value
            try:
                for ref in weighlock.open(bytes(changed)).values():
                    ref.load()
            except WeighlockError:
                continue
