"""TorchScript archives: the tensors torch.jit reads, by the paths of their modules."""

import io
import zipfile

import numpy as np
import pytest
import torch
from torch_objects import Counted, assert_same, rezipped

import weighlock
from process.plain_server import PlainServer
from weighlock.errors import FormatError, LayoutError
from weighlock.formats.scanning import scan_source
from weighlock.sources.local import BytesSource

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("steps", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Outer(torch.nn.Module):
    some: list[torch.Tensor]
    by_name: dict[str, torch.Tensor]

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.small = torch.nn.Parameter(torch.arange(4.0).half())
        self.some = [torch.ones(2), torch.zeros(1)]
        self.by_name = {"a": torch.full((3,), 7.0)}
        self.sizes = [3, 4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.small + self.some[0].sum()


def written(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def scripted():
    torch.manual_seed(3)
    return torch.jit.script(Outer())


@pytest.fixture(scope="module")
def raw(scripted):
    return written(scripted)


def test_names_are_those_of_the_module(scripted, raw):
    catalog = weighlock.open(raw)
    for name, tensor in scripted.state_dict().items():
        assert_same(catalog[name], tensor)
    others = set(catalog) - set(scripted.state_dict())
    assert others == {"some.0", "some.1", "by_name.a"}
    assert_same(catalog["by_name.a"], torch.full((3,), 7.0))
    assert catalog.extras["sizes"] == [3, 4]
    assert catalog.extras["training"] is True
    assert not catalog.unreadable


def test_that_code_was_not_looked_at_is_told(raw):
    (note,) = weighlock.open(raw).notes
    assert "TorchScript" in note
    assert "code" in note


def test_traced_modules():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    traced = torch.jit.trace(model, torch.ones(1, 2))
    catalog = weighlock.open(written(traced))
    assert set(catalog) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert_same(catalog[name], tensor)


def test_constants_of_frozen_modules():
    model = torch.nn.Sequential(torch.nn.Linear(5, 3)).eval()
    catalog = weighlock.open(written(torch.jit.freeze(torch.jit.script(model))))
    assert all(name.startswith("constants.c") for name in catalog)
    found = {ref.load().tobytes() for ref in catalog.values()}
    assert found == {tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()}
    assert "Sequential" in catalog.extras["__class__"]


def test_a_module_with_a_part_of_that_name():
    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.constants = torch.nn.Linear(2, 2)
            self.seven = torch.tensor([7.0, 7.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.constants(x)

    model = torch.nn.Sequential(torch.nn.Linear(1, 2)).eval()
    one = zipfile.ZipFile(io.BytesIO(written(torch.jit.freeze(torch.jit.script(model)))))
    other = written(torch.jit.script(Part()))
    names = {name.split("/", 1)[1]: one.read(name) for name in one.namelist()}
    mixed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(other)) as old, zipfile.ZipFile(mixed, "w") as new:
        for name in old.namelist():
            if not name.endswith("/constants.pkl"):
                new.writestr(name, old.read(name))
        prefix = old.namelist()[0].split("/")[0]
        for name, content in names.items():
            if name.startswith("constants"):
                new.writestr(f"{prefix}/{name}", content)
    catalog = weighlock.open(mixed.getvalue())
    assert {"constants.weight", "constants.bias", "seven"} <= set(catalog)
    assert_same(catalog["constants#2.c0"], model.state_dict()["0.weight"])


def test_quantised_modules():
    x = torch.quantize_per_tensor(torch.rand(3, 2), 0.1, 5, torch.quint8)

    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("x", x)

        def forward(self):
            return self.x.dequantize()

    catalog = weighlock.open(written(torch.jit.script(Holds())))
    assert catalog.groups["x"].kind == "quantized per_tensor_affine"
    assert_same(catalog["x.int_repr"], x.int_repr())
    assert catalog["x.zero_point"].load() == 5


def test_scan_tells_classes_and_takes_no_code_for_a_pickle(raw):
    found = {(f.module, f.name) for f in scan_source(BytesSource(raw))}
    assert ("torch._utils", "_rebuild_tensor_v2") in found
    assert all(module.startswith(("__torch__", "torch", "collections")) for module, _ in found)


def test_hidden_and_broken_constants(raw):
    def constants(content):
        return rezipped(raw, change=lambda n, old: content if n == "constants.pkl" else old)

    evil = weighlock.open(constants(b"\x80\x02cos\nsystem\nX\x01\0\0\0x\x85R\x85."))
    assert ("os", "system") in evil.globals
    with pytest.raises(LayoutError, match="constants"):
        weighlock.open(constants(b"\x80\x02}."))
    with pytest.raises(FormatError, match="'archive/constants/7'"):
        weighlock.open(
            constants(
                b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n"
                b"FloatStorage\nX\x01\0\0\x007X\x03\0\0\0cpuK\x02tQK\0K\x02\x85K\x01\x85\x89}tR\x85."
            )
        )


def big():
    torch.manual_seed(1)
    return torch.jit.script(torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))))


def test_opening_reads_no_tensor_and_slices_read_rows():
    model = big()
    source = Counted(written(model))
    catalog = weighlock.open(source)
    assert source.taken() < source.size // 3
    assert np.array_equal(catalog["2.weight"][5], model.state_dict()["2.weight"][5].numpy())
    assert source.taken() == 1200


def test_remote_by_ranges():
    model = big()
    content = written(model)
    with PlainServer({"/m.pt": content}) as server, weighlock.open(server.url("m.pt")) as catalog:
        opened = len(server.asked())
        # The head; the end with the directory; two pickles and the byte order, each together with
        # its head; heads of storages that do not lie in the first megabyte, near ones together.
        assert opened == 1 + 1 + 3 + 2
        assert set(catalog) == set(model.state_dict())
        assert_same(catalog["3.bias"], model.state_dict()["3.bias"])
        assert len(server.asked()) - opened <= 3  # as many as assert_same reads it
