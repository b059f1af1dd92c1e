"""What torch writes besides state dicts: traced modules, scripts with files, exported programs."""

import io

import pytest
import torch

import weighlock
from weighlock.errors import FormatError


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.kept + self.passing


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_traced_module_has_the_names_of_its_state_dict(is_zip):
    traced = torch.fx.symbolic_trace(Model())
    buffer = io.BytesIO()
    torch.save(traced, buffer, _use_new_zipfile_serialization=is_zip)
    catalog = weighlock.open(buffer.getvalue())
    expected = traced.state_dict()
    assert list(catalog) == list(expected)
    assert "inner.0.weight" in catalog
    for name, tensor in expected.items():
        assert torch.equal(catalog[name].torch(), tensor)


def test_a_script_beside_which_a_file_of_the_same_name_was_saved():
    script = torch.jit.script(Model())
    buffer = io.BytesIO()
    torch.jit.save(script, buffer, _extra_files={"data.pkl": b"not a pickle", "note": b"hi"})
    catalog = weighlock.open(buffer.getvalue())
    for name, tensor in script.state_dict().items():
        assert torch.equal(catalog[name].torch(), tensor)


def test_a_program_that_was_exported_is_called_so():
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (torch.ones(1, 2),)), buffer)
    with pytest.raises(FormatError, match=r"torch\.export saved.*state_dict"):
        weighlock.open(buffer.getvalue())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's own
def test_a_package_is_called_so():
    buffer = io.BytesIO()
    with torch.package.PackageExporter(buffer) as exporter:
        exporter.save_pickle("model", "weights.pkl", {"w": torch.ones(2)})
    with pytest.raises(FormatError, match=r"torch\.package"):
        weighlock.open(buffer.getvalue())


def test_keys_that_no_file_can_hold_are_told_of_as_they_are_shown():
    buffer = io.BytesIO()
    torch.save({"": torch.ones(2), "__metadata__": torch.zeros(1)}, buffer)
    catalog = weighlock.open(buffer.getvalue())
    assert list(catalog) == ["''", "\\__metadata__"]
    assert [note for note in catalog.notes if "shown as" in note] == [
        "a name that no file can hold is shown as ''",
        "a name that no file can hold is shown as \\__metadata__",
    ]
