"""`weighlock scan` of folders: nothing that lies below is passed over in silence."""

import json
import os
import pickle

import pytest


@pytest.fixture
def evil():
    return pickle.dumps(os.system)


def test_folders_behind_links_are_walked_once(weighlock_command, tmp_path, evil):
    there = tmp_path / "there"
    there.mkdir()
    (there / "m.pkl").write_bytes(evil)
    here = tmp_path / "here"
    here.mkdir()
    (here / "link").symlink_to(there)
    (there / "back").symlink_to(here)  # a circle
    result = weighlock_command("scan", here, "--json")
    assert result.returncode == 1
    (report,) = json.loads(result.stdout)
    assert report["path"].endswith("link/m.pkl")
    assert [found["name"] for found in report["globals"]] == ["system"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may list everything")
def test_a_folder_that_cannot_be_listed_is_told_of(weighlock_command, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    result = weighlock_command("scan", tmp_path)
    assert result.returncode == 1
    assert "cannot be listed: Permission denied" in result.stdout
    assert "1 could not be scanned" in result.stdout
