"""What torch.save writes, read without torch: the same names, types, shapes and bytes."""

import argparse
import collections
import enum
import io
import json
import pathlib
import sys
import types
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch_objects import (
    Counted,
    assert_same,
    assert_same_tensors,
    byteswapped,
    flat,
    foreign_module,
    legacy_by_hand,
    loaded,
    raw_bits,
    rezipped,
    saved,
    views,
)

import weighlock
from weighlock.errors import FormatError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2),
]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
UNTYPED = {dtype for dtype in DTYPES if str(dtype).startswith(("torch.uint", "torch.float8"))}
UNTYPED = (UNTYPED - {torch.uint8}) | {torch.float4_e2m1fn_x2}
"""Those that lie in storages without a type. torch.save writes them to legacy files, too, and
torch.load cannot read those: there the tensors that were saved are the measure."""
TYPED = [dtype for dtype in DTYPES if dtype not in UNTYPED]

BOTH = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


def random_bits(dtype, *shape, seed=0):
    """A tensor of random bytes: NaN of all kinds, infinities, whatever comes."""
    drawn = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype is torch.bool:
        return torch.from_numpy(drawn.integers(0, 2, count, np.uint8)).bool().reshape(shape)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.from_numpy(drawn.integers(0, 256, count * width, np.uint8))
    return raw.view(dtype).reshape(shape)


def half_complex():
    """A tensor of a type that no other program has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(2, dtype=torch.complex32)


class TestTypes:
    @BOTH
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_every_type_in_every_protocol(self, dtype, protocol, legacy):
        whole = random_bits(dtype, 6, 4)
        state = {"whole": whole, "rows": whole[2:5], "again": whole, "other": random_bits(dtype, 7)}
        raw = saved(state, legacy=legacy, protocol=protocol)
        catalog = assert_same_tensors(raw, state if legacy and dtype in UNTYPED else None)
        assert catalog["whole"].identity() == catalog["again"].identity()
        assert catalog["whole"].identity() != catalog["rows"].identity()

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    @pytest.mark.parametrize("dtype", TYPED, ids=str)
    def test_legacy_files_in_all_six_protocols(self, dtype, protocol):
        whole = random_bits(dtype, 5, 3)
        state = {"whole": whole, "t": whole.t(), "nested": [whole[1:], ("text", {"x": whole})]}
        raw = legacy_by_hand(state, protocol)
        assert_same_tensors(raw)
        assert_same_tensors(legacy_by_hand(collections.OrderedDict(state), protocol))

    @pytest.mark.parametrize("protocol", [0, 1])
    def test_values_beside_the_tensors_in_text_protocols(self, protocol):
        values = {"n": -5, "big": 2**70, "f": -0.1, "s": "zwölf\n", "b": True, "no": None}
        raw = legacy_by_hand({"w": torch.ones(2), **values}, protocol)
        catalog = assert_same_tensors(raw)
        assert catalog.extras == values
        assert type(catalog.extras["b"]) is bool

    @BOTH
    def test_types_that_are_not_read_are_named_with_the_reason(self, legacy):
        state = {"good": torch.ones(2), "half": half_complex()}
        state |= {"meta": torch.empty(2, device="meta")}
        catalog = weighlock.open(saved(state, legacy=legacy))
        assert list(catalog) == ["good"]
        assert catalog.unreadable.keys() == {"half", "meta"}
        assert "complex32" in catalog.unreadable["half"]
        assert "no data" in catalog.unreadable["meta"]


class TestViews:
    @BOTH
    @pytest.mark.parametrize(
        "dtype",
        [torch.float32, torch.bfloat16, torch.int8, torch.uint16, torch.complex128, torch.bool],
        ids=str,
    )
    def test_every_view(self, dtype, legacy):
        state = views(dtype)
        known = state if legacy and dtype in UNTYPED else None
        assert_same_tensors(saved(state, legacy=legacy), known)

    @pytest.mark.parametrize("protocol", [0, 1])
    def test_every_view_in_text_protocols(self, protocol):
        assert_same_tensors(legacy_by_hand(views(), protocol))

    @BOTH
    def test_float8_views(self, legacy):
        base = random_bits(torch.float8_e4m3fn, 6, 8)
        state = {"t": base.t(), "steps": base[::2, 1::3], "row": base[3], "number": base[2, 2]}
        assert_same_tensors(saved(state, legacy=legacy), state)

    @BOTH
    def test_pairs_of_four_bits(self, legacy):
        base = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
        state = {"all": base, "rows": base[1:3]}
        catalog = assert_same_tensors(saved(state, legacy=legacy), state)
        assert catalog["rows"].shape == (2, 12)

    @BOTH
    def test_conjugated_and_negated(self, legacy):
        numbers = torch.complex(torch.arange(12.0), torch.arange(12.0) * -3).reshape(3, 4)
        state = {
            "plain": numbers,
            "conj": numbers.conj(),
            "transposed": numbers.mH,
            "row": numbers.conj()[1],
            "double": numbers.to(torch.complex128).conj(),
        }
        catalog = assert_same_tensors(saved(state, legacy=legacy))
        assert catalog["plain"].identity() != catalog["conj"].identity()
        negated = {"imaginary": numbers.conj().imag, "some": numbers.conj().imag[1:, ::2]}
        assert all(tensor.is_neg() for tensor in negated.values())
        assert_same_tensors(saved(negated, legacy=legacy))
        numbers = numbers + (1 - 1j)  # no zeros: torch is of two minds about their sign
        both = {"both": torch._neg_view(numbers).conj(), "neg": torch._neg_view(numbers)}
        assert both["both"].is_neg()
        assert both["both"].is_conj()
        assert_same_tensors(saved(both, legacy=legacy))

    @BOTH
    def test_slices_of_conjugated_numbers(self, legacy):
        numbers = torch.complex(torch.arange(12.0), torch.arange(12.0)).reshape(3, 4)
        ref = weighlock.open(saved({"x": numbers.mH}, legacy=legacy))["x"]
        expected = numbers.mH.resolve_conj().numpy()
        for index in [1, slice(1, 3), (slice(None), 2), (2, 1), (..., slice(None, None, 2))]:
            assert np.asarray(ref[index]).tobytes() == expected[index].tobytes()

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64], ids=str)
    def test_slices_of_every_view(self, dtype, legacy):
        state = views(dtype)
        catalog = weighlock.open(saved(state, legacy=legacy))
        for name, tensor in state.items():
            array = tensor.numpy()
            indices = [..., ()]
            if tensor.dim() and tensor.shape[0] > 0:
                indices += [0, -1, slice(1, None), slice(None, None, 2), slice(0, 0)]
            if tensor.dim() == 2:
                indices += [(slice(None), 1), (slice(1, 3), slice(None, None, 2)), (..., -1)]
            if tensor.dim() == 3 and tensor.numel():
                indices += [(0, slice(None), 0), (slice(None), 0), (..., slice(0, 1))]
            for index in indices:
                part = np.asarray(catalog[name][index])
                assert part.shape == array[index].shape, (name, index)
                assert part.tobytes() == array[index].tobytes(), (name, index)

    @BOTH
    def test_slices_of_strided_views_read_little(self, legacy):
        base = torch.arange(400_000, dtype=torch.float32).reshape(400, 1000)
        state = {"base": base, "t": base.t(), "right": base[:, 900:], "deep": base.view(4, 100, -1)}
        state["deep"] = state["deep"].permute(1, 0, 2)
        source = Counted(saved(state, legacy=legacy))
        catalog = weighlock.open(source)
        assert source.taken() < 300_000  # the directory or head, no tensor
        for name, index, most in [
            ("base", (slice(7, 9),), 8_000),
            ("base", (5, slice(10, 20)), 40),
            ("t", (slice(None), 3), 4_000),
            ("t", (17, 200), 4),
            ("right", (slice(2, 4),), 2 * 4_000),
            ("right", (399, slice(None)), 400),
            ("deep", (50, 2), 4_000),
        ]:
            source.taken()
            part = np.asarray(catalog[name][index])
            assert source.taken() <= most, (name, index)
            assert part.tobytes() == state[name].numpy()[index].tobytes()

    @BOTH
    def test_a_tensor_reads_its_own_bytes_only(self, legacy):
        flat_storage = torch.arange(100_000, dtype=torch.float32)
        parts = {f"part{n}": flat_storage[n * 1000 : (n + 1) * 1000] for n in range(100)}
        source = Counted(saved(parts, legacy=legacy))
        catalog = weighlock.open(source)
        source.taken()
        assert catalog["part37"].load().tobytes() == raw_bits(parts["part37"])
        assert source.taken() == 4_000
        assert len({ref.identity() for ref in catalog.values()}) == 100
        assert catalog.nbytes == 400_000

    @BOTH
    def test_tied_tensors_keep_their_identity(self, legacy):
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)}
        )
        model["head"].weight = model["embed"].weight
        catalog = assert_same_tensors(saved(model.state_dict(), legacy=legacy))
        assert catalog["embed.weight"].identity() == catalog["head.weight"].identity()
        assert catalog.nbytes == 96
        arrays = catalog.load()
        assert arrays["embed.weight"] is arrays["head.weight"]

    @BOTH
    def test_equal_tensors_are_not_tied(self, legacy):
        state = {"a": torch.ones(4), "b": torch.ones(4), "empty": torch.ones(0)}
        state["t"] = torch.ones(2, 2)
        state["u"] = state["t"].t()
        catalog = assert_same_tensors(saved(state, legacy=legacy))
        assert len({catalog[name].identity() for name in "abtu"}) == 4


class Marked(torch.nn.Parameter):
    """A Parameter with a class of its own."""


class OfDevice:
    """What torch writes for a tensor of a device without storages, which is not here to be had."""

    def __init__(self, rebuild, data, dtype):
        self.rebuild = getattr(torch._utils, rebuild)
        self.args = (data, dtype, "cpu", False)

    def __reduce__(self):
        return self.rebuild, self.args


class TestKinds:
    @BOTH
    @pytest.mark.parametrize("protocol", [2, 4])
    @pytest.mark.parametrize(
        "rebuild", ["device_tensor_from_numpy", "device_tensor_from_cpu_tensor", "xla_tensor"]
    )
    def test_tensors_of_devices_have_their_names_and_types(self, legacy, protocol, rebuild):
        values = np.linspace(-3, 3, 600, dtype=np.float32).reshape(2, 300)
        arrays = {
            dtype: (values, getattr(torch, dtype))
            for dtype in ("float32", "bfloat16", "float16", "float8_e5m2", "int8", "complex64")
        }
        arrays["turned"] = np.asfortranarray(values[:, :3]), torch.bfloat16
        arrays["number"] = np.array(2.5, np.float32), torch.bfloat16
        state, wanted = {}, {}
        for name, (array, dtype) in arrays.items():
            tensor = torch.from_numpy(array)
            state[name] = OfDevice(
                f"_rebuild_{rebuild}", tensor if "cpu" in rebuild else array, dtype
            )
            wanted[name] = tensor.to(dtype)
        raw = saved(state, legacy=legacy, protocol=protocol)
        assert_same_tensors(raw, wanted)
        # torch.load turns what lies in a legacy file before it has read it
        if not legacy or "numpy" in rebuild:
            assert_same_tensors(raw)

    def test_parameters_of_devices(self):
        class Parameter:
            def __reduce__(self):
                inner = OfDevice("_rebuild_xla_tensor", np.ones((2, 3), "f4"), torch.bfloat16)
                return torch._utils._rebuild_parameter, (inner, True, {})

        raw = saved({"w": Parameter()})
        assert_same_tensors(raw)
        assert list(weighlock.open(raw)) == ["w"]

    def test_tensors_of_devices_that_are_turned_into_what_is_not_read_are_named(self):
        inner = OfDevice("_rebuild_xla_tensor", np.ones(2, "c8"), torch.float32)
        other = OfDevice("_rebuild_xla_tensor", np.ones(2, "f4"), torch.complex32)
        twice = OfDevice("_rebuild_device_tensor_from_cpu_tensor", inner, torch.float64)
        catalog = weighlock.open(saved({"a": inner, "b": other, "c": twice}))
        assert list(catalog) == []
        assert "C64 cannot be cast to F32" in catalog.unreadable["a"]
        assert "torch.complex32" in catalog.unreadable["b"]
        assert "torch.float32 and torch.float64" in catalog.unreadable["c"]

    @BOTH
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_parameters_buffers_and_tensors_with_attributes(self, legacy, protocol):
        noted = torch.arange(6.0).reshape(2, 3)
        noted.origin = "somewhere"
        parameter = torch.nn.Parameter(torch.arange(4.0))
        parameter.lr_scale = 0.5
        state = {
            "parameter": torch.nn.Parameter(torch.ones(2, 3)),
            "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
            "buffer": torch.nn.Buffer(torch.arange(5.0)),
            "noted": noted,
            "with_state": parameter,
            "subclass": Marked(torch.arange(8.0)[2:6]),
            "view": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t()),
            "grad": torch.ones(2, requires_grad=True),
        }
        assert_same_tensors(saved(state, legacy=legacy, protocol=protocol))

    @BOTH
    def test_tensors_among_the_attributes_of_a_tensor_are_not_lost(self, legacy):
        parameter = torch.nn.Parameter(torch.arange(4.0))
        parameter.scale = torch.tensor([2.0, 3.0])
        catalog = weighlock.open(saved({"w": parameter}, legacy=legacy))
        assert_same(catalog["w"], parameter)
        assert any(
            ref.shape == (2,) and ref.load().tolist() == [2.0, 3.0] for ref in catalog.values()
        )

    @BOTH
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_numpy_arrays(self, legacy, protocol):
        grid = np.arange(12.0).reshape(3, 4)
        state = {
            "c": grid,
            "fortran": np.asfortranarray(grid),
            "strided": grid[:, ::2],
            "big": grid.astype(">f4"),
            "big_int": np.arange(-3, 3).astype(">i8"),
            "bool": np.array([True, False, True]),
            "empty": np.zeros((0, 4), np.int16),
            "number": np.array(7, np.uint32),
            "complex": np.array([1 + 2j, -3j]),
            "big_complex": np.array([1 + 2j, -3j]).astype(">c8"),
            "half": np.arange(3, dtype=np.float16),
            "tensor": torch.ones(2),
        }
        state |= {f"u{8 * width}": np.arange(5, dtype=f"u{width}") for width in (1, 2, 4, 8)}
        raw = saved(state, legacy=legacy, protocol=protocol)
        assert_same_tensors(raw, state)
        catalog = weighlock.open(raw)
        assert np.asarray(catalog["fortran"][1:, 2]).tolist() == grid[1:, 2].tolist()

    @BOTH
    def test_numpy_scalars_are_numbers_and_tensors(self, legacy):
        state = {"loss": np.float64(0.25), "step": np.int64(-7), "ok": np.bool_(True)}
        state["big"] = np.array([1.5], ">f4")[0]
        catalog = weighlock.open(saved(state, legacy=legacy))
        for name, value in state.items():
            assert_same(catalog[name], value)
            assert catalog.extras[name] == value
            assert type(catalog.extras[name]) in (float, int, bool)

    @BOTH
    def test_tensors_below_the_attributes_of_a_tensor_are_not_lost(self, legacy):
        tensor = torch.nn.Parameter(torch.ones(2))
        tensor.scales = {"rows": torch.arange(2.0), "more": [torch.zeros(1)]}
        tensor.itself = {"again": tensor}
        catalog = weighlock.open(saved({"w": tensor}, legacy=legacy))
        assert list(catalog) == ["w", "w.scales.rows", "w.scales.more.0", "w.itself.again"]
        assert_same(catalog["w.scales.rows"], tensor.scales["rows"])
        assert catalog["w"].identity() == catalog["w.itself.again"].identity()
        bare = weighlock.open(saved(tensor, legacy=legacy))
        assert list(bare) == ["tensor", "scales.rows", "scales.more.0", "itself.again"]

    @BOTH
    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_tensors_in_arrays_of_objects_are_not_lost(self, legacy, protocol):
        array = np.array([torch.ones(2), {"b": torch.zeros(3)}, None], dtype=object)
        catalog = weighlock.open(saved({"a": array}, legacy=legacy, protocol=protocol))
        assert list(catalog) == ["a.0", "a.1.b"]
        assert list(catalog.unreadable) == ["a"]
        assert_same(catalog["a.1.b"], torch.zeros(3))

    @BOTH
    def test_parameters_without_data_are_named(self, legacy):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.LazyLinear(3))
            norm = torch.nn.LazyBatchNorm1d()
        catalog = weighlock.open(saved({"m": module, "n": norm}, legacy=legacy))
        assert list(catalog) == ["m.0.weight", "m.0.bias", "n.num_batches_tracked"]
        lazy = {"m.1.weight", "m.1.bias", "n.weight", "n.bias", "n.running_mean", "n.running_var"}
        assert catalog.unreadable.keys() == lazy
        assert all("no data yet" in reason for reason in catalog.unreadable.values())

    @BOTH
    def test_arrays_that_are_not_numbers(self, legacy):
        state = {"objects": np.array([{}, None]), "text": np.array(["a", "bc"]), "w": torch.ones(1)}
        catalog = weighlock.open(saved(state, legacy=legacy))
        assert list(catalog) == ["w"]
        assert catalog.unreadable.keys() == {"objects", "text"}

    @BOTH
    def test_a_bare_tensor(self, legacy):
        assert_same_tensors(saved(torch.arange(6.0).reshape(2, 3).t(), legacy=legacy))
        assert_same_tensors(saved(torch.nn.Parameter(torch.ones(3)), legacy=legacy))
        assert_same_tensors(saved(torch.tensor(3.5), legacy=legacy))

    @BOTH
    def test_a_bare_storage(self, legacy):
        tensor = torch.arange(6.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            typed = tensor.storage()
        (name,) = catalog = weighlock.open(saved(typed, legacy=legacy))
        assert_same(catalog[name], tensor)
        (name,) = catalog = weighlock.open(saved(tensor.untyped_storage(), legacy=legacy))
        assert_same(catalog[name], tensor.view(torch.uint8))

    @BOTH
    @pytest.mark.parametrize("thing", [{}, [], None, 3, "text", {"epoch": 1}], ids=repr)
    def test_no_tensor_at_all(self, thing, legacy):
        catalog = weighlock.open(saved(thing, legacy=legacy))
        assert list(catalog) == []
        if isinstance(thing, dict):
            assert catalog.extras == thing


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class TestTrees:
    @BOTH
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_nested_containers(self, legacy, protocol):
        tensors = list(torch.arange(40.0).reshape(20, 2))
        take = iter(tensors)
        state = {
            "list": [next(take), [next(take), (next(take),)], "text"],
            "ordered": collections.OrderedDict(b=next(take), a=next(take)),
            "default": collections.defaultdict(list, x=[next(take)]),
            "deque": collections.deque([next(take), next(take)], maxlen=5),
            "namespace": argparse.Namespace(w=next(take), lr=0.1),
            "simple": types.SimpleNamespace(w=next(take), k="v"),
            7: next(take),
            ("a", 1): next(take),
            None: next(take),
            "": {"x": next(take)},
        }
        catalog = weighlock.open(saved(state, legacy=legacy, protocol=protocol))
        names = [
            *("list.0", "list.1.0", "list.1.1.0", "ordered.b", "ordered.a", "default.x.0"),
            *("deque.0", "deque.1", "namespace.w", "simple.w", "7", "(a, 1)", "None", ".x"),
        ]
        assert list(catalog) == names
        for name, tensor in zip(names, tensors, strict=False):
            assert_same(catalog[name], tensor)
        assert catalog.extras["namespace"] == {"lr": 0.1}
        assert catalog.extras["simple"] == {"k": "v"}

    @BOTH
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_extras_are_plain_values(self, legacy, protocol):
        values = {
            "epoch": 12,
            "big": -(2**80),
            "loss": float("inf"),
            "name": "Zoë \U0001f600",
            "raw": b"\x00\xff",
            "none": None,
            "yes": True,
            "tuple": (1, "a", None),
            "list": [[], {}, [1.5]],
            "nested": {"a": {"b": {1: 2}}},
            "complex": 1 - 2j,
        }
        state = {"w": torch.ones(1), **values}
        state |= {
            "counter": collections.Counter("aab"),
            "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
            "default": collections.defaultdict(int, k=3),
            "deque": collections.deque([1, 2]),
            "set": {5},
            "frozen": frozenset([6]),
            "path": pathlib.PurePosixPath("/a/b.txt"),
            "device": torch.device("cuda", 1),
            "size": torch.Size([2, 3]),
            "dtype": torch.float16,
            "array": bytearray(b"xyz"),
            "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        }
        extras = weighlock.open(saved(state, legacy=legacy, protocol=protocol)).extras
        for name, value in values.items():
            assert extras[name] == value
            assert type(extras[name]) is type(value)
        assert extras["counter"] == {"a": 2, "b": 1}
        assert list(extras["ordered"]) == ["z", "a"]
        assert extras["default"] == {"k": 3}
        assert list(extras["deque"]) == [1, 2]
        assert list(extras["set"]) == [5]
        assert list(extras["frozen"]) == [6]
        assert extras["path"] == "/a/b.txt"
        assert extras["device"] == "cuda:1"
        assert tuple(extras["size"]) == (2, 3)
        assert extras["dtype"] == "torch.float16"
        assert extras["array"] == b"xyz"
        assert extras["args"] == {"lr": 0.1, "betas": (0.9, 0.99)}
        assert "w" not in extras

    @BOTH
    def test_names_that_would_be_one_are_told_and_kept_apart(self, legacy):
        a, b, c, d = torch.arange(8.0).reshape(4, 2)
        state = {1: a, "1": b, "x.y": c, "x": {"y": d}}
        catalog = weighlock.open(saved(state, legacy=legacy))
        assert len(catalog) == 4
        found = [ref.load().tolist() for ref in catalog.values()]
        assert found == [tensor.tolist() for tensor in (a, b, c, d)]
        assert len(catalog.notes) == 2
        assert "'1'" in catalog.notes[0]
        assert "'x.y'" in catalog.notes[1]

    @BOTH
    def test_a_tree_without_collisions_has_no_notes(self, legacy):
        catalog = weighlock.open(saved({"x": {"y": torch.ones(1)}}, legacy=legacy))
        assert catalog.notes == ()

    @BOTH
    def test_a_list_that_holds_itself(self, legacy):
        ring = [torch.ones(2)]
        ring.append(ring)
        catalog = weighlock.open(saved({"ring": ring}, legacy=legacy))
        assert list(catalog) == ["ring.0"]

    @BOTH
    @pytest.mark.parametrize("kind", ["adam", "sgd", "adamw"])
    def test_optimizers(self, kind, legacy):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = {
            "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
        }[kind](model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).square().sum().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        catalog = assert_same_tensors(saved(state, legacy=legacy))
        slot = "momentum_buffer" if kind == "sgd" else "exp_avg"
        assert f"optimizer.state.2.{slot}" in catalog
        assert catalog.extras["epoch"] == 3
        group = catalog.extras["optimizer"]["param_groups"][0]
        assert group["params"] == [0, 1, 2, 3]
        assert group["weight_decay"] == optimizer.param_groups[0]["weight_decay"]

    @pytest.mark.parametrize("protocol", [2, 4])
    @pytest.mark.parametrize(
        "keys",
        [
            {np.int64(1): 1, np.int64(-(2**63)): -(2**63)},
            {np.str_("cat"): "cat", np.str_("dög"): "dög", np.bytes_(b"cat"): b"cat"},
            {np.float32(1.5): 1.5, np.bool_(True): True, np.complex64(2j): "2j"},
            {(np.int64(1), "a"): (1, "a"), (np.int64(2), "a"): (2, "a")},
            {torch.float32: "torch.float32", torch.float16: "torch.float16"},
            {Color.RED: "Color(1)", Color.BLUE: "Color(b)"},
            {np.dtype("f4"): "dtype(f4)", np.dtype("i8"): "dtype(i8)"},
            {frozenset([1]): "frozenset(1)", torch.Size([2, 3]): "Size(2, 3)"},
            {2**63: 2**63, 2**64 - 1: 2**64 - 1, 2**70: str(2**70), -(2**70): str(-(2**70))},
        ],
        ids=["ints", "texts", "numbers", "tuples", "dtypes", "enums", "numpy", "sets", "large"],
    )
    def test_keys_that_are_no_text(self, keys, protocol):
        state = {"t": {key: torch.ones(1) for key in keys}, "n": dict.fromkeys(keys, 5)}
        catalog = weighlock.open(saved(state, protocol=protocol))
        assert catalog.extras == {"n": dict.fromkeys(keys.values(), 5)}
        names = [key.decode() if type(key) is bytes else str(key) for key in keys.values()]
        names = [name.replace("'", "") for name in names]
        assert [name.split("#")[0] for name in catalog] == [f"t.{name}" for name in names]

    def test_many_tuples_of_numbers_as_keys(self):
        """As merges of a tokenizer are; beyond some thousands they are texts among the extras."""
        merges = {(n, n + 1): n for n in range(6000)}
        pairs = {(f"a{n}", f"b{n}"): n for n in range(6000)}
        weights = {(n, n + 1): torch.ones(1) for n in range(5000)}
        catalog = weighlock.open(saved({"merges": merges, "pairs": pairs, "w": weights}))
        assert catalog.extras["merges"] == {str(key): n for key, n in merges.items()}
        assert catalog.extras["pairs"] == pairs
        assert list(catalog) == [f"w.{key}" for key in weights]
        assert catalog.notes == ()

    def test_the_metadata_of_a_state_dict_is_no_entry(self):
        state = torch.nn.BatchNorm1d(3).state_dict()
        assert state._metadata
        catalog = assert_same_tensors(saved(state))
        assert catalog.extras == {}


class Whole(torch.nn.Module):
    """A module with all that a state dict treats specially."""

    def __init__(self):
        super().__init__()
        shared = torch.nn.Linear(4, 4)
        self.layers = torch.nn.Sequential(
            torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
            torch.nn.BatchNorm1d(4),
            shared,
            torch.nn.ReLU(),
            shared,
        )
        self.table = torch.nn.ParameterDict({"b": torch.ones(2), "a": torch.zeros(3)})
        self.several = torch.nn.ParameterList([torch.ones(2), torch.ones(1)])
        self.head = torch.nn.Linear(4, 2)
        self.head.register_parameter("absent", None)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("scratch", torch.arange(5), persistent=False)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.beside = torch.ones(7)  # an attribute, in no state dict


class TestModules:
    @BOTH
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_names_are_those_of_the_state_dict(self, legacy, protocol):
        torch.manual_seed(1)
        module = torch.nn.Sequential(
            collections.OrderedDict(
                rnn=torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
                norm=torch.nn.BatchNorm1d(4),
                first=torch.nn.Linear(4, 4),
            )
        )
        module.add_module("again", module.first)
        module.norm.register_buffer("scratch", torch.ones(9), persistent=False)
        expected = dict(module.state_dict())
        catalog = assert_same_tensors(saved(module, legacy=legacy, protocol=protocol), expected)
        assert catalog["first.weight"].identity() == catalog["again.weight"].identity()
        assert ("torch.nn.modules.rnn", "LSTM") in catalog.globals

    @BOTH
    def test_a_module_of_one_s_own(self, legacy):
        torch.manual_seed(2)
        module = Whole()
        assert_same_tensors(saved(module, legacy=legacy), dict(module.state_dict()))

    @BOTH
    def test_a_module_beside_other_things(self, legacy):
        module = torch.nn.Linear(2, 3)
        raw = saved({"model": module, "step": torch.tensor(4), "epoch": 9}, legacy=legacy)
        expected = {f"model.{name}": value for name, value in module.state_dict().items()}
        catalog = assert_same_tensors(raw, {**expected, "step": torch.tensor(4)})
        assert catalog.extras["epoch"] == 9

    @BOTH
    def test_a_lightning_like_checkpoint(self, legacy):
        source = (
            "class Settings(dict):\n"
            "    pass\n"
            "class Callback:\n"
            "    def __init__(self, best):\n"
            "        self.best = best\n"
            "        self.patience = 3\n"
        )
        with foreign_module(source) as module:
            model = torch.nn.Linear(3, 2)
            best = torch.arange(4.0)
            raw = saved(
                {
                    "epoch": 4,
                    "global_step": 1000,
                    "pytorch-lightning_version": "2.4.0",
                    "state_dict": model.state_dict(),
                    "callbacks": {"stop": module.Callback(best)},
                    "hyper_parameters": module.Settings(lr=0.5, layers=[1, 2]),
                },
                legacy=legacy,
            )
        assert module.__name__ not in sys.modules
        catalog = weighlock.open(raw)
        expected = {f"state_dict.{name}": value for name, value in model.state_dict().items()}
        expected["callbacks.stop.best"] = best
        assert list(catalog) == list(expected)
        for name, tensor in expected.items():
            assert_same(catalog[name], tensor)
        assert catalog.extras["global_step"] == 1000
        assert catalog.extras["pytorch-lightning_version"] == "2.4.0"
        assert catalog.extras["hyper_parameters"]["lr"] == 0.5
        assert catalog.extras["hyper_parameters"]["layers"] == [1, 2]
        assert catalog.extras["callbacks"]["stop"]["patience"] == 3
        assert (module.__name__, "Callback") in catalog.globals
        assert module.__name__ not in sys.modules


class TestContainers:
    def test_several_saves_in_one_legacy_file(self):
        first, second = {"a": torch.arange(3.0)}, {"b": torch.ones(9)}
        rest = saved(second, legacy=True)
        raw = saved(first, legacy=True) + rest
        catalog = assert_same_tensors(raw, first)
        assert len(catalog.notes) == 1
        assert f"{len(rest):,} bytes" in catalog.notes[0]
        with weighlock.open(saved(first, legacy=True)) as alone:
            assert alone.notes == ()

    @pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
    @pytest.mark.parametrize("prefix", ["archive/", "epoch=3.step/", "a/b/", "größe/", ""])
    def test_archives_zipped_again(self, packed, prefix):
        state = views() | {"large": torch.arange(200_000) % 1000}
        raw = rezipped(saved(state), packed=packed, prefix=prefix)
        catalog = assert_same_tensors(raw, state)
        catalog.check()
        part = np.asarray(catalog["large"][150_000:150_010])
        assert part.tolist() == state["large"][150_000:150_010].tolist()
        assert np.asarray(catalog["large"][5:7]).tolist() == [5, 6]  # back again

    def test_tied_tensors_in_a_deflated_archive(self):
        tensor = torch.arange(1000)
        raw = rezipped(saved({"a": tensor, "b": tensor, "c": tensor[500:]}), packed=True)
        catalog = weighlock.open(raw)
        assert catalog["a"].identity() == catalog["b"].identity()
        assert catalog["a"].identity() != catalog["c"].identity()

    def test_the_prefix_is_whatever_the_file_was_called(self, tmp_path):
        path = tmp_path / "a.b.pth.tar"
        torch.save({"w": torch.ones(3)}, path)
        path = path.rename(tmp_path / "renamed")
        with weighlock.open(path) as catalog:
            assert_same(catalog["w"], torch.ones(3))

    def test_archives_without_checksums(self):
        state = {"w": torch.arange(5.0)}
        torch.serialization.set_crc32_options(False)
        try:
            raw = saved(state)
        finally:
            torch.serialization.set_crc32_options(True)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert {member.CRC for member in archive.infolist()} == {0}
        catalog = assert_same_tensors(raw)
        assert any("without checksums" in note for note in catalog.notes)
        catalog.check()
        assert not any("checksums" in note for note in weighlock.open(saved(state)).notes)

    def test_archives_without_the_records_of_later_versions(self):
        later = (".format_version", ".storage_alignment", "byteorder", ".data/serialization_id")
        raw = rezipped(saved({"w": torch.arange(5)}), change=lambda n, c: None if n in later else c)
        assert_same_tensors(raw)

    def test_big_endian_archives(self):
        state = {
            "f64": torch.arange(5.0, dtype=torch.float64),
            "f32": torch.arange(12.0).reshape(3, 4).t(),
            "bf16": torch.arange(5.0).bfloat16(),
            "i16": torch.arange(-4, 9, dtype=torch.int16)[2:9:2],
            "i64": torch.tensor(-12345678901),
            "u8": torch.arange(7, dtype=torch.uint8),
            "bool": torch.tensor([True, False]),
            "c64": torch.tensor([1 + 2j, 3 - 4j]),
            "c128": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj(),
            "u16": torch.arange(65000, 65007).to(torch.uint16),
            "f8": torch.arange(5.0).to(torch.float8_e5m2),
        }
        raw = byteswapped(saved(state), [8, 4, 2, 2, 8, 1, 1, 4, 8, 2, 1])
        catalog = assert_same_tensors(raw, state)
        theirs = loaded(raw)
        for name in ("f64", "f32", "bf16", "i16", "i64", "c64", "c128"):
            assert_same(catalog[name], theirs[name])
        catalog.check()
        assert np.asarray(catalog["f32"][1:3, 2]).tolist() == state["f32"][1:3, 2].tolist()

    def test_storages_aligned_otherwise(self):
        from torch.utils.serialization import config

        before = config.save.storage_alignment
        config.save.storage_alignment = 4096
        try:
            raw = saved(views())
        finally:
            config.save.storage_alignment = before
        assert_same_tensors(raw)

    def test_more_than_four_gigabytes(self, tmp_path):
        path = tmp_path / "large.pt"
        with torch.serialization.skip_data():
            state = {
                "large": torch.empty((5 << 30) // 4, dtype=torch.float32),
                "behind": torch.empty(1000, dtype=torch.int64),
            }
            state["end"] = state["large"][-1000:]
            torch.save(state, path)
        assert path.stat().st_size > 5 << 30
        if path.stat().st_blocks * 512 > 1 << 24:
            pytest.skip("this file system keeps no holes")
        reader = torch._C.PyTorchFileReader(str(path))
        end = np.arange(1000, dtype=np.float32)
        behind = np.arange(1000) * -3
        with path.open("r+b") as file:
            file.seek(reader.get_record_offset("data/0") + (5 << 30) - end.nbytes)
            file.write(end.tobytes())
            file.seek(reader.get_record_offset("data/1"))
            file.write(behind.tobytes())
        with weighlock.open(path) as catalog:
            assert catalog["large"].nbytes == 5 << 30
            assert catalog["end"].load().tolist() == end.tolist()
            assert catalog["behind"].load().tolist() == behind.tolist()
            assert np.asarray(catalog["large"][-3:]).tolist() == [997, 998, 999]
            assert np.asarray(catalog["large"][:3]).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
    def test_from_a_file_and_closed(self, tmp_path, legacy, no_leaks):
        path = tmp_path / "model.pt"
        path.write_bytes(saved(views(), legacy=legacy))
        with weighlock.open(path) as catalog:
            for name, tensor in views().items():
                assert_same(catalog[name], tensor)

    def test_what_follows_an_archive_is_told(self):
        with pytest.raises(FormatError, match="4 bytes follow the end of the archive"):
            weighlock.open(saved({"w": torch.ones(2)}) + b"junk")

    def test_a_zip_archive_of_something_else(self):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("word/document.xml", "<x/>")
        with pytest.raises(FormatError, match="not a PyTorch checkpoint"):
            weighlock.open(file.getvalue())


def write_shards(folder, *, legacy=False):
    """A sharded model of two files and its index; its tensors."""
    state = {f"layers.{n}.weight": torch.arange(n, n + 6.0).reshape(2, 3) for n in range(4)}
    weight_map = {}
    for number in (1, 2):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        part = {name: state[name] for name in list(state)[2 * number - 2 : 2 * number]}
        (folder / file).write_bytes(saved(part, legacy=legacy))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 96}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return state


def write_shards_with_more(folder):
    """Two shards with a tensor that is not read, names that collide, and other values."""
    one = {"a": torch.ones(2), "half": half_complex(), "epoch": 3}
    two = {"b": torch.ones(3), 1: torch.ones(1), "1": torch.zeros(1), "epoch": 4, "note": "last"}
    weight_map = {}
    for number, part in enumerate((one, two), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        (folder / file).write_bytes(saved(part))
        weight_map |= {str(k): file for k, v in part.items() if isinstance(v, torch.Tensor)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


class TestDirectories:
    @BOTH
    def test_sharded_models(self, tmp_path, legacy):
        state = write_shards(tmp_path, legacy=legacy)
        for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
            with weighlock.open(path) as catalog:
                assert list(catalog) == list(state)
                assert len(catalog.shards()) == 2
                for name, tensor in state.items():
                    assert_same(catalog[name], tensor)

    def test_a_shard_is_opened_when_it_is_needed(self, tmp_path):
        state = write_shards(tmp_path)
        (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(b"broken")
        with weighlock.open(tmp_path) as catalog:
            assert_same(catalog["layers.1.weight"], state["layers.1.weight"])
            with pytest.raises(FormatError):
                catalog["layers.2.weight"].load()

    def test_checksums_of_every_shard_are_checked(self, tmp_path):
        state = write_shards(tmp_path)
        with weighlock.open(tmp_path) as catalog:
            catalog.check()
        path = tmp_path / "pytorch_model-00002-of-00002.bin"
        raw = path.read_bytes()
        wanted = raw_bits(state["layers.3.weight"])
        path.write_bytes(raw.replace(wanted, wanted[:-1] + b"\x7f"))
        with weighlock.open(tmp_path) as catalog, pytest.raises(FormatError, match="checksum"):
            catalog.check()

    def test_what_cannot_be_read_in_a_shard_is_told(self, tmp_path):
        state = {"good": torch.ones(2), "half": half_complex()}
        (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(saved(state))
        index = {"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with weighlock.open(tmp_path) as catalog:
            assert_same(catalog["good"], state["good"])
            with pytest.raises(weighlock.WeighlockError, match="complex32"):
                catalog["half"].load()

    def test_what_shards_hold_beside_tensors_is_told(self, tmp_path):
        write_shards_with_more(tmp_path)
        with weighlock.open(tmp_path) as catalog:
            one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
            assert catalog.extras == {one: {"epoch": 3}, two: {"epoch": 4, "note": "last"}}
            assert catalog.unreadable.keys() == {"half"}
            assert "complex32" in catalog.unreadable["half"]
            renamed, lost = catalog.notes
            assert renamed.startswith(f"{two}: ")
            assert lost == f"{two}: its index does not list '1#2'"
            assert ("torch._utils", "_rebuild_tensor_v3") in catalog.globals
            assert list(catalog.readable()) == ["a", "b", "1"]
            assert list(catalog.select("*")) == ["a", "b", "1"]
            assert sorted(catalog.readable().load()) == ["1", "a", "b"]

    def test_asking_for_a_tensor_opens_no_other_shard(self, tmp_path):
        write_shards_with_more(tmp_path)
        (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(b"broken")
        with weighlock.open(tmp_path) as catalog:
            assert list(catalog.select("a")) == ["a"]
            with pytest.raises(FormatError):
                _ = catalog.extras

    def test_a_shard_of_an_unknown_type_is_not_taken_for_one_that_is_left_out(self, tmp_path):
        header = json.dumps({"w": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (tmp_path / "m.bin").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
        index = {"weight_map": {"w": "m.bin"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with weighlock.open(tmp_path) as catalog, pytest.raises(FormatError, match="F3"):
            catalog.select("*")

    def test_safetensors_are_preferred(self, tmp_path):
        torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
        with weighlock.open(tmp_path) as catalog:
            assert list(catalog) == ["old"]
        save_file({"new": torch.ones(1)}, tmp_path / "model.safetensors")
        with weighlock.open(tmp_path) as catalog:
            assert list(catalog) == ["new"]

    def test_safetensors_are_preferred_to_shards(self, tmp_path):
        write_shards(tmp_path)
        save_file({"new": torch.ones(1)}, tmp_path / "model.safetensors")
        with weighlock.open(tmp_path) as catalog:
            assert list(catalog) == ["new"]

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "best.pt", "last.pth", "epoch=1.ckpt"])
    def test_the_only_checkpoint_of_a_directory(self, tmp_path, name):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
        (tmp_path / "config.json").write_text("{}")
        with weighlock.open(tmp_path) as catalog:
            assert list(catalog) == ["w"]

    def test_the_name_of_a_file_decides_nothing(self, tmp_path):
        state = {"w": torch.arange(4.0)}
        (tmp_path / "a.safetensors").write_bytes(saved(state))
        (tmp_path / "b.pt").write_bytes(saved(state, legacy=True))
        save_file(state, tmp_path / "c.bin")
        for path in sorted(tmp_path.iterdir()):
            with weighlock.open(path) as catalog:
                assert_same(catalog["w"], state["w"])


def test_flat_names_are_what_they_should_be():
    assert list(flat({"a": [torch.ones(1), {2: torch.ones(1)}]})) == ["a.0", "a.1.2"]
