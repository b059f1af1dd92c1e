"""The commands on PyTorch checkpoints: most in this process, what matters as a process of its own.

Starting Python takes longer than all these commands; what is told on which stream and with which
exit code does not depend on it.
"""

import contextlib
import io
import json
import pickle
import signal
import struct
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_checks import assert_refused, succeeded
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import weighlock
from process.plain_server import PlainServer
from weighlock.cli import main

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
META = torch.empty(2, device="meta")
NO_DATA = "it has no data (meta), only a dtype and a shape"
BOTH = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


@pytest.fixture
def command(monkeypatch):
    """Runs the command in this process; returns what a finished process would be."""

    def run(*arguments):
        said, told = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["weighlock", *map(str, arguments)])
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
        try:
            with (
                contextlib.redirect_stdout(said),
                contextlib.redirect_stderr(told),
                pytest.raises(SystemExit) as ended,
            ):
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        code = ended.value.code or 0
        return subprocess.CompletedProcess(sys.argv, code, said.getvalue(), told.getvalue())

    return run


def model():
    """A small state dict with a tied weight, a strided one and a number."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "embed.weight": base,
        "head.weight": base,
        "proj.weight": base.t(),
        "norm.bias": base[1, 2:5].clone(),
        "steps": torch.tensor(7),
    }


def write(path, thing, *, legacy=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(thing, path, _use_new_zipfile_serialization=not legacy)
    return path


def unsupported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = torch.zeros(2, dtype=torch.complex32)
    wide = torch.tensor([1 + 2j], dtype=torch.complex128)
    return {"good": torch.ones(3), "wide": wide, "meta": META, "half": half}


class TestLs:
    @BOTH
    def test_lists_what_is_there(self, tmp_path, command, legacy):
        path = write(tmp_path / "m.pt", {**model(), "epoch": 3}, legacy=legacy)
        facts = json.loads(succeeded(command("ls", "--json", path)))
        assert [(f["name"], f["dtype"], f["shape"], f["bytes"]) for f in facts] == [
            ("embed.weight", "F32", [4, 6], 96),
            ("head.weight", "F32", [4, 6], 96),
            ("proj.weight", "F32", [6, 4], 96),
            ("norm.bias", "F32", [3], 12),
            ("steps", "I64", [], 8),
        ]
        said = succeeded(command("ls", path, "*.weight"))
        assert "proj.weight" in said
        assert "norm.bias" not in said

    def test_notes_go_to_stderr(self, tmp_path, command):
        path = write(tmp_path / "m.pt", {1: torch.ones(1), "1": torch.ones(2), **unsupported()})
        result = command("ls", path)
        assert "1#2" in succeeded(result)
        assert "would both be named '1'" in result.stderr
        assert "meta is left out" in result.stderr
        assert "half is left out" in result.stderr
        assert "note" not in result.stdout


class TestInfo:
    @BOTH
    def test_totals_ties_and_extras(self, tmp_path, command, legacy):
        thing = {"model": model(), "epoch": 3, "settings": {"lr": 0.1, "name": "x\x1b[2J"}}
        path = write(tmp_path / "m.pt", thing, legacy=legacy)
        facts = json.loads(succeeded(command("info", "--json", path)))
        assert facts["tensors"] == 5
        assert facts["parameters"] == 24 + 24 + 3 + 1
        assert facts["tied"] == {"model.head.weight": "model.embed.weight"}
        assert facts["extras"]["epoch"] == 3
        assert facts["extras"]["settings"]["lr"] == 0.1
        said = succeeded(command("info", path))
        assert "epoch : 3" in said

    def test_values_that_json_does_not_know(self, tmp_path, command):
        odd = {"raw": b"\xff\x00", "c": 1j, "inf": float("inf"), "nan": float("nan"), (1, 2): 3}
        odd |= {"set": {1}, "big": 2**100, "dtype": torch.float16, None: None, 1.5: True}
        odd |= {"huge": 10**5000, "alone": ["\ud800"], "nested": [10**5002]}
        path = write(tmp_path / "m.pt", {"w": torch.ones(1), **odd})
        facts = json.loads(succeeded(command("info", "--json", path)))
        assert facts["tensors"] == 1
        assert len(facts["extras"]) == len(odd)
        succeeded(command("info", path))

    def test_what_is_not_read_is_named(self, tmp_path, command):
        path = write(tmp_path / "m.pt", unsupported())
        facts = json.loads(succeeded(command("info", "--json", path)))
        assert facts["unreadable"].keys() == {"meta", "half"}
        assert facts["dtypes"].keys() == {"F32", "C128"}


class TestVerify:
    @BOTH
    def test_good_files(self, tmp_path, command, legacy):
        path = write(tmp_path / "m.pt", model(), legacy=legacy)
        assert "valid" in succeeded(command("verify", path))
        assert "5 tensors" in succeeded(command("verify", "--data", path))

    @BOTH
    def test_numbers_that_are_none(self, tmp_path, command, legacy):
        odd = torch.tensor([1.0, float("nan"), float("inf")])
        wide = torch.tensor([complex(1, float("nan"))], dtype=torch.complex128).conj()
        path = write(tmp_path / "m.pt", {"odd": odd, "wide": wide}, legacy=legacy)
        result = command("verify", "--data", "--finite", "--json", path)
        assert result.returncode == 1
        found = json.loads(result.stdout)["not_finite"]
        assert found == {"odd": {"nan": 1, "inf": 1}, "wide": {"nan": 1, "inf": 0}}

    def test_damaged_data_does_not_match_its_checksum(self, tmp_path, weighlock_command):
        path = write(tmp_path / "m.pt", {"w": torch.arange(1000.0)})
        raw = bytearray(path.read_bytes())
        raw[raw.index(np.float32(777).tobytes())] ^= 1
        path.write_bytes(raw)
        succeeded(weighlock_command("verify", path))  # the structure is as it was
        assert_refused(weighlock_command("verify", "--data", path), str(path), "data/0", "checksum")

    def test_damaged_data_in_a_shard(self, tmp_path, command):
        shard = write(tmp_path / "pytorch_model-00001-of-00001.bin", {"w": torch.arange(1000.0)})
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": {"w": shard.name}}))
        succeeded(command("verify", "--data", tmp_path))
        raw = bytearray(shard.read_bytes())
        raw[raw.index(np.float32(777).tobytes())] ^= 1
        shard.write_bytes(raw)
        assert_refused(command("verify", "--data", tmp_path), shard.name, "checksum")

    @BOTH
    def test_a_truncated_file(self, tmp_path, command, legacy):
        path = write(tmp_path / "m.pt", model(), legacy=legacy)
        path.write_bytes(path.read_bytes()[:-9])
        assert_refused(command("verify", path), str(path))


class TestDiff:
    @BOTH
    def test_a_twin_in_safetensors_is_the_same(self, tmp_path, command, legacy):
        path = write(tmp_path / "m.pt", model(), legacy=legacy)
        twin = tmp_path / "m.safetensors"
        save_file({name: tensor.clone().contiguous() for name, tensor in model().items()}, twin)
        result = command("diff", "--exit-code", path, twin)
        assert "5 tensors are the same, 0 differ" in succeeded(result)

    def test_what_differs(self, tmp_path, command):
        path = write(tmp_path / "a.pt", model())
        changed = model()
        changed["proj.weight"] = changed["proj.weight"].clone()
        changed["proj.weight"][2, 1] += 0.5
        del changed["steps"]
        other = write(tmp_path / "b.pt", changed, legacy=True)
        result = command("diff", "--exit-code", "--json", path, other)
        assert result.returncode == 1
        changes = {c["name"]: c for c in json.loads(result.stdout)["changes"]}
        assert changes.keys() == {"proj.weight", "steps"}
        assert changes["proj.weight"]["elements"] == 1
        assert changes["proj.weight"]["largest"] == 0.5

    def test_double_complex_numbers(self, tmp_path, command):
        numbers = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128)
        path = write(tmp_path / "a.pt", {"x": numbers})
        same = write(tmp_path / "b.pt", {"x": numbers.conj().resolve_conj().conj()})
        other = write(tmp_path / "c.pt", {"x": numbers + torch.tensor([0, 3j])})
        assert "1 tensor is the same" in succeeded(command("diff", path, same))
        said = succeeded(command("diff", path, other))
        assert "1 element differs by up to 3" in said


class TestConvert:
    @BOTH
    def test_the_result_is_what_torch_loads(self, tmp_path, weighlock_command, legacy):
        path, target = write(tmp_path / "m.pt", model(), legacy=legacy), tmp_path / "m.safetensors"
        said = succeeded(weighlock_command("convert", path, target))
        assert "1 name shares its tensor with another: written once for each name" in said
        ours, theirs = load_file(target), torch.load(path)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor)

    @BOTH
    def test_tied_as_aliases(self, tmp_path, command, legacy):
        path, target = write(tmp_path / "m.pt", model(), legacy=legacy), tmp_path / "m.safetensors"
        result = command("convert", "--tied", "alias", "--json", path, target)
        facts = json.loads(succeeded(result))
        assert facts["tied"] == {"head.weight": "embed.weight"}
        assert load_file(target).keys() == model().keys() - {"head.weight"}
        with safe_open(target, "pt") as file:
            assert file.metadata()["head.weight"] == "embed.weight"

    def test_the_metadata_names_the_format_as_older_transformers_demand(self, tmp_path, command):
        path, target = write(tmp_path / "m.pt", model()), tmp_path / "m.safetensors"
        succeeded(command("convert", path, target))
        with safe_open(target, "pt") as file:
            assert file.metadata()["format"] == "pt"

    @BOTH
    def test_what_safetensors_cannot_hold_is_refused_by_name(self, tmp_path, command, legacy):
        path, target = tmp_path / "m.pt", tmp_path / "m.safetensors"
        for name in ("wide", "meta", "half"):
            write(path, {"good": torch.ones(3), name: unsupported()[name]}, legacy=legacy)
            result = command("convert", path, target)
            assert_refused(result, repr(name), "--skip-unsupported")
            assert not target.exists()

    def test_what_is_large_by_repeating_is_refused_before_anything_is_written(
        self, tmp_path, command
    ):
        path, target = tmp_path / "m.pt", tmp_path / "m.safetensors"
        write(path, {"w": torch.ones(1).expand(2**30)})
        assert_refused(command("convert", path, target), "'w', of repeated elements")
        assert not target.exists()
        write(path, {"w": torch.ones(1).expand(2**10)})
        succeeded(command("convert", path, target))
        assert torch.equal(load_file(target)["w"], torch.ones(2**10))

    @BOTH
    def test_skipped_with_a_report(self, tmp_path, command, legacy):
        path, target = write(tmp_path / "m.pt", unsupported(), legacy=legacy), tmp_path / "a"
        said = succeeded(command("convert", "--skip-unsupported", path, target))
        for name in ("wide", "meta", "half"):
            assert f"left out: {name}: " in said
        assert list(load_file(target)) == ["good"]
        result = command("convert", "--skip-unsupported", "--json", path, tmp_path / "b")
        facts = json.loads(succeeded(result))
        assert facts["skipped"].keys() == {"wide", "meta", "half"}
        assert facts["tensors"] == 1

    def test_a_selection_is_not_refused_for_what_it_leaves_out(self, tmp_path, command):
        path, target = write(tmp_path / "m.pt", unsupported()), tmp_path / "m.safetensors"
        succeeded(command("convert", "--select", "good", path, target))
        assert list(load_file(target)) == ["good"]

    def test_conjugated_numbers_are_written_as_they_are(self, tmp_path, command):
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        path, target = write(tmp_path / "m.pt", {"x": numbers.conj()}), tmp_path / "m.safetensors"
        succeeded(command("convert", path, target))
        assert load_file(target)["x"].tolist() == [1 - 2j, 3 + 4j]

    def test_a_whole_module_and_renaming(self, tmp_path, command):
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        path, target = write(tmp_path / "m.pt", {"net": module}), tmp_path / "m.safetensors"
        succeeded(command("convert", "--rename", r"^net\.=", path, target))
        assert load_file(target).keys() == module.state_dict().keys()
        module.load_state_dict(load_file(target))

    def test_shards_of_checkpoints_into_one_file(self, tmp_path, command):
        folder = tmp_path / "in"
        folder.mkdir()
        weight_map = {}
        for number, part in enumerate(({"a": torch.ones(2)}, {"b": torch.arange(3)}), 1):
            name = f"pytorch_model-{number:05d}-of-00002.bin"
            write(folder / name, part)
            weight_map |= dict.fromkeys(part, name)
        index = {"metadata": {"total_size": 32}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        target = tmp_path / "m.safetensors"
        succeeded(command("convert", folder, target))
        assert {k: v.tolist() for k, v in load_file(target).items()} == {
            "a": [1, 1],
            "b": [0, 1, 2],
        }

    def test_shards_with_a_tensor_that_is_not_read(self, tmp_path, command):
        folder = tmp_path / "in"
        folder.mkdir()
        write(folder / "m-1.bin", {"a": torch.ones(2), "meta": META, "epoch": 7})
        index = {"weight_map": {"a": "m-1.bin", "meta": "m-1.bin"}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        target = tmp_path / "m.safetensors"
        assert_refused(command("convert", folder, target), "'meta'", "--skip-unsupported")
        result = command("convert", "--json", "--skip-unsupported", folder, target)
        assert json.loads(succeeded(result))["skipped"] == {"meta": NO_DATA}
        assert {k: v.tolist() for k, v in load_file(target).items()} == {"a": [1, 1]}
        facts = json.loads(succeeded(command("info", "--json", folder)))
        assert facts["tensors"] == 1
        assert facts["unreadable"] == {"meta": NO_DATA}
        assert facts["extras"] == {"m-1.bin": {"epoch": 7}}
        listed = command("ls", folder)
        assert "1 tensor," in succeeded(listed)
        assert "meta is left out" in listed.stderr
        assert "1 tensor is the same, 0 differ" in succeeded(command("diff", folder, target))
        succeeded(command("verify", "--data", folder))

    @BOTH
    def test_into_shards(self, tmp_path, command, legacy):
        path, target = write(tmp_path / "m.pt", model(), legacy=legacy), tmp_path / "out"
        succeeded(command("convert", "--max-shard-size", "120", path, target))
        with weighlock.open(target) as catalog:
            assert catalog.keys() == model().keys()
            assert len(catalog.shards()) > 1
            for name, tensor in model().items():
                assert catalog[name].load().tolist() == tensor.tolist()


class Bomb:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def foreign_checkpoint(path, *, legacy=False):
    """A checkpoint with an object whose class is nowhere to be found."""
    module = types.ModuleType("gone_with_the_training")
    module.Thing = type("Thing", (), {"__module__": module.__name__})
    sys.modules[module.__name__] = module
    try:
        return write(path, {"w": torch.ones(1), "thing": module.Thing()}, legacy=legacy)
    finally:
        del sys.modules[module.__name__]


def legacy_row(*pickles):
    """A legacy head whose object is one of these, without any storage."""
    return MAGIC + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + b"".join(pickles)


class TestScan:
    @BOTH
    def test_ordinary_checkpoints_name_nothing_foreign(self, tmp_path, command, legacy):
        thing = {"model": model(), "ordered": torch.nn.Linear(2, 2).state_dict(), "n": np.arange(3)}
        path = write(tmp_path / "m.pt", thing, legacy=legacy)
        said = succeeded(command("scan", path))
        assert said == "1 file, 0 foreign names, 0 could not be scanned\n"
        said = succeeded(command("scan", "--all", path))
        assert "torch._utils._rebuild_tensor_v2" in said
        assert "FOREIGN" not in said

    @BOTH
    def test_foreign_classes(self, tmp_path, command, legacy):
        path = foreign_checkpoint(tmp_path / "m.pt", legacy=legacy)
        result = command("scan", path)
        assert result.returncode == 1
        assert "FOREIGN" in result.stdout
        assert "gone_with_the_training.Thing" in result.stdout
        assert "_rebuild_tensor_v2" not in result.stdout
        result = command("scan", "--json", path)
        assert result.returncode == 1
        (report,) = json.loads(result.stdout)
        assert report["path"] == str(path)
        assert report["error"] is None
        known = {(g["module"], g["name"]): g["known"] for g in report["globals"]}
        assert known["gone_with_the_training", "Thing"] is False
        assert known["torch._utils", "_rebuild_tensor_v2"] is True
        assert {g["place"] for g in report["globals"]} == ({""} if legacy else {"m/data.pkl"})

    @pytest.mark.parametrize("protocol", range(6))
    def test_nothing_runs(self, tmp_path, command, protocol):
        mark = tmp_path / "ran"
        path = tmp_path / "plain.pkl"
        path.write_bytes(pickle.dumps(Bomb(mark), protocol))
        result = command("scan", "--json", path)
        assert result.returncode == 1
        (found,) = json.loads(result.stdout)[0]["globals"]
        assert found["name"] == "open"
        assert found["known"] is False
        assert not mark.exists()

    @BOTH
    def test_nothing_runs_when_it_is_opened(self, tmp_path, weighlock_command, legacy):
        mark = tmp_path / "ran"
        path = write(tmp_path / "m.pt", {"w": torch.ones(2), "x": Bomb(mark)}, legacy=legacy)
        for verb in ("info", "scan"):
            result = weighlock_command(verb, path)
            assert result.returncode == (verb == "scan")
        succeeded(weighlock_command("convert", path, tmp_path / "out.safetensors"))
        assert not mark.exists()

    @BOTH
    def test_nothing_is_imported(self, tmp_path, run_python, legacy):
        (tmp_path / "gone_with_the_training.py").write_text("raise SystemExit('imported')")
        path = foreign_checkpoint(tmp_path / "m.pt", legacy=legacy)
        script = (
            "import sys, weighlock\n"
            "sys.path.insert(0, sys.argv[2])\n"
            "with weighlock.open(sys.argv[1]) as catalog:\n"
            "    catalog.load()\n"
            "from weighlock.formats.scanning import scan_source\n"
            "from weighlock.sources.local import FileSource\n"
            "assert not all(found.known for found in scan_source(FileSource(sys.argv[1])))\n"
            "assert not {'torch', 'gone_with_the_training'} & sys.modules.keys()\n"
        )
        run_python(script, path, tmp_path)

    @pytest.mark.parametrize("protocol", range(6))
    def test_legacy_files_of_every_protocol(self, tmp_path, command, protocol):
        parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, Bomb(tmp_path / "x"), [])
        path = tmp_path / "m.pt"
        path.write_bytes(b"".join(pickle.dumps(part, protocol) for part in parts))
        result = command("scan", path)
        assert result.returncode == 1
        assert "open" in result.stdout

    def test_an_object_without_the_opening_of_its_protocol(self, tmp_path, command):
        path = tmp_path / "m.pt"
        path.write_bytes(legacy_row(b"cos\nsystem\n(S'true'\ntR.", pickle.dumps([], 2)))
        result = command("scan", path)
        assert result.returncode == 1
        assert "os.system" in result.stdout

    def test_an_object_that_breaks_off_after_its_call(self, tmp_path, command):
        path = tmp_path / "m.pt"
        path.write_bytes(legacy_row(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R\xff"))
        result = command("scan", path)
        assert result.returncode == 1  # pickle would have called it before it stumbles

    @pytest.mark.parametrize(
        "raw",
        [
            b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
            b"N0cos\nsystem\n(S'true'\ntR.",
            b"I1\n0cos\nsystem\n(S'true'\ntR.",
            b"K\x010cos\nsystem\n(S'true'\ntR.",
        ],
        ids=["string", "none", "int", "small"],
    )
    def test_pickles_that_begin_with_any_opcode(self, tmp_path, command, raw):
        path = tmp_path / "m.pkl"
        path.write_bytes(raw)
        result = command("scan", path)
        assert result.returncode == 1
        assert "os.system" in result.stdout

    @pytest.mark.parametrize("pickles", range(1, 5))
    def test_a_legacy_file_that_was_cut_off(self, tmp_path, command, pickles):
        parts = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, [1.5, None], ["a"]]
        raw = [pickle.dumps(part, 2) for part in parts]
        path = tmp_path / "m.pt"
        path.write_bytes(b"".join(raw[:pickles]) + raw[pickles][:-1])
        result = command("scan", path)
        assert result.returncode == 1
        assert "1 could not be scanned" in result.stdout

    def test_names_that_were_popped(self, tmp_path, command):
        path = tmp_path / "m.pkl"
        path.write_bytes(b"\x80\x02cos\nsystem\n0N.")
        result = command("scan", path)
        assert result.returncode == 1
        assert "os.system" in result.stdout

    @pytest.mark.parametrize("first", [{}, {"w": torch.ones(3)}], ids=["nothing", "data"])
    def test_the_second_save_of_a_legacy_file(self, tmp_path, command, first):
        file = io.BytesIO()
        torch.save(first, file, _use_new_zipfile_serialization=False)
        torch.save({"x": Bomb(tmp_path / "ran")}, file, _use_new_zipfile_serialization=False)
        path = tmp_path / "m.pt"
        path.write_bytes(file.getvalue())
        assert command("scan", path).returncode == 1

    def test_an_index_stands_for_its_shards(self, tmp_path, command):
        foreign_checkpoint(tmp_path / "m-1.bin")
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": {"w": "m-1.bin", "v": "gone.bin"}}))
        result = command("scan", "--json", index)
        assert result.returncode == 1
        reports = {report["path"]: report for report in json.loads(result.stdout)}
        assert reports.keys() == {str(index), str(tmp_path / "m-1.bin"), str(tmp_path / "gone.bin")}
        assert not all(g["known"] for g in reports[str(tmp_path / "m-1.bin")]["globals"])
        assert reports[str(tmp_path / "gone.bin")]["error"]

    def test_what_lies_behind_urls_is_scanned(self, tmp_path, command):
        foreign_checkpoint(tmp_path / "m-1.bin")
        index = {"weight_map": {"w": "m-1.bin"}}
        files = {"/m-1.bin": (tmp_path / "m-1.bin").read_bytes()}
        files["/m.bin.index.json"] = json.dumps(index).encode()
        with PlainServer(files) as server:
            result = command("scan", "--json", server.url("m.bin.index.json"), server.url("gone"))
        assert result.returncode == 1
        reports = json.loads(result.stdout)
        assert [len(report["globals"]) > 0 for report in reports] == [False, True, False]
        assert "404" in reports[2]["error"]

    @pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")
    def test_metadata_stands_for_the_files_it_names(self, tmp_path, command):
        dcp.save({"w": torch.ones(2), "n": 3}, checkpoint_id=str(tmp_path), no_dist=True)
        said = succeeded(command("scan", tmp_path / ".metadata"))
        assert said == "2 files, 0 foreign names, 0 could not be scanned\n"

    def test_folders_are_walked(self, tmp_path, command):
        inner = tmp_path / "a" / "b"
        inner.mkdir(parents=True)
        write(tmp_path / "good.pt", model())
        foreign_checkpoint(inner / "bad.ckpt")
        (tmp_path / "notes.txt").write_text("not a pickle")
        save_file({"w": torch.ones(1)}, tmp_path / "a" / "m.safetensors")
        result = command("scan", "--json", tmp_path)
        assert result.returncode == 1
        reports = {report["path"]: report for report in json.loads(result.stdout)}
        assert len(reports) == 4
        bad = [
            path
            for path, report in reports.items()
            if not all(found["known"] for found in report["globals"])
        ]
        assert bad == [str(inner / "bad.ckpt")]
        result = command("scan", tmp_path)
        assert result.stdout.endswith("4 files, 1 foreign name, 0 could not be scanned\n")

    def test_several_paths_and_one_that_is_not_there(self, tmp_path, command):
        path = write(tmp_path / "m.pt", model())
        result = command("scan", path, tmp_path / "absent")
        assert result.returncode == 1
        assert "2 files, 0 foreign names, 1 could not be scanned" in result.stdout
        assert "Traceback" not in result.stderr

    def test_a_broken_pickle_is_no_clean_bill(self, tmp_path, command):
        path = tmp_path / "m.pkl"
        path.write_bytes(b"\x80\x04\x95" + struct.pack("<Q", 50) + b"K\x01")
        result = command("scan", path)
        assert result.returncode == 1
        assert "1 could not be scanned" in result.stdout
