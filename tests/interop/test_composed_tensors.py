"""Tensors that torch holds as several: sparse, quantised, nested; and those without data."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch_objects import assert_same, raw_bits, saved

import weighlock
from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.formats.scanning import scan_source
from weighlock.sources.local import BytesSource
from weighlock.tensors.groups import Group

BOTH = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]
INDICES = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def dense():
    found = torch.zeros(6, 8)
    found[0, 3], found[4, 1], found[5, 7] = 1.5, -2.0, 3.0
    return found


def sparse(layout, values=None):
    values = dense() if values is None else values
    size = {"blocksize": (2, 4)} if layout in ("sparse_bsr", "sparse_bsc") else {}
    return values.to_sparse(layout=getattr(torch, layout), **size)


def parts_of(catalog, name):
    return {part: catalog[entry].torch() for part, entry in catalog.groups[name].parts.items()}


def rebuilt(catalog, name):
    """A sparse tensor from its parts, by torch."""
    group, parts = catalog.groups[name], parts_of(catalog, name)
    if group.kind == "sparse_coo":
        return torch.sparse_coo_tensor(parts["indices"], parts["values"], group.shape)
    outer, inner = (parts[part] for part in INDICES[group.kind])
    layout = getattr(torch, group.kind)
    return torch.sparse_compressed_tensor(outer, inner, parts["values"], group.shape, layout=layout)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
class TestSparse:
    def test_parts_make_the_tensor_that_was_saved(self, layout, legacy):
        state = {"a": {"x": sparse(layout)}, "plain": torch.ones(2)}
        catalog = weighlock.open(saved(state, legacy=legacy))
        parts = ("indices",) if layout == "sparse_coo" else INDICES[layout]
        names = {part: f"a.x.{part}" for part in (*parts, "values")}
        assert catalog.groups == {"a.x": Group(layout, "F32", (6, 8), names)}
        assert list(catalog) == [*names.values(), "plain"]
        assert not catalog.unreadable
        again = rebuilt(catalog, "a.x")
        assert again.layout == state["a"]["x"].layout
        assert torch.equal(again.to_dense(), dense())

    def test_more_dimensions(self, layout, legacy):
        values = torch.stack([dense(), dense() * 2])  # of a batch, or with one more to index
        catalog = weighlock.open(saved({"x": sparse(layout, values)}, legacy=legacy))
        assert catalog.groups["x"].shape == (2, 6, 8)
        assert torch.equal(rebuilt(catalog, "x").to_dense(), values)

    def test_nothing_in_it(self, layout, legacy):
        catalog = weighlock.open(saved({"x": sparse(layout, torch.zeros(4, 8))}, legacy=legacy))
        assert torch.equal(rebuilt(catalog, "x").to_dense(), torch.zeros(4, 8))


class TestQuantised:
    @BOTH
    @pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
    def test_by_tensor(self, dtype, legacy):
        x = torch.quantize_per_tensor(torch.linspace(-1, 1, 24).reshape(4, 6), 0.05, 3, dtype)
        catalog = weighlock.open(saved({"x": x, "t": x.t(), "rows": x[1:3]}, legacy=legacy))
        for name, tensor in (("x", x), ("t", x.t()), ("rows", x[1:3])):
            kind = "quantized per_tensor_affine"
            parts = {part: f"{name}.{part}" for part in ("int_repr", "scale", "zero_point")}
            torch_name = str(dtype).removeprefix("torch.")
            assert catalog.groups[name] == Group(kind, torch_name, tuple(tensor.shape), parts)
            assert_same(catalog[f"{name}.int_repr"], tensor.int_repr())
            assert catalog[f"{name}.scale"].load() == x.q_scale()
            assert catalog[f"{name}.zero_point"].load() == x.q_zero_point() == 3

    @BOTH
    def test_by_channel(self, legacy):
        scales, zeros = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64), torch.tensor([0, 1, -2])
        x = torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 1, torch.qint8)
        catalog = weighlock.open(saved({"x": x}, legacy=legacy))
        assert list(catalog) == ["x.int_repr", "x.scale", "x.zero_point", "x.axis"]
        assert_same(catalog["x.int_repr"], x.int_repr())
        assert_same(catalog["x.scale"], x.q_per_channel_scales())
        assert_same(catalog["x.zero_point"], x.q_per_channel_zero_points())
        assert catalog["x.axis"].load() == 1

    @BOTH
    def test_several_numbers_to_a_byte_come_packed(self, legacy):
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0])
        x = torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 0, torch.quint4x2)
        catalog = weighlock.open(saved({"x": x}, legacy=legacy))
        assert catalog.groups["x"].dtype == "quint4x2"
        raw = catalog["x.packed"]
        assert raw.load().tobytes() == bytes(x.untyped_storage().tolist())

    def test_modules(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.nn.Sequential(torch.nn.Linear(4, 3))
            small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        state = small.state_dict()
        catalog = weighlock.open(saved(state))
        name = next(name for name in catalog.groups if catalog.groups[name].dtype == "qint8")
        weight, bias = state["0._packed_params._packed_params"]
        assert_same(catalog[f"{name}.int_repr"], weight.int_repr())
        assert any(raw_bits(bias) == ref.load().tobytes() for ref in catalog.values())


class TestNested:
    @BOTH
    def test_strided(self, legacy):
        rows = [torch.arange(6.0).reshape(2, 3), torch.arange(4.0).reshape(1, 4)]
        x = torch.nested.nested_tensor(rows)
        catalog = weighlock.open(saved({"x": x}, legacy=legacy))
        assert catalog.groups["x"].kind == "nested"
        assert catalog.groups["x"].shape == (2, None, None)
        p = parts_of(catalog, "x")
        buffer = p["values"]
        for n, row in enumerate(rows):
            at = int(p["offsets"][n])
            view = buffer.as_strided(p["sizes"][n].tolist(), p["strides"][n].tolist(), at)
            assert torch.equal(view, row)

    def test_jagged(self):
        rows = [torch.arange(6.0).reshape(2, 3), torch.arange(3.0).reshape(1, 3)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        catalog = weighlock.open(saved({"x": x}))
        assert list(catalog) == ["x.values", "x.offsets"]
        assert catalog.groups["x"].shape == (2, None, 3)
        p = parts_of(catalog, "x")
        bounds = p["offsets"].tolist()
        for n, row in enumerate(rows):
            assert torch.equal(p["values"][bounds[n] : bounds[n + 1]], row)


class TestMeta:
    @BOTH
    def test_specs_without_data(self, legacy):
        state = {"m": torch.empty(2, 3, device="meta", dtype=torch.bfloat16), "w": torch.ones(1)}
        catalog = weighlock.open(saved(state, legacy=legacy))
        assert list(catalog) == ["w"]
        assert catalog.groups == {"m": Group("meta", "BF16", (2, 3))}
        assert "no data" in catalog.unreadable["m"]
        with pytest.raises(KeyError, match=r"m: meta BF16 \[2, 3\], no data"):
            catalog["m"]
        assert catalog.get("m") is None


class TestCatalogs:
    def catalog(self):
        return weighlock.open(saved({"a": sparse("sparse_csr"), "b": sparse("sparse_coo")}))

    def test_the_whole_is_no_entry_and_says_where_it_is(self):
        catalog = self.catalog()
        assert "a" not in catalog
        with pytest.raises(KeyError, match=r"sparse_csr F32 \[6, 8\], in a.crow_indices"):
            catalog["a"]

    def test_selecting_keeps_whole_groups(self):
        assert list(self.catalog().select("a.*").groups) == ["a"]
        assert list(self.catalog().select("*.values").groups) == []

    def test_renaming_renames_groups(self):
        renamed = self.catalog().rename(lambda name: f"model.{name}")
        assert renamed.groups["model.b"].parts["values"] == "model.b.values"
        assert torch.equal(rebuilt(renamed, "model.a").to_dense(), dense())

    def test_names_that_collide_stay_apart(self):
        state = {"x.values": torch.ones(1), "x": sparse("sparse_coo")}
        catalog = weighlock.open(saved(state))
        assert catalog.groups["x"].parts["values"] == "x.values#2"
        assert catalog["x.values"].load().tolist() == [1.0]
        assert torch.equal(rebuilt(catalog, "x").to_dense(), dense())
        assert any("'x.values'" in note for note in catalog.notes)

    def test_parts_share_and_tie_as_other_tensors_do(self):
        x = sparse("sparse_coo")
        catalog = weighlock.open(saved({"x": x, "again": x}))
        assert catalog["x.values"].identity() == catalog["again.values"].identity()

    def test_values_of_a_kind_that_is_not_read(self):
        values = torch.zeros(2, dtype=torch.complex32)
        x = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (3,))
        catalog = weighlock.open(saved({"x": x, "w": torch.ones(1)}))
        assert list(catalog) == ["w"]
        assert "complex32" in catalog.unreadable["x"]
        assert not catalog.groups

    def test_what_an_index_lists_and_is_no_single_tensor(self, tmp_path):
        torch.save({"x": sparse("sparse_coo"), "w": torch.ones(2)}, tmp_path / "a.bin")
        index = {"metadata": {}, "weight_map": {"x": "a.bin", "w": "a.bin"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with weighlock.open(tmp_path) as catalog:
            assert list(catalog.readable()) == ["w"]
            assert "sparse_coo" in catalog.unreadable["x"]
            with pytest.raises(UnsupportedDType, match="by itself"):
                catalog["x"]

    def test_what_is_written_is_what_was_read(self, tmp_path):
        source = self.catalog()
        weighlock.save(tmp_path / "out.safetensors", source)
        with weighlock.open(tmp_path / "out.safetensors") as target:
            assert list(target) == list(source)
            for name in source:
                assert np.array_equal(target[name].load(), source[name].load())


def test_what_torch_takes_for_safe_is_not_foreign():
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    findings = list(scan_source(BytesSource(saved({"j": jagged}))))
    assert findings
    assert [f for f in findings if not f.known] == []


def test_an_error_names_the_file_once(tmp_path):
    content = saved({"w": torch.ones(3)})
    broken = content.replace(b"data/0", b"data/9", 1)  # in the member's own header
    (tmp_path / "x.pt").write_bytes(broken)
    with pytest.raises(LayoutError, match="'w'") as caught:
        weighlock.open(tmp_path / "x.pt")
    assert str(caught.value).count("x.pt") == 1
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt", pickle_protocol=0)
    with pytest.raises(LayoutError, match=r"x\.pt: a tensor's storage is not given as torch"):
        weighlock.open(tmp_path / "x.pt")


def test_what_belongs_together_does_so_in_a_mean(tmp_path):
    indices = torch.tensor([[0, 1], [1, 0]])
    paths = [tmp_path / f"{number}.pt" for number in range(2)]
    for number, path in enumerate(paths):
        values = torch.tensor([1.0, 3.0]) * (number + 1)
        torch.save({"s": torch.sparse_coo_tensor(indices, values, (2, 2))}, path)
    with weighlock.open(paths[0]) as catalog:
        expected = dict(catalog.groups)
    for out in (None, tmp_path / "mean.safetensors"):
        found = weighlock.mean(paths, out=out)
        assert dict(found.groups) == expected
        assert found["s.values"].load().tolist() == [1.5, 4.5]
    assert dict(weighlock.median(paths).groups) == expected
    with weighlock.Mean(tmp_path / "sums") as total:
        for path in paths:
            total.add(path)
        assert dict(total.finish().groups) == expected
    # Indices that were subtracted are none.
    delta = weighlock.difference(*paths)
    assert not delta.groups
    assert dict(weighlock.apply(paths[1], delta).groups) == expected
    other = tmp_path / "other.pt"
    torch.save({"s": torch.sparse_coo_tensor(indices, torch.ones(2), (2, 3))}, other)
    assert not weighlock.mean([paths[0], other]).groups
