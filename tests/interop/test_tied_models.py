"""Tied weights: names `save_model` leaves out are visible here, and those we leave out, there."""

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import weighlock
from weighlock.errors import LayoutError


class Tied(torch.nn.Module):
    """An embedding, a head that shares its weight, and a layer of its own."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(6, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def same(a, b):
    return all(torch.equal(a.state_dict()[name], b.state_dict()[name]) for name in a.state_dict())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tied.safetensors"


def test_names_that_save_model_left_out_are_in_the_catalog(path, no_leaks):
    model = Tied()
    safetensors.torch.save_model(model, path, metadata={"format": "pt"})
    with weighlock.open(path) as catalog:
        assert set(catalog) == set(model.state_dict())
        assert catalog["head.weight"].identity() == catalog["embedding.weight"].identity()
        assert catalog["head.weight"].name == "head.weight"
        assert catalog.nbytes == sum(p.numel() * 4 for p in model.parameters())
        loaded = catalog.load()
        assert loaded["head.weight"] is loaded["embedding.weight"]
        for name, tensor in model.state_dict().items():
            assert loaded[name].tobytes() == tensor.numpy().tobytes()


def test_tied_model_is_loaded_into(path):
    safetensors.torch.save_model(Tied(seed=1), path)
    model = Tied(seed=2)
    with weighlock.open(path) as catalog:
        report = catalog.load_into(model)
    assert (report.missing, report.unexpected) == ((), ())
    assert same(model, Tied(seed=1))
    assert model.head.weight is model.embedding.weight


def test_aliases_written_here_are_loaded_there(path):
    weighlock.save(path, Tied(seed=1).state_dict(), tied="alias", durable=False)
    assert set(safetensors.torch.load_file(path)) == {
        "embedding.weight",
        "layer.weight",
        "layer.bias",
    }
    model = Tied(seed=2)
    missing, unexpected = safetensors.torch.load_model(model, path)
    assert (set(missing), set(unexpected)) == (set(), set())
    assert same(model, Tied(seed=1))


def test_copies_written_here_are_loaded_there(path):
    weighlock.save(path, Tied(seed=1).state_dict(), durable=False)
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(Tied().state_dict())
    assert torch.equal(loaded["head.weight"], loaded["embedding.weight"])
    with weighlock.open(path) as catalog:
        assert catalog["head.weight"].identity() != catalog["embedding.weight"].identity()


@pytest.mark.parametrize("tied", ["copy", "alias"])
def test_tied_file_is_copied_and_keeps_every_name(path, tmp_path, tied):
    safetensors.torch.save_model(Tied(seed=1), path, metadata={"made by": "a test"})
    again = tmp_path / "again.safetensors"
    with weighlock.open(path) as catalog:
        weighlock.save(again, catalog, tied=tied, durable=False)
    with weighlock.open(again) as catalog:
        assert set(catalog) == set(Tied().state_dict())
        assert catalog.metadata["made by"] == "a test"
    assert len(safetensors.torch.load_file(again)) == (4 if tied == "copy" else 3)


def test_tied_names_are_kept_by_shards(tmp_path):
    weighlock.save(
        tmp_path / "model",
        Tied(seed=1).state_dict(),
        tied="alias",
        durable=False,
        max_shard_bytes=80,
    )
    model = Tied(seed=2)
    with weighlock.open(tmp_path / "model") as catalog:
        assert set(catalog) == set(model.state_dict())
        catalog.load_into(model)
    assert same(model, Tied(seed=1))


def test_metadata_that_only_looks_like_an_alias_is_metadata(path):
    tensors = {"pt": np.zeros(1), "a": np.zeros(1)}
    metadata = {"format": "pt", "note": "b", "a": "pt", "": "a"}
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    with weighlock.open(path) as catalog:
        assert set(catalog) == {"pt", "a"}
        assert dict(catalog.metadata) == metadata


def test_alias_that_would_hide_metadata_is_refused(path):
    shared = np.zeros(3)
    with pytest.raises(LayoutError, match="'note'"):
        weighlock.save(
            path,
            {"a": shared, "note": shared},
            metadata={"note": "mine"},
            tied="alias",
            durable=False,
        )
    assert not path.exists()
