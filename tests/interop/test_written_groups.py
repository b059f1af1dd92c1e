"""Sparse, quantised and nested tensors are the same tensors after they were written or sent."""

import json

import pytest
import torch
from safetensors import safe_open
from torch_objects import saved

import weighlock
from weighlock import DType
from weighlock.formats.grouping import GROUPS_KEY, read_groups, written_groups
from weighlock.limits import Limits
from weighlock.tensors.convert import CastRef
from weighlock.tensors.groups import Group

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def things():
    dense = torch.eye(6)
    return {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "q": torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
        "n": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        "w": torch.ones(2),
    }


@pytest.fixture
def catalog():
    return weighlock.open(saved(things()))


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 60}, {"tied": "alias"}], ids=str)
def test_saved(catalog, tmp_path, options):
    weighlock.save(tmp_path / "out", catalog, **options)
    with weighlock.open(tmp_path / "out") as written:
        assert written.groups == catalog.groups
        assert not written.unreadable
        assert list(written.select("coo.*").groups) == ["coo"]
        weighlock.save(tmp_path / "again", written)
    with weighlock.open(tmp_path / "again") as again:
        assert again.groups == catalog.groups


def test_chosen_and_renamed(catalog, tmp_path):
    chosen = catalog.select("coo.*", "csr.values", "w").rename(lambda name: f"model.{name}")
    weighlock.save(tmp_path / "out", chosen)
    with weighlock.open(tmp_path / "out") as written:
        assert list(written.groups) == ["model.coo"]
        assert written.groups["model.coo"].parts["values"] == "model.coo.values"
        told = json.loads(written.metadata[GROUPS_KEY])
        assert list(told) == ["model.coo"]


def test_of_shards_changed_and_renamed(catalog, tmp_path):
    weighlock.save(tmp_path / "shards", catalog, max_shard_bytes=60)
    with weighlock.open(tmp_path / "shards") as shards:
        renamed = shards.rename(lambda name: f"model.{name}")
        assert {*renamed.groups} == {f"model.{name}" for name in catalog.groups}
        cast = shards.map(lambda ref: CastRef.of(ref, DType.F64) if ref.dtype == "F32" else ref)
        assert cast.groups["coo"].dtype == "F64"
        weighlock.save(tmp_path / "out", renamed, metadata={"said": "so"})
    with weighlock.open(tmp_path / "out") as written:
        assert written.metadata["said"] == "so"
        assert "model.coo" in written.groups


def test_shared_and_fetched(catalog, tmp_path):
    with weighlock.Server() as server:
        url = server.share(catalog).url
        assert weighlock.fetch(url).groups == catalog.groups
        with weighlock.open(url) as remote:
            assert remote.groups == catalog.groups
        with weighlock.fetch(url, into=tmp_path / "out") as landed:
            assert landed.groups == catalog.groups
        with weighlock.fetch(url, names="coo.*", into=tmp_path / "part") as part:
            assert list(part.groups) == ["coo"]


def test_others_read_the_file(catalog, tmp_path):
    weighlock.save(tmp_path / "out", catalog)
    with safe_open(tmp_path / "out", "pt") as file:
        assert set(file.keys()) == set(catalog)
        assert file.metadata()["format"] == "pt"


def test_convert_leaves_the_scales_of_quantised_tensors(tmp_path, weighlock_command):
    (tmp_path / "x.pt").write_bytes(saved(things()))
    done = weighlock_command("convert", tmp_path / "x.pt", tmp_path / "out", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    with weighlock.open(tmp_path / "out") as written:
        assert written["q.scale"].dtype == "F64"
        assert written["coo.values"].dtype == written.groups["coo"].dtype == "BF16"
        assert written["w"].dtype == "BF16"
        assert set(written.groups) == {"coo", "csr", "q", "n"}
    info = json.loads(weighlock_command("info", "--json", tmp_path / "out").stdout)
    assert set(info["groups"]) == {"coo", "csr", "q", "n"}
    assert GROUPS_KEY not in info["metadata"]


GOOD = {"kind": "sparse_coo", "dtype": "F32", "shape": [2, None], "parts": {"values": "w"}}
STRANGE = {
    "no JSON": "{",
    "a list": "[]",
    "a number": '{"x": 3}',
    "a field too few": '{"x": {"kind": "a"}}',
    "a field too many": json.dumps({"x": {**GOOD, "more": 1}}),
    "a text as a shape": json.dumps({"x": {**GOOD, "shape": "ab"}}),
    "a negative size": json.dumps({"x": {**GOOD, "shape": [-1]}}),
    "a fraction": json.dumps({"x": {**GOOD, "shape": [1.5]}}),
    "parts that are no names": json.dumps({"x": {**GOOD, "parts": {"values": 3}}}),
    "one key twice": f'{{"x": {json.dumps(GOOD)}, "x": {json.dumps(GOOD)}}}',
    "nested deeply": "[" * 100_000,
}


@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_text_that_is_something_else_is_noted_and_does_no_harm(tmp_path, text):
    weighlock.save(tmp_path / "x", {"w": torch.ones(2)}, metadata={GROUPS_KEY: text})
    with weighlock.open(tmp_path / "x") as catalog:
        assert catalog.groups == {}
        assert catalog["w"].load().tolist() == [1, 1]
        assert len(catalog.notes) == 1
        assert catalog.metadata[GROUPS_KEY] == text


def test_groups_that_name_what_is_not_there_or_go_by_the_name_of_a_tensor(tmp_path):
    gone, empty = ({**GOOD, "parts": parts} for parts in ({"values": "nowhere"}, {}))
    text = json.dumps({"w": GOOD, "gone": gone, "empty": empty, "x": GOOD})
    weighlock.save(tmp_path / "x", {"w": torch.ones(2)}, metadata={GROUPS_KEY: text})
    with weighlock.open(tmp_path / "x") as catalog:
        assert catalog.groups == {"x": Group("sparse_coo", "F32", (2, None), {"values": "w"})}
        assert catalog.notes == ()


def test_more_than_the_limits_allow_is_noted():
    groups = {f"g{n}": Group("nested", "F32", (1,), {"values": "w"}) for n in range(20)}
    metadata = written_groups(groups)
    assert read_groups(metadata, (), Limits()) == (groups, ())
    assert read_groups(metadata, (), Limits(tensors=2))[0] == {}
    assert written_groups({"m": Group("meta", "F32", (2,))}) == {}
