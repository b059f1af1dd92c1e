"""Every verb on tar checkpoints, TorchScript, composed tensors and nested checkpoints."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from cli_checks import succeeded
from safetensors import safe_open
from test_checkpoint_commands import command  # noqa: F401 (a fixture)

import weighlock
from interop.tar_checkpoints import old_saved

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
WEIGHT = torch.arange(12.0).reshape(3, 4)


def tar(path):
    path.write_bytes(old_saved({"w": WEIGHT, "t": WEIGHT.t()}))
    return {"w": WEIGHT, "t": WEIGHT.t()}


def script(path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    torch.jit.save(torch.jit.script(model), path)
    return model.state_dict()


def composed(path):
    sparse = WEIGHT.to_sparse_csr()
    small = torch.quantize_per_tensor(WEIGHT, 0.5, 2, torch.qint8)
    torch.save({"s": sparse, "q": small}, path)
    parts = {"s.crow_indices": sparse.crow_indices(), "s.col_indices": sparse.col_indices()}
    parts |= {"s.values": sparse.values(), "q.int_repr": small.int_repr()}
    scale, zero = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2)
    return parts | {"q.scale": scale, "q.zero_point": zero}


def nested(path):
    file = path.with_suffix(".inner")
    torch.save({"w": WEIGHT}, file)
    torch.save({"inner": file.read_bytes(), "v": WEIGHT + 1}, path)
    return {"v": WEIGHT + 1, "inner.w": WEIGHT}


@pytest.fixture(params=[tar, script, composed, nested], ids=lambda make: make.__name__)
def made(request, tmp_path):
    """A file, and the tensors that are in it."""
    path = tmp_path / "model.pt"
    return path, request.param(path)


def test_every_verb(made, command, tmp_path):  # noqa: F811
    path, expected = made
    facts = json.loads(succeeded(command("ls", "--json", path)))
    listed = {f["name"]: f["shape"] for f in facts if "kind" not in f}
    assert listed == {name: list(tensor.shape) for name, tensor in expected.items()}
    assert f"{len(expected)} tensors" in succeeded(command("ls", path))
    info = json.loads(succeeded(command("info", "--json", path)))
    assert info["tensors"] == len(expected)
    succeeded(command("info", path))
    assert "valid" in succeeded(command("verify", "--data", path))
    target = tmp_path / "out.safetensors"
    succeeded(command("convert", path, target))
    with safe_open(target, "pt") as written:
        assert set(written.keys()) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(written.get_tensor(name), tensor)
    assert "0 differ" in succeeded(command("diff", path, target))
    scanned = json.loads(command("scan", "--json", path).stdout)
    assert scanned[0]["error"] is None
    assert scanned[0]["globals"]
    foreign = {g["module"] for g in scanned[0]["globals"] if not g["known"]}
    assert all(module.startswith("__torch__") for module in foreign)


def test_a_share_of_it_is_pulled_as_safetensors(made, tmp_path):
    path, expected = made
    with weighlock.Server() as server, weighlock.open(path) as catalog:
        weighlock.fetch(server.share(catalog).url, into=tmp_path / "got.safetensors")
    with safe_open(tmp_path / "got.safetensors", "pt") as got:
        for name, tensor in expected.items():
            assert torch.equal(got.get_tensor(name), tensor)


def test_the_command_serves_it(tmp_path):
    expected = tar(tmp_path / "model.pt")
    process = subprocess.Popen(
        [*(sys.executable, "-m", "weighlock", "serve", "--port", "0", "--json"),
         *("--secret", tmp_path / "secret", tmp_path / "model.pt")],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        (share,) = json.loads(process.stdout.readline())["shares"]
        with weighlock.fetch(share["url"]) as got:
            assert got["t"].load().tolist() == expected["t"].tolist()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_groups_and_tensors_without_data_are_shown(command, tmp_path):  # noqa: F811
    path = tmp_path / "m.pt"
    state = {"s": WEIGHT.to_sparse(), "m": torch.empty(2, 5, device="meta"), "w": WEIGHT}
    torch.save(state, path)
    said = succeeded(command("ls", path))
    assert "s: sparse_coo F32 [3, 4], in s.indices, s.values" in said
    assert "m: meta F32 [2, 5], no data" in said
    facts = {f["name"]: f for f in json.loads(succeeded(command("ls", "--json", path)))}
    assert facts["m"]["shape"] == [2, 5]
    assert facts["m"]["parts"] == {}
    assert facts["s"]["kind"] == "sparse_coo"
    some = succeeded(command("ls", path, "w"))
    assert "sparse" not in some
    assert "meta" not in some
    assert "sparse_coo" in succeeded(command("info", path))
    result = command("convert", path, tmp_path / "out.safetensors")
    assert result.returncode == 1
    assert "no data" in result.stderr
    options = ("--skip-unsupported", path, tmp_path / "out.safetensors")
    assert "left out: m" in succeeded(command("convert", *options))
    with safe_open(tmp_path / "out.safetensors", "pt") as written:
        assert set(written.keys()) == {"s.indices", "s.values", "w"}


def test_code_is_told_for_torchscript(command, tmp_path):  # noqa: F811
    script(tmp_path / "m.pt")
    assert "code" in command("ls", tmp_path / "m.pt").stderr


def test_shards_with_a_tensor_of_several_parts_are_valid(command, tmp_path):  # noqa: F811
    torch.save({"s": WEIGHT.to_sparse(), "w": WEIGHT}, tmp_path / "a.bin")
    index = {"metadata": {}, "weight_map": {"s": "a.bin", "w": "a.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "valid" in succeeded(command("verify", "--data", tmp_path))
    assert "1 tensor," in succeeded(command("ls", tmp_path))
