"""Loading into arrays and parameters that exist: checked first, then filled."""

import numpy as np
import pytest
import torch
from unit_samples import WHOLE_BYTES, same_bits, sample, tensor_of

import weighlock
from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.torch import TorchRef


def catalog_of(**arrays):
    return Catalog({name: ArrayRef.of(name, np.asarray(array)) for name, array in arrays.items()})


@pytest.fixture(params=["memory", "file"])
def made(request, tmp_path):
    """Makes a catalog of arrays, in memory or in a file."""
    opened = []

    def make(**arrays):
        if request.param == "memory":
            return catalog_of(**arrays)
        weighlock.save(tmp_path / "a.safetensors", arrays, durable=False)
        opened.append(weighlock.open(tmp_path / "a.safetensors"))
        return opened[-1]

    yield make
    for catalog in opened:
        catalog.close()


@pytest.mark.parametrize("dtype", [*WHOLE_BYTES, DType.F4])
def test_arrays_of_every_dtype(made, dtype):
    array = sample(dtype, (4, 6))
    target = {"a": np.zeros_like(array)}
    kept = target["a"]
    report = made(a=array).load_into(target)
    assert (report.missing, report.unexpected) == ((), ())
    assert target["a"] is kept
    assert same_bits(kept, array)


@pytest.mark.parametrize("dtype", [*WHOLE_BYTES, DType.F4])
def test_tensors_of_every_dtype(made, dtype):
    array = sample(dtype, (4, 6))
    target = tensor_of(np.zeros_like(array))
    made(a=array).load_into({"a": target})
    assert bytes(target.view(torch.uint8).numpy()) == bytes(
        tensor_of(array).view(torch.uint8).numpy()
    )


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (5, 4, 3)])
def test_any_shape(made, shape):
    array = sample("F32", shape)
    into = np.zeros_like(array)
    tensor = torch.zeros(shape)
    made(a=array).load_into({"a": into})
    made(a=array).load_into({"a": tensor})
    assert same_bits(into, array)
    assert same_bits(tensor.numpy(), array)


@pytest.mark.parametrize(
    "target",
    [
        np.zeros((4, 6), np.float32).T,
        np.zeros((12, 8), np.float32)[::2, ::2],
        np.zeros((4, 6), np.float32)[::-1].T,
        np.zeros((6, 4), np.float32, order="F"),
    ],
    ids=["transposed", "stepped", "reversed", "fortran"],
)
def test_arrays_whose_elements_do_not_lie_in_order(made, target):
    array = sample("F32", (6, 4))
    target[...] = 0
    made(a=array).load_into({"a": target})
    assert same_bits(target, array)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "F8_E5M2", "I64", "C64", "BOOL"])
def test_tensors_whose_elements_do_not_lie_in_order(made, dtype):
    array = sample(dtype, (6, 4))
    wide = tensor_of(np.zeros((8, 6), array.dtype))
    target = wide[::2].T
    made(a=array).load_into({"a": target})
    assert same_bits(TorchRef.of("a", target).load(), array)
    assert not wide[1::2].view(torch.uint8).any()


def test_a_lazily_conjugated_tensor_gets_the_values_it_shows(made):
    array = np.array([1 + 2j, 3 - 4j], np.complex64)
    target = torch.zeros(2, dtype=torch.complex64)
    made(a=array).load_into({"a": target.conj()})
    assert target.conj().tolist() == array.tolist()
    scalar = torch.zeros((), dtype=torch.complex64)
    made(a=array[0]).load_into({"a": scalar.conj()})
    assert scalar.conj().item() == 1 + 2j


def test_a_module_is_filled_in_place(made):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    wanted = {
        name: sample("F32" if value.dtype is torch.float32 else "I64", tuple(value.shape), seed=n)
        for n, (name, value) in enumerate(module.state_dict().items())
    }
    before = {name: value.data_ptr() for name, value in module.state_dict().items()}
    made() if not wanted else None
    report = made(**wanted).load_into(module)
    assert (report.missing, report.unexpected) == ((), ())
    for name, value in module.state_dict().items():
        assert value.data_ptr() == before[name]
        assert same_bits(value.numpy(), wanted[name])
    assert module[0].weight.requires_grad
    assert module[0].weight.is_leaf


def test_parameters_that_require_grad_are_filled_in_place(made):
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    array = sample("F32", (2, 3))
    made(a=array).load_into({"a": parameter})
    assert same_bits(parameter.detach().numpy(), array)
    assert parameter.requires_grad
    assert parameter.is_leaf
    transposed = torch.nn.Parameter(torch.zeros(3, 2))
    made(a=array).load_into({"a": transposed.T})
    assert same_bits(transposed.T.detach().numpy(), array)


def test_arrays_and_tensors_mix(made):
    array = sample("F32", (2, 3))
    target = {"a": np.zeros((2, 3), np.float32), "b": torch.zeros(2, 3)}
    made(b=array, a=array + 1).load_into(target)
    assert same_bits(target["b"].numpy(), array)
    assert same_bits(target["a"], array + 1)


def untouched(target):
    return all(not np.asarray(value).any() for value in target.values())


def test_strict_names_are_refused_on_both_sides_and_nothing_is_written(made):
    ones = np.ones(2, np.float32)
    catalog = made(a=ones, b=ones)
    for names in (["a"], ["a", "b", "c"], ["a", "c"], []):
        target = {name: np.zeros(2, np.float32) for name in names}
        with pytest.raises(LayoutError, match="strict=False") as caught:
            catalog.load_into(target)
        for name in {"a", "b"} ^ set(names):
            assert repr(name) in str(caught.value)
        assert untouched(target)


def test_many_names_make_a_short_message(made):
    target = {f"layer{n}": np.zeros(1, np.float32) for n in range(100)}
    with pytest.raises(LayoutError, match="and 97 more") as caught:
        made(a=np.ones(1, np.float32)).load_into(target)
    assert len(str(caught.value)) < 300


def test_not_strict_loads_what_both_have_and_reports_the_rest(made):
    ones = np.ones(2, np.float32)
    target = {name: np.zeros(2, np.float32) for name in ("c", "a", "d")}
    report = made(b=ones, a=ones).load_into(target, strict=False)
    assert report.missing == ("c", "d")
    assert report.unexpected == ("b",)
    assert target["a"].tolist() == [1, 1]
    assert untouched({"c": target["c"], "d": target["d"]})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: np.zeros(3, np.float32), r"shape \[2\], the array has \[3\]"),
        (lambda: np.zeros((2, 1), np.float32), "shape"),
        (lambda: np.zeros(2, np.float16), "cast=True"),
        (lambda: np.zeros(2, np.int32), "cast=True"),
        (lambda: np.broadcast_to(np.float32(0), (2,)), "read-only"),
        (lambda: np.ma.zeros(2, np.float32), r"masked.*array\.data"),
        (lambda: torch.zeros(3), "shape"),
        (lambda: torch.zeros(2, dtype=torch.float64), "cast=True"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.zeros(2).to_sparse(), "sparse"),
        (lambda: [0.0, 0.0], "list"),
        (lambda: 1.0, "float"),
    ],
)
def test_nothing_is_written_if_any_target_does_not_fit(made, wrong, says, strict):
    ones = np.ones(2, np.float32)
    catalog = made(a=ones, z=ones)
    good = np.zeros(2, np.float32)
    tensor = torch.zeros(2)
    for target in ({"a": good, "z": wrong()}, {"a": tensor, "z": wrong()}):
        with pytest.raises(LayoutError, match=says) as caught:
            catalog.load_into(target, strict=strict)
        assert "'z'" in str(caught.value)
        assert untouched({"good": good, "tensor": tensor})


def test_an_array_type_without_a_safetensors_type_is_refused(made):
    ones = np.ones(2, np.float32)
    good = np.zeros(2, np.float32)
    strangers = [np.zeros(2, kind) for kind in (np.longdouble, object, [("x", "f4")])]
    for stranger in (*strangers, torch.empty(2, dtype=torch.uint4)):
        with pytest.raises(UnsupportedDType, match="tensor 'z'"):
            made(a=ones, z=ones).load_into({"a": good, "z": stranger}, cast=True)
        assert not good.any()


@pytest.mark.parametrize("target", [5, None, [("a", 1)], "state", object()])
def test_what_is_no_target_is_refused(target):
    with pytest.raises(LayoutError, match="pass a mapping"):
        catalog_of(a=np.ones(1)).load_into(target)


CASTS = [
    ("F32", "BF16"),
    ("BF16", "F32"),
    ("F32", "F16"),
    ("F64", "F32"),
    ("F32", "F64"),
    ("F8_E4M3", "F32"),
    ("F32", "F8_E5M2"),
    ("I64", "I32"),
    ("U8", "F32"),
    ("BOOL", "F32"),
    ("F32", "C64"),
]


@pytest.mark.parametrize(("stored", "wanted"), CASTS)
@pytest.mark.parametrize("shape", [(), (0,), (6,), (4, 6)])
def test_cast_converts_as_numpy_and_torch_do(made, stored, wanted, shape):
    values = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 2)
    array = np.asarray(values.astype(DType(stored).numpy))
    target = np.zeros(shape, DType(wanted).numpy)
    made(a=array).load_into({"a": target}, cast=True)
    assert same_bits(target, array.astype(DType(wanted).numpy))
    tensor = torch.zeros(shape, dtype=getattr(torch, DType(wanted).torch_name))
    made(a=array).load_into({"a": tensor}, cast=True)
    assert tensor.to(torch.complex64).tolist() == values.tolist()


def test_cast_into_arrays_of_the_other_byte_order(made):
    array = sample("F32", (4, 6))
    target = np.zeros((4, 6), ">f4")
    made(a=array).load_into({"a": target})
    assert np.array_equal(target, array, equal_nan=True)


def test_cast_into_what_does_not_lie_in_order(made):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    target = np.zeros((6, 4), np.float16).T
    made(a=array).load_into({"a": target}, cast=True)
    assert np.array_equal(target, array)
    tensor = torch.zeros(6, 4, dtype=torch.bfloat16).T
    made(a=array).load_into({"a": tensor}, cast=True)
    assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("target", [np.zeros(2, np.float32), torch.zeros(2)], ids=type)
@pytest.mark.parametrize("array", [np.ones(2, np.complex64), sample("F4", (2,))], ids=str)
def test_casts_that_would_lose_a_part_are_refused_before_anything_is_written(made, array, target):
    good = np.zeros(2, np.float32)
    with pytest.raises((LayoutError, UnsupportedDType), match=r"'z'.*cast"):
        made(a=np.ones(2, np.float32), z=array).load_into({"a": good, "z": target}, cast=True)
    assert not good.any()


def test_the_same_dtype_is_never_rounded_by_cast(made):
    array = sample("F64", (3,))
    target = np.zeros(3)
    made(a=array).load_into({"a": target}, cast=True)
    assert same_bits(target, array)


def test_large_tensors_are_cast_block_by_block(made):
    array = np.arange(3 << 20, dtype=np.float32).reshape(-1, 3)
    target = np.zeros(array.shape, np.float64)
    made(a=array).load_into({"a": target}, cast=True)
    assert np.array_equal(target, array)
    tensor = torch.zeros(array.shape, dtype=torch.float64)
    made(a=array).load_into({"a": tensor}, cast=True)
    assert np.array_equal(tensor.numpy(), array)
