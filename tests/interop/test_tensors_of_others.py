"""Tensors that other programs than torch put into its files, each by a function of its own.

The functions are made up here under their real names; torch and pickle write what they give.
"""

import io
import pickle
import sys
import types
from collections import OrderedDict

import numpy as np
import pytest
import torch

import weighlock
from hostile.make_checkpoints import (
    BUILD,
    FALSE,
    MARK,
    ORDERED,
    TUPLE,
    call,
    checkpoint,
    glob,
    table,
    tensor,
)

BASE = torch.arange(24, dtype=torch.float32)
VIEW = BASE[2:14].view(3, 4).T
BOTH = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


class Made:
    """Something that a pickle makes by calling a function."""

    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


@pytest.fixture
def function(monkeypatch):
    """Makes a function of that name, for pickle to find."""

    def make(module, name):
        path = ""
        for part in module.split("."):
            path = f"{path}.{part}" if path else part
            parent = types.ModuleType(path)
            monkeypatch.setitem(sys.modules, path, parent)
        found = types.FunctionType((lambda *args: None).__code__, {}, name)
        found.__module__, found.__qualname__ = module, name
        setattr(parent, name, found)
        return found

    return make


def saved(value, is_zip=True):
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=is_zip)
    return weighlock.open(buffer.getvalue())


def parts_of(view):
    place = (view.storage_offset(), tuple(view.size()), view.stride())
    return (view._typed_storage(), *place, False, OrderedDict())


@BOTH
@pytest.mark.parametrize("layout", [True, 2])
def test_tensors_of_an_npu(function, is_zip, layout):
    rebuild = function("torch_npu.utils.storage", "_rebuild_npu_tensor")
    catalog = saved({"w": Made(rebuild, *parts_of(VIEW), layout), "b": torch.ones(2)}, is_zip)
    assert list(catalog) == ["w", "b"]
    assert torch.equal(catalog["w"].torch(), VIEW)


@BOTH
@pytest.mark.parametrize("attributes", [(), ({"img_size": 3},)], ids=["plain", "with attributes"])
def test_tensors_of_fastai(function, is_zip, attributes):
    rebuild = function("fastai.torch_core", "_fa_rebuild_tensor")
    made = Made(rebuild, torch.Tensor, *parts_of(VIEW), *attributes)
    catalog = saved({"w": made}, is_zip)
    assert list(catalog) == ["w"]
    assert torch.equal(catalog["w"].torch(), VIEW)


@BOTH
def test_a_tensor_that_a_function_nobody_knows_rebuilds_is_not_guessed_at(function, is_zip):
    rebuild = function("somebody", "_rebuild_my_tensor")
    catalog = saved({"w": Made(rebuild, *parts_of(VIEW)), "b": torch.ones(2)}, is_zip)
    assert list(catalog) == ["b"]
    assert catalog.unreadable == {"w": "a tensor that is rebuilt by somebody._rebuild_my_tensor"}


def persistent(base, rebuild):
    """A module that pickles its code with it, and the function that would run that."""

    class Persistent(base):
        def __reduce__(self):
            state = self.__dict__
            given = {"type": "class", "version": 6, "module_src": "import torch", "state": state}
            return rebuild, ({**given, "class_name": base.__name__},)

    return Persistent


def test_modules_that_are_pickled_with_their_code_have_the_names_of_their_state_dict(function):
    rebuild = function("torch_utils.persistence", "_reconstruct_persistent_obj")

    class Block(persistent(torch.nn.Module, rebuild)):
        def __init__(self):
            super().__init__()
            self.const = torch.nn.Parameter(torch.rand(2, 3))
            self.register_buffer("kernel", torch.rand(4))
            self.register_buffer("passing", torch.rand(4), persistent=False)

    class Generator(persistent(torch.nn.Module, rebuild)):
        def __init__(self):
            super().__init__()
            self.b4, self.b8 = Block(), Block()
            self.layer = torch.nn.Linear(2, 2)

    model = Generator()
    catalog = weighlock.open(pickle.dumps({"G_ema": model, "seed": 3}))
    expected = {f"G_ema.{name}": value for name, value in model.state_dict().items()}
    assert list(catalog) == list(expected)
    for name, value in expected.items():
        assert torch.equal(catalog[name].torch(), value)
    assert catalog.extras["seed"] == 3


def test_other_objects_that_are_pickled_with_their_code(function):
    rebuild = function("edm.persistence", "_reconstruct_persistent_obj")
    state = {"sigma": 0.5, "table": torch.rand(3)}
    catalog = weighlock.open(pickle.dumps({"loss": Made(rebuild, {"state": state})}))
    assert list(catalog) == ["loss.table"]
    assert catalog.extras["loss"]["sigma"] == 0.5


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0), (0, 1, 2)])
def test_arrays_whose_axes_lie_in_any_order(axes, order):
    array = np.arange(24, dtype=f"{order}f4").reshape(2, 3, 4).transpose(axes)
    catalog = weighlock.open(pickle.dumps({"w": array}, protocol=5))
    assert (catalog["w"].load() == array).all()
    assert (catalog["w"][1:] == array[1:]).all()
    assert weighlock.open(pickle.dumps({"w": array}, protocol=2))["w"].load().shape == array.shape


@pytest.mark.parametrize(
    "name", ["jax._src.array._reconstruct_array", "jax._src.device_array.reconstruct_device_array"]
)
def test_arrays_of_jax(function, name):
    rebuild = function(*name.rsplit(".", 1))
    array = np.arange(6.0).reshape(2, 3)
    params = {"dense": {"kernel": Made(rebuild, *array.__reduce__(), {"weak_type": False})}}
    catalog = weighlock.open(pickle.dumps(params))
    assert (catalog["dense.kernel"].load() == array).all()


def test_what_tensors_were_wrapped_in_up_to_0_3():
    variable = call(glob("torch.autograd.variable", "Variable"), tensor())
    variable += MARK + FALSE + FALSE + ORDERED + TUPLE + BUILD
    catalog = weighlock.open(checkpoint(table(("h", variable))))
    assert catalog["h"].load().tolist() == [1, 2, 3, 4]


class Holds(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("x", value)
        self.register_buffer("y", torch.ones(2))

    def forward(self):
        return self.y


def scripted(value):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Holds(value)), buffer)
    return weighlock.open(buffer.getvalue())


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 2j, 3j]).conj().imag],
    ids=["conjugated", "negated"],
)
def test_scripts_with_lazy_bits(value):
    assert value.is_conj() or value.is_neg()
    assert torch.equal(scripted(value)["x"].torch(), value.resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr"])
def test_scripts_with_sparse_tensors(kind):
    dense = torch.eye(3) * torch.tensor([1.0, 2.0, 3.0])
    value = dense.to_sparse(layout=getattr(torch, kind))
    catalog = scripted(value)
    group = catalog.groups["x"]
    assert (group.kind, group.shape) == (kind, (3, 3))
    assert catalog["x.values"].load().tolist() == [1, 2, 3]
    assert "y" in catalog
