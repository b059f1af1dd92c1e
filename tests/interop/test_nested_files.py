"""Checkpoints that torch.save wrote into bytes, which were saved in turn."""

import contextlib
import io
import zipfile

import pytest
import torch
from tar_checkpoints import old_saved
from torch_objects import assert_same, saved

import weighlock
from weighlock.errors import FormatError, LimitExceeded
from weighlock.formats.scanning import scan_source
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource

INNER = {"a": torch.arange(3.0), "b": [torch.ones(2, 2)]}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("outer", [False, True], ids=["in zip", "in legacy"])
@pytest.mark.parametrize("inner", ["zip", "legacy", "tar"])
def test_inner_tensors_have_names_below_the_bytes(inner, outer, protocol):
    raw = old_saved(INNER) if inner == "tar" else saved(INNER, legacy=inner == "legacy")
    thing = {"w": torch.zeros(1), "deep": [{"blob": raw}], "epoch": 3}
    catalog = weighlock.open(saved(thing, legacy=outer, protocol=protocol))
    assert list(catalog) == ["w", "deep.0.blob.a", "deep.0.blob.b.0"]
    assert_same(catalog["deep.0.blob.b.0"], INNER["b"][0])
    assert catalog.extras["deep"][0]["blob"] == raw
    assert catalog.extras["epoch"] == 3
    assert any("deep.0.blob" in note for note in catalog.notes)
    catalog.check()


def test_levels_are_limited():
    raw = saved({"w": torch.ones(1)})
    for _ in range(6):
        raw = saved({"in": raw})
    assert not weighlock.open(raw)
    assert list(weighlock.open(raw, limits=Limits(nested_depth=6))) == ["in.in.in.in.in.in.w"]
    assert not weighlock.open(raw, limits=Limits(nested_depth=0))


def test_what_only_begins_so_is_noted():
    cut = saved(INNER)[:700]
    catalog = weighlock.open(saved({"w": torch.ones(1), "x": cut, "zip": b"PK\3\4" + bytes(99)}))
    assert list(catalog) == ["w"]
    assert len(catalog.notes) == 2
    assert all("is none" in note for note in catalog.notes)


def test_one_that_is_shared_is_opened_once():
    raw = saved(INNER)
    catalog = weighlock.open(saved({"x": [raw] * 50, "y": {"z": raw}}))
    assert len(catalog) == 2


def test_names_that_collide_stay_apart():
    catalog = weighlock.open(saved({"x": saved(INNER), "x.a": torch.zeros(4)}))
    assert catalog["x.a"].shape == (4,)
    assert_same(catalog["x.a#2"], INNER["a"])
    assert any("'x.a' is taken" in note for note in catalog.notes)


def test_groups_and_what_is_not_read_come_along():
    inner = {"s": torch.eye(3).to_sparse(), "m": torch.empty(2, device="meta")}
    catalog = weighlock.open(saved({"x": saved(inner)}))
    assert catalog.groups["x.s"].parts == {"indices": "x.s.indices", "values": "x.s.values"}
    assert catalog.groups["x.m"].kind == "meta"
    assert list(catalog.unreadable) == ["x.m"]


def test_tensors_are_counted_together():
    raw = saved({"x": saved({f"t{n}": torch.ones(1) for n in range(10)}), "w": torch.ones(1)})
    catalog = weighlock.open(raw, limits=Limits(tensors=30))
    assert len(catalog) == 11
    with pytest.raises(LimitExceeded):
        weighlock.open(
            saved({f"t{n}": torch.ones(1) for n in range(31)}), limits=Limits(tensors=30)
        )
    raw = saved({f"x{n}": saved(INNER) for n in range(10)})
    some = weighlock.open(raw, limits=Limits(tensors=15))
    assert len(some) <= 15
    assert any("15 allowed" in note for note in some.notes)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_scan_looks_into_bytes(legacy, protocol):
    class Evil:
        def __reduce__(self):
            return print, ("x",)

    inner = saved({"w": torch.ones(1), "evil": Evil()})
    outer = saved({"model": saved({"again": inner})}, legacy=legacy, protocol=protocol)
    found = {(f.module, f.name): f.place for f in scan_source(BytesSource(outer))}
    assert "bytes" in found["__builtin__", "print"]
    assert ("__builtin__", "print") in weighlock.open(outer).globals


def test_it_is_written_as_one_file(tmp_path):
    weighlock.save(tmp_path / "o.safetensors", weighlock.open(saved({"x": saved(INNER)})))
    with weighlock.open(tmp_path / "o.safetensors") as catalog:
        assert_same(catalog["x.a"], INNER["a"])


class Wrapped:
    """Makes torch.save write a tensor as pickle does."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        func, (storage, *rest) = self.tensor.__reduce_ex__(2)
        return func, (Bytes(storage), *rest)


class Bytes:
    def __init__(self, storage):
        self.parts = storage.__reduce__()

    def __reduce__(self):
        return self.parts


def test_storages_as_bytes():
    base = torch.arange(6.0).reshape(2, 3)
    state = {"a": Wrapped(base.t()), "b": Wrapped(torch.arange(4)), "c": torch.ones(1)}
    catalog = weighlock.open(saved(state))
    assert list(catalog) == ["a", "b", "c"]
    assert_same(catalog["a"], base.t())
    assert_same(catalog["b"], torch.arange(4))
    assert ("torch.storage", "_load_from_bytes") in catalog.globals


def inline(raw):
    """A checkpoint whose tensor has its storage in these bytes."""
    rebuild = b"ctorch._utils\n_rebuild_tensor\n("
    load = b"ctorch.storage\n_load_from_bytes\n(B" + len(raw).to_bytes(4, "little") + raw + b"tR"
    good = io.BytesIO(saved({}))
    target = io.BytesIO()
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            body = b"\x80\x03" + rebuild + load + b"K\0K\2\x85K\1\x85tR."
            new.writestr(name, body if name.endswith("data.pkl") else old.read(name))
    return target.getvalue()


def test_bytes_that_stand_for_a_storage_and_are_none():
    storage = torch.tensor([1.0, 2.0]).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    raw = saved(typed, legacy=True)
    assert weighlock.open(inline(raw))["tensor"].load().tolist() == [1.0, 2.0]
    evil = raw.replace(b"ctorch\nFloatStorage\n", b"cposix\nsystem\n")
    for bad in (raw[:-1], raw + b"x", raw[:40], b"", b"x", saved({"a": 1}, legacy=True), evil):
        with pytest.raises(FormatError):
            weighlock.open(inline(bad))
    found = set()
    with contextlib.suppress(FormatError):
        for finding in scan_source(BytesSource(inline(evil))):
            found.add((finding.module, finding.name))
    assert ("posix", "system") in found
