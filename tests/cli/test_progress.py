"""What the command tells of how far it is, on terminals of every width and where nobody looks."""

import re

import numpy as np
import pytest
from cli_checks import layers, on_a_terminal, save, succeeded

import weighlock

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def pair(tmp_path):
    long = "a-name-that-is-as-long-as-those-of-checkpoints-often-are"
    return [save(tmp_path / f"{long}-{n}.safetensors", layers()) for n in range(2)]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_bar_keeps_to_one_line_and_shows_numbers(pair, columns):
    _, shown = on_a_terminal("diff", *pair, columns=columns)
    bar, _, said = shown.rpartition("\x1b[2K")  # what clears the bar at the end
    lines = [ESCAPE.sub("", line) for line in re.split(r"[\r\n]+", bar)]
    frames = [line for line in lines if line.strip()]
    assert frames
    for frame in frames:
        assert len(frame) <= columns
        assert frame.startswith("comparing ")
        assert "…" in frame
        assert re.search(r"\d+%", frame)
        assert re.search(r"\d+/368 bytes", frame)
        assert ("━" in frame) == (columns >= 100)
    assert bar.count("\x1b[1A") == 1  # it took one line, up to the end
    assert "368 B in" in said


def test_quiet_shows_neither_progress_nor_timing(pair, tmp_path):
    with weighlock.Server() as server, weighlock.open(pair[0]) as catalog:
        share = server.share(catalog)
        inbox = server.inbox(("site",), into=tmp_path / "in")
        words = {
            "diff": pair,
            "verify": ["--data", *pair],
            "convert": [pair[0], tmp_path / "converted"],
            "pull": [share.url, tmp_path / "pulled"],
            "push": [pair[0], inbox.url_for("site")],
            "mean": [*pair, "-o", tmp_path / "mean"],
        }
        for number, (verb, arguments) in enumerate(words.items()):
            option = ("-q", "--quiet")[number % 2]
            said, shown = on_a_terminal(verb, *arguments, option)
            assert shown == "", verb
            assert said, verb


def test_where_nobody_looks_only_long_work_is_told_of(tmp_path, weighlock_command):
    with weighlock.Server() as server:
        share = server.share({"w": np.arange(500_000.0)})
        slowly = weighlock_command("pull", share.url, tmp_path / "a", "--limit-rate", "2MB")
        succeeded(slowly)
        (line,) = slowly.stderr.splitlines()
        assert re.search(r"→ .*/a: 4 MB in \d+\.\d\d s \(.* MB/s\)$", line)
        quickly = weighlock_command("verify", "--data", tmp_path / "a")
    succeeded(quickly)
    assert quickly.stderr == ""
