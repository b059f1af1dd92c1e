"""`weighlock push` and `weighlock serve --inbox`, as real processes."""

import json
import os
import re
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest
from cli_checks import (
    ESCAPES,
    assert_refused,
    assert_wrong_usage,
    at_once,
    layers,
    save,
    shards_with_meta,
    succeeded,
)

import weighlock
from process.counting_proxy import counting_proxy
from process.inbox_peers import inbox_process, temporaries
from waiting import until

ARRAYS = layers() | {"large": np.arange(700_000, dtype=np.float32)}


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model.safetensors", ARRAYS)


@pytest.fixture
def serving(tmp_path):
    """An inbox for two senders in a server of this process."""
    with weighlock.Server() as server:
        yield server.inbox(("site-1", "site-2"), into=tmp_path / "in")


def test_push_says_what_landed(serving, model, weighlock_command, tmp_path):
    result = weighlock_command("push", model, serving.url_for("site-1"))
    assert re.fullmatch(
        r".*model\.safetensors: landed as site-1, 2\.8 MB, of which 2\.8 MB had to be sent\n",
        succeeded(result),
    )
    assert (tmp_path / "in" / "site-1.safetensors").read_bytes() == model.read_bytes()
    again = succeeded(weighlock_command("push", model, serving.url_for("site-1")))
    assert "of which 0 B had to be sent" in again


def test_push_json_and_some_tensors(serving, model, weighlock_command, tmp_path):
    arguments = ("--names", "layers.*", "--json", "--connections", "2", "--limit-rate", "20MB")
    facts = json.loads(
        succeeded(weighlock_command("push", model, serving.url_for("site-1"), *arguments))
    )
    assert facts["sender"] == "site-1"
    assert facts["tensors"] == 6
    assert facts["bytes"] == facts["sent_bytes"]
    with weighlock.open(tmp_path / "in" / "site-1.safetensors") as catalog:
        assert set(catalog) == {name for name in ARRAYS if name.startswith("layers.")}


def test_push_of_a_checkpoint(serving, weighlock_command, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {"w": torch.arange(1000.0), "m": torch.empty(2, device="meta")}
    torch.save(tensors, tmp_path / "x.pt")
    pushed = weighlock_command("push", tmp_path / "x.pt", serving.url_for("site-1"), "--json")
    facts = json.loads(succeeded(pushed))
    assert (facts["tensors"], list(facts["unreadable"]), facts["notes"]) == (1, ["m"], [])
    with weighlock.open(tmp_path / "in" / "site-1.safetensors") as catalog:
        assert catalog["w"].load().tolist() == list(range(1000))


def test_shards_with_a_tensor_that_is_not_read(serving, weighlock_command, tmp_path):
    folder = shards_with_meta(tmp_path / "sharded")
    result = weighlock_command("push", folder, serving.url_for("site-1"))
    assert "landed as site-1" in succeeded(result)
    assert "meta is left out" in result.stderr
    with weighlock.open(tmp_path / "in" / "site-1.safetensors") as catalog:
        assert list(catalog) == ["a"]


def test_push_says_in_one_line_what_is_wrong(serving, model, weighlock_command, tmp_path):
    url = serving.url_for("site-1")
    plain = serving.url
    cases = {
        (tmp_path / "none", url): "cannot be opened",
        (model, plain): "not the ticket of that sender",
        (model, url, "--sender", "site-2"): "is the ticket of 'site-1'",
        (model, plain, "--sender", "a/b"): "cannot be a sender's name",
        (model, plain, "--sender", ESCAPES): "cannot be a sender's name",
        (model, url, "--names", "nothing*"): "no tensor matches 'nothing*'",
        (model, url, "--names", "large", "--names", "typo"): "no tensor matches 'typo'",
        (model, plain[:-32] + "0" * 32): "there is nothing (404)",
        (model, "ftp://x/y"): "ftp",
    }
    for case, result in at_once(lambda case: weighlock_command("push", *case), cases):
        assert_refused(result, cases[case])
        assert plain[-32:] not in result.stderr  # the id is what opens it
    assert os.listdir(tmp_path / "in") == []


def test_wrong_usage(weighlock_command, tmp_path):
    cases = {
        ("push",): "Missing argument",
        ("push", "a"): "Missing argument",
        ("push", "a", "http://x/y", "--limit-rate", "fast"): "limit-rate",
        ("push", "a", "http://x/y", "--connections", "x"): "connections",
        ("serve",): "--inbox",
        ("serve", "--sender", "a", "x"): "--sender and --quota are for an --inbox",
        ("serve", "--quota", "5MB", "x"): "--sender and --quota are for an --inbox",
        ("serve", "--inbox", tmp_path / "in", "--quota", "much"): "quota",
    }
    for case, result in at_once(lambda case: weighlock_command(*case), cases):
        assert_wrong_usage(result, cases[case])


def test_help_tells_what_is_resumed(weighlock_command):
    assert "taken up when it is run again" in succeeded(weighlock_command("push", "--help"))
    assert "--inbox" in succeeded(weighlock_command("serve", "--help"))


def test_serve_inbox_tells_tickets_and_what_lands(model, weighlock_command, tmp_path):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "weighlock", "serve", "--inbox", tmp_path / "in"),
            *("--sender", "a", "--sender", "b", "--port", "0", "--secret", tmp_path / "secret"),
            "--no-page",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines[0] == f"inbox {tmp_path / 'in'} for a\n"
        url = lines[1].strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/i/[0-9a-f]{32}#r=a\.[0-9a-f]{32}", url)
        succeeded(weighlock_command("push", model, url))
        landed = tmp_path / "in" / "a.safetensors"
        assert process.stdout.readline() == f"landed from a: {landed}: 8 tensors, 2.8 MB\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert err.endswith("stopping\n")
        assert "Traceback" not in err
    finally:
        process.kill()
        process.communicate()
    assert stat.S_IMODE(os.stat(tmp_path / "secret").st_mode) == 0o600
    assert os.listdir(tmp_path / "in") == ["a.safetensors"]


def test_serve_tells_a_program_what_landed(weighlock_command, tmp_path):
    one = save(tmp_path / "one.safetensors", {"w": np.zeros(3, np.float32)})
    with inbox_process(tmp_path / "in", tmp_path / "secret", "--no-page") as process:
        url = process.urls[None]
        succeeded(weighlock_command("push", one, url, "--sender", "somebody"))
        facts = json.loads(process.child.stdout.readline())
    (name,) = os.listdir(tmp_path / "in")
    path = str(tmp_path / "in" / name)
    assert facts == {"landed": "somebody", "path": path, "tensors": 1, "bytes": 12}


def test_serve_inbox_refuses_in_one_line(weighlock_command, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cases = {
        ("--inbox", tmp_path / "file"): "cannot be made",
        ("--inbox", tmp_path / "in", "--sender", "a/b"): "cannot be a name",
        ("--inbox", tmp_path / "in", "--host", "0.0.0.0"): "",
    }
    options = ("--port", "0", "--secret", tmp_path / "secret")
    for case, result in at_once(lambda case: weighlock_command("serve", *case, *options), cases):
        assert_refused(result, cases[case])


def test_a_quota_is_told_to_the_sender(model, weighlock_command, tmp_path):
    with inbox_process(tmp_path / "in", tmp_path / "secret", "--quota", "1MB") as process:
        result = weighlock_command("push", model, process.urls[None])
        assert_refused(result, "at most 1,000,000 are allowed")
    assert os.listdir(tmp_path / "in") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_push_that_was_cut_off_is_taken_up_when_it_is_run_again(
    weighlock_command, tmp_path, number
):
    path = save(tmp_path / "big.safetensors", {"x": np.random.default_rng(1).random(4_000_000)})
    size = os.stat(path).st_size
    with inbox_process(tmp_path / "in", tmp_path / "secret") as process:
        with counting_proxy(process.port) as (port, _):
            url = process.urls[None].replace(f":{process.port}/", f":{port}/")
            command = [sys.executable, "-m", "weighlock", "push", str(path), url]
            pushing = subprocess.Popen(
                [*command, "--limit-rate", "20MB"], stderr=subprocess.PIPE, text=True
            )
            until(lambda: _landed_bytes(tmp_path / "in") > 9_000_000)
            pushing.send_signal(number)
            _, err = pushing.communicate(timeout=20)
            assert pushing.returncode != 0
            assert "Traceback" not in err
        again = json.loads(succeeded(weighlock_command("push", path, process.urls[None], "--json")))
        assert 0 < again["sent_bytes"] < size - 8_000_000
    assert temporaries(tmp_path / "in") == []
    (name,) = os.listdir(tmp_path / "in")
    assert (tmp_path / "in" / name).read_bytes() == path.read_bytes()


def _landed_bytes(directory):
    return sum(os.stat(directory / name).st_blocks * 512 for name in os.listdir(directory))
