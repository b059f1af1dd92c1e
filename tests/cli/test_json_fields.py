"""What `--json` prints has the fields that the tour lists, and no others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_checks import layers, save, succeeded

import weighlock
from process.inbox_peers import inbox_process

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"


def listed():
    """The fields of each verb: a list for each part of its cell, without options."""
    section = TOUR.read_text().partition("## The command: facts as JSON")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    return {verb: [re.findall(r"`(\w+)`", part) for part in cell.split(";")] for verb, cell in rows}


FIELDS = listed()


@pytest.fixture
def models(tmp_path):
    changed = {**layers(), "embed.weight": np.ones((8, 4), np.float32)}
    return [save(tmp_path / "a", layers()), save(tmp_path / "b", changed)]


@pytest.fixture
def facts(weighlock_command):
    def ask(*words):
        return json.loads(succeeded(weighlock_command(*words, "--json")))

    return ask


def test_verbs_that_look(models, facts, weighlock_command, tmp_path):
    plain, more, several = FIELDS["ls"]
    assert list(facts("ls", models[0])[0]) == plain
    assert [*plain, more[0]] == list(facts("ls", "--fold", models[0])[0])
    assert list(facts("ls", *models)[0]) == several
    assert [list(facts("info", models[0]))] == FIELDS["info"]
    whole, data, broken = FIELDS["verify"]
    assert list(facts("verify", models[0])) == whole
    assert list(facts("verify", "--data", models[0])) == whole + data
    result = weighlock_command("verify", tmp_path / "none", "--json")
    assert list(json.loads(result.stdout)) == broken
    found = facts("diff", *models)
    assert [list(found), list(found["changes"][0])] == FIELDS["diff"]


def test_groups_in_a_list(facts, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"meta": torch.ones(3, device="meta")}, tmp_path / "meta.pt")
    plain, (_, *of_groups), _ = FIELDS["ls"]
    assert list(facts("ls", tmp_path / "meta.pt")[0]) == plain + of_groups


def test_scan(weighlock_command, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    (found,) = json.loads(weighlock_command("scan", tmp_path / "a.pt", "--json").stdout)
    assert [list(found), list(found["globals"][0])] == FIELDS["scan"]


def test_verbs_that_write(models, facts, tmp_path):
    assert [list(facts("convert", models[0], tmp_path / "converted"))] == FIELDS["convert"]
    assert [list(facts("mean", *models, "-o", tmp_path / "mean"))] == FIELDS["mean"]
    (tmp_path / "root").mkdir()
    with weighlock.Spool(tmp_path / "root"):
        found = facts("sweep", tmp_path / "root")
    assert [list(found), list(found["kept"][0])] == FIELDS["sweep"]


def test_verbs_that_move(models, facts, tmp_path):
    options = tmp_path / "in", tmp_path / "secret", models[0]
    with inbox_process(*options) as process, weighlock.Server() as server:
        with weighlock.open(models[0]) as catalog:
            share = server.share(catalog)
            assert [list(facts("pull", share.url, tmp_path / "pulled"))] == FIELDS["pull"]
        assert [list(facts("push", models[0], process.urls[None]))] == FIELDS["push"]
        landed = json.loads(process.child.stdout.readline())
    started, later = FIELDS["serve"]
    assert list(landed) == later
    assert started == ["shares", "inbox", "page"]


def test_every_verb_with_json_is_listed(weighlock_command):
    verbs = re.findall(r"^  (\w+)  ", succeeded(weighlock_command("--help")), re.MULTILINE)
    assert set(verbs) - {"demo"} == set(FIELDS)


def test_shells_complete_what_is_typed(tmp_path):
    script = os.path.join(os.path.dirname(sys.executable), "weighlock")
    if not os.path.exists(script):
        pytest.skip("the package is not installed as a script")

    def completed(*words):
        told = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        env = {**os.environ, **told, "_WEIGHLOCK_COMPLETE": "bash_complete"}
        return subprocess.run([script], env=env, capture_output=True, text=True).stdout.split()

    assert completed("weighlock", "conv") == ["plain,convert"]
    assert completed("weighlock", "convert", "--max") == ["plain,--max-shard-size"]
    for verb in ("ls", "info", "verify", "convert"):
        assert completed("weighlock", verb, "mod") == ["file,mod"]
