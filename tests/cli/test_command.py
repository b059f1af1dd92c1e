"""The command as a whole: help, exit codes, errors, pipes, terminals."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from cli_checks import (
    COMMAND,
    assert_refused,
    assert_wrong_usage,
    at_once,
    layers,
    on_a_terminal,
    save,
    succeeded,
)

import weighlock
from weighlock.disk.owner import Owner, temporary_name

VERBS = [
    *("ls", "info", "convert", "verify", "diff", "scan"),
    *("serve", "pull", "push", "sweep", "demo"),
]


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "a.safetensors", layers())


def test_help_names_every_verb(weighlock_command):
    for option in ("--help", "-h"):
        text = succeeded(weighlock_command(option))
        assert text.startswith("Usage:")
        for verb in VERBS:
            assert f"\n  {verb}" in text


def test_every_verb_has_a_help_text(weighlock_command):
    for verb, result in at_once(lambda verb: weighlock_command(verb, "--help"), VERBS):
        text = succeeded(result)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        assert lines[0].startswith("Usage:")
        assert f" {verb} " in lines[0]
        assert len(lines[1]) > 20
        for line in lines:
            if line.startswith("--"):
                assert len(line.split()) > 1, f"{verb}: {line} is not explained"
        assert ("--json" in text) == (verb != "demo")


def test_version(weighlock_command):
    assert weighlock.__version__ in succeeded(weighlock_command("--version"))


def test_the_installed_script_is_the_same_command(path):
    script = os.path.join(os.path.dirname(sys.executable), "weighlock")
    if not os.path.exists(script):
        pytest.skip("the package is not installed as a script")
    result = subprocess.run([script, "ls", path], capture_output=True, text=True, timeout=60)
    assert succeeded(result).endswith("7 tensors, 92 elements, 368 B\n")


def test_wrong_usage_exits_with_2(weighlock_command):
    wrong = [
        "nonsense",
        "ls",
        "ls --nonsense a",
        "convert a",
        "diff a",
        "diff a b c",
        "info",
        "verify",
        "--nonsense",
    ]
    for _, result in at_once(lambda words: weighlock_command(*words.split()), wrong):
        assert_wrong_usage(result)


def test_no_verb_shows_help(weighlock_command):
    result = weighlock_command()
    assert result.returncode in (0, 2)
    assert "Usage:" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_is_one_line_on_stderr(weighlock_command, tmp_path):
    wrong = [
        ["ls", "missing"],
        ["ls", "missing", "--json"],
        ["info", "missing"],
        ["verify", "missing"],
        ["verify", "--data", "missing"],
        ["diff", "missing", "other"],
        ["convert", "missing", "out"],
        ["ls", ""],
        ["ls", "."],
    ]
    for _, result in at_once(lambda words: weighlock_command(*words, cwd=tmp_path), wrong):
        assert_refused(result)
    assert list(tmp_path.iterdir()) == []


def closed_early(*arguments):
    """Run with a reader that goes away before anything is written."""
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    return result


def test_a_reader_that_goes_away_is_no_reason_to_complain(path):
    cases = [["ls"], ["ls", "--json"], ["info"], ["verify"], ["ls", "--help"], ["--help"]]
    for _, result in at_once(lambda words: closed_early(*words, path), cases):
        assert result.stderr == ""
        assert result.returncode == 128 + signal.SIGPIPE  # as of any command, not a reported error


def test_head_takes_what_it_wants(tmp_path):
    many = save(tmp_path / "many", {f"tensor.{n}": np.zeros(1, np.uint8) for n in range(5000)})
    command = " ".join([*COMMAND, "ls", str(many)])
    result = subprocess.run(
        f"{command} | head -n 2", shell=True, capture_output=True, text=True, timeout=60
    )
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == ""


def test_a_closed_standard_output(path):
    def run(words):
        command = " ".join([*COMMAND, *words, str(path), ">&-"])
        return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)

    for _, result in at_once(run, [["ls"], ["ls", "--json"], ["info"], ["verify"]]):
        assert "Traceback" not in result.stderr
        assert len(result.stderr.splitlines()) <= 1


def test_a_full_disk_behind_standard_output(path):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "ls", path], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == 1
    assert result.stderr == (
        "weighlock: cannot write to standard output: No space left on device\n"
    )


def test_sweep_says_once_what_is_wrong(path, weighlock_command):
    nowhere = path.parent / "nowhere"
    result = weighlock_command("sweep", nowhere)
    assert_refused(result, f"{nowhere}: cannot be swept: No such file or directory")
    assert result.stderr.count(str(nowhere)) == 1
    assert_refused(weighlock_command("sweep", path), f"{path}: cannot be swept: Not a directory")


def test_sweep_says_that_it_passes_over_unfinished_files(path, weighlock_command):
    gone = Owner(os.getpid(), "1", Owner.current().boot)
    (path.parent / temporary_name("a", gone)).write_bytes(bytes(10))
    result = weighlock_command("sweep", path.parent)
    assert result.stderr == "note: 1 unfinished file (.part-): --parts looks at them too\n"
    assert "1 removed" in weighlock_command("sweep", "--parts", path.parent).stdout


def test_a_directory_to_write_to_must_be_there(path, weighlock_command):
    missing = f"{path.parent}/missing/"
    says = f"{missing}: there is no such directory; make it first"
    for words in (["convert", path, missing], ["mean", path, "-o", missing]):
        assert_refused(weighlock_command(*words), says)


def test_safetensors_under_another_name_are_noted(path, weighlock_command):
    target = path.with_name("out.pt")
    note = f"note: {target} is a safetensors file, though its name ends with .pt\n"
    for words in (["convert", path, target], ["mean", path, "-o", target, "--force"]):
        result = weighlock_command(*words, "--no-sync")
        succeeded(result)
        assert result.stderr == note
    result = weighlock_command("convert", path, path.with_name("plain.safetensors"))
    assert result.stderr == ""


def test_a_terminal_sees_progress_and_standard_output_does_not(path, tmp_path):
    target = tmp_path / "[red]out.safetensors"
    said, shown = on_a_terminal("convert", path, target, "--no-sync")
    assert said == f"{target}: 7 tensors, 368 B\n"
    assert "[red]out.safetensors" in shown
    assert "368 B in" in shown
    assert "Traceback" not in shown
    said, shown = on_a_terminal("verify", "--data", target)
    assert said.count("\n") == 1
    assert "Traceback" not in shown


@pytest.mark.slow
def test_the_demo_runs_federated_rounds_and_cleans_up(weighlock_command, tmp_path):
    result = weighlock_command(
        "demo", "--size", "20MB", "--sites", 2, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    said = succeeded(result)
    assert said.count("site-1, site-2 landed") == 2
    assert said.count("as near as bf16 can be") == 2
    rows = [line.split() for line in said.splitlines() if line.strip().startswith("site-")]
    assert [row[:2] for row in rows] == [
        [f"site-{site}", str(number)] for number in (1, 2) for site in (1, 2)
    ]
    first, second = float(rows[0][2]), float(rows[2][2])  # MB pulled
    assert second < first / 3  # most layers are frozen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
@pytest.mark.parametrize("ended", ["by Ctrl-C", "by a site's death"])
def test_a_demo_that_is_ended_says_one_line_at_most_and_cleans_up(ended, tmp_path):
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--size", "20MB"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with demo:
        assert any("bytes each" in line for line in demo.stdout), demo.stderr.read()
        with open(f"/proc/{demo.pid}/task/{demo.pid}/children") as children:
            sites = [int(pid) for pid in children.read().split()]
        assert len(sites) == 3
        if ended == "by Ctrl-C":
            os.killpg(demo.pid, signal.SIGINT)
        else:
            os.kill(sites[1], signal.SIGKILL)
        said = demo.communicate(timeout=60)[1]
    if ended == "by Ctrl-C":
        assert (demo.returncode, said.strip()) == (130, "")
    else:
        assert (demo.returncode, said) == (1, "weighlock: site-2 ended with code -9\n")
    assert not [pid for pid in sites if os.path.exists(f"/proc/{pid}")]
    assert list(tmp_path.iterdir()) == []


def test_the_demo_leaves_its_files_where_it_is_told(weighlock_command, tmp_path):
    kept = tmp_path / "kept"
    small = ("demo", "--size", "8MB", "--sites", 1, "--rounds", 1, "--keep", kept)
    succeeded(weighlock_command(*small))
    assert sorted(entry.name for entry in kept.iterdir()) == [
        "inbox-1",
        "model-0.safetensors",
        "model-1.safetensors",
        "site-1",
    ]
    succeeded(weighlock_command("verify", "--data", "--finite", kept / "model-1.safetensors"))
    assert_refused(weighlock_command(*small), "kept: exists; --keep makes a new directory")
    assert weighlock_command("demo", "--sites", 0).returncode == 2
