"""What the tests of the command have in common."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import weighlock

COMMAND = [sys.executable, "-m", "weighlock"]

ESCAPES = "\x1b[31mred\x1b[0m\nnext\r\x07\x7f\x9b2J"
"""A name that would paint, move and clear a terminal."""


def succeeded(result):
    """The output, after making sure that the command found nothing wrong."""
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert_harmless(result)
    return result.stdout


def assert_refused(result, *says):
    """Exit code 1 and exactly one line on stderr, which says these things."""
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("weighlock: ")
    assert result.stderr.endswith("\n")
    for text in says:
        assert text in lines[0]
    assert_harmless(result)


def assert_wrong_usage(result, *says):
    """Exit code 2, with a hint on stderr and nothing on stdout."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr
    for text in says:
        assert text in result.stderr


def assert_harmless(result):
    """Nothing was printed that a terminal would obey."""
    for text in (result.stdout, result.stderr):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]", text), repr(text)


def save(path, arrays, **options):
    weighlock.save(path, arrays, durable=False, **options)
    return path


def shards_with_meta(folder):
    """A sharded checkpoint of a tensor and of one without data, which only its shard tells."""
    torch = pytest.importorskip("torch")
    folder.mkdir()
    torch.save({"a": torch.ones(2), "meta": torch.ones(3, device="meta")}, folder / "m-1.bin")
    index = {"weight_map": {"a": "m-1.bin", "meta": "m-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def layers(count=3):
    """Arrays named and shaped like those of a small model."""
    arrays = {"embed.weight": np.zeros((8, 4), np.float32)}
    for n in range(count):
        arrays[f"layers.{n}.attn.weight"] = np.full((4, 4), n, np.float32)
        arrays[f"layers.{n}.norm.bias"] = np.full(4, n, np.float32)
    return arrays


def at_once(run, cases):
    """Run many commands, two at a time; pairs of case and result."""
    cases = list(cases)
    with ThreadPoolExecutor(2) as pool:
        return list(zip(cases, pool.map(run, cases), strict=True))


def on_a_terminal(*arguments, columns=100):
    """Run with a terminal for stderr, where progress bars are shown; returns what it got."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    said = process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=60) == 0, shown
    return said, shown.decode()
