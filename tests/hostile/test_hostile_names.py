"""B5: names are labels. Whatever they look like they stay names: never a path, never an escape."""

import json
import os
import re
import unicodedata

import numpy as np
import pytest

import weighlock
from conftest import needs_strace
from hostile.make import entry, file_bytes
from hostile.watching import watched
from weighlock.errors import LayoutError

NAMES = [
    "../../etc/x",
    "/etc/passwd",
    "..",
    ".",
    "~",
    "-rf",
    "--help",
    "con\\aux",
    "C:\\x",
    "a/b/../c",
    "new\nline",
    "carriage\rreturn",
    "tab\ttab",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x9b31mC1",
    "\x7fdelete",
    "bell\x07",
    "\u202eright to left",
    "\u2066isolate\u2069",
    "zero\u200bwidth",
    "\ufeffmark",
    "line\u2028separator",
    "\ue000private",
    "\U000e0041tag",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "名前",
    "😀",
    "__metadata",
    "$(reboot)",
    "`reboot`",
    "'; DROP TABLE t; --",
    "%s%n",
    "{0.__class__}",
    "*",
    "[a-z]",
    " ",
    "\"quoted'\\",
]


@pytest.fixture(scope="module")
def content():
    """A valid file with every one of the names."""
    header = {"__metadata__": {"\x1b[31mkey": "\x1b[31mvalue\nsecond line"}}
    for number, name in enumerate(NAMES):
        header[name] = entry("U8", (1,), (number, number + 1))
    return file_bytes(header, bytes(range(len(NAMES))))


@pytest.fixture
def model(tmp_path, content):
    home = tmp_path / "model"
    home.mkdir()
    (home / "model.safetensors").write_bytes(content)
    return home / "model.safetensors"


def files_below(directory):
    return sorted(
        os.path.relpath(os.path.join(place, name), directory)
        for place, directories, names in os.walk(directory)
        for name in (*directories, *names)
    )


def is_safe(output):
    """Whether nothing in it can steer a terminal."""
    return all(char.isprintable() or char == "\n" for char in output)


def test_names_are_kept_as_they_are(model):
    weighlock.open(model).close()
    with watched(model) as seen, weighlock.open(model) as catalog:
        assert list(catalog) == NAMES
        assert [ref.load().tolist() for ref in catalog.values()] == [[n] for n in range(len(NAMES))]
    assert seen == []


def test_names_survive_a_copy_and_become_no_path(model, tmp_path):
    with weighlock.open(model) as catalog:
        weighlock.save(tmp_path / "copy.safetensors", catalog, durable=False)
        weighlock.save(tmp_path / "shards", catalog, durable=False, max_shard_bytes=7)
    with weighlock.open(tmp_path / "copy.safetensors") as copy:
        assert list(copy) == NAMES
        assert dict(copy.metadata) == {"\x1b[31mkey": "\x1b[31mvalue\nsecond line"}
    with weighlock.open(tmp_path / "shards") as shards:
        assert {name: ref.load().tolist() for name, ref in shards.items()} == {
            name: [number] for number, name in enumerate(NAMES)
        }
    assert all(
        re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json", name)
        for name in os.listdir(tmp_path / "shards")
    )
    assert sorted(os.listdir(tmp_path)) == ["copy.safetensors", "model", "shards"]


@pytest.mark.parametrize("name", ["", "a\0b", "__metadata__", "\ud800"])
def test_names_no_file_can_carry_are_not_written(tmp_path, name):
    with pytest.raises(LayoutError, match=re.escape(repr(name))):
        weighlock.save(tmp_path / "x.safetensors", {name: np.zeros(1)}, durable=False)
    assert os.listdir(tmp_path) == []


VERBS = [
    ("ls",),
    ("ls", "--json"),
    ("ls", "--fold"),
    ("ls", "--fold", "--json"),
    ("info",),
    ("info", "--json"),
    ("verify",),
    ("verify", "--data"),
    ("verify", "--data", "--json"),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_command_escapes_what_it_shows(model, weighlock_command, verb):
    result = weighlock_command(verb[0], model, *verb[1:])
    assert result.returncode == 0, result.stderr
    assert is_safe(result.stdout)
    assert is_safe(result.stderr)


def test_list_has_one_line_for_each_name(model, weighlock_command):
    lines = weighlock_command("ls", model).stdout.splitlines()
    assert len(lines) == len(NAMES) + 1
    assert any(line.startswith(r"\x1b[31mred\x1b[0m ") for line in lines)
    assert any(line.startswith(r"new\nline ") for line in lines)


def test_json_says_the_names_exactly(model, weighlock_command):
    listed = json.loads(weighlock_command("ls", model, "--json").stdout)
    assert [fact["name"] for fact in listed] == NAMES
    facts = json.loads(weighlock_command("info", model, "--json").stdout)
    assert facts["metadata"] == {"\x1b[31mkey": "\x1b[31mvalue\nsecond line"}


def test_convert_writes_its_target_and_nothing_else(model, tmp_path, weighlock_command):
    before = files_below(tmp_path)
    result = weighlock_command("convert", model, "out.safetensors", cwd=model.parent)
    assert result.returncode == 0, result.stderr
    assert is_safe(result.stdout + result.stderr)
    assert files_below(tmp_path) == sorted([*before, "model/out.safetensors"])
    with weighlock.open(model.parent / "out.safetensors") as catalog:
        assert list(catalog) == NAMES


def test_convert_into_shards_writes_its_directory_and_nothing_else(
    model, tmp_path, weighlock_command
):
    before = files_below(tmp_path)
    arguments = ("convert", model, "out", "--max-shard-size", "10")
    result = weighlock_command(*arguments, cwd=model.parent)
    assert result.returncode == 0, result.stderr
    new = [name for name in files_below(tmp_path) if name not in before]
    assert all(re.fullmatch(r"model/out(/model[-.a-z0-9]+)?", name) for name in new)


def test_diff_escapes_what_it_shows(model, tmp_path, weighlock_command):
    other = tmp_path / "other.safetensors"
    other.write_bytes(file_bytes({"\x1b[2J": entry("U8", (1,), (0, 1))}, b"\1"))
    for more in ((), ("--json",)):
        result = weighlock_command("diff", model, other, *more)
        assert result.returncode == 0, result.stderr
        assert is_safe(result.stdout + result.stderr)


BROKEN = [
    {"\x1b[2Jx\n": entry("F32", (3,), (0, 4))},
    {"\x1b[2Jx\n": entry("\x1b[31m")},
    {"\x1b[2Jx\n": {}},
    {"\x1b[2Jx\n": entry("F32", ("\x1b[31m",))},
    {"__metadata__": {"\x1b[31m": 1}},
]


@pytest.mark.parametrize(
    ("header", "verb"),
    list(zip(BROKEN, ["ls", "info", "verify", "ls", "info"], strict=True)),
    ids=range(len(BROKEN)),
)
def test_error_of_the_command_is_one_safe_line(tmp_path, weighlock_command, header, verb):
    path = tmp_path / "new\nline \x1b[31m.safetensors"
    path.write_bytes(file_bytes(header, bytes(4)))
    result = weighlock_command(verb, path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("weighlock: ")
    assert result.stderr.count("\n") == 1
    assert is_safe(result.stderr)


def test_metadata_no_text_can_carry_is_an_error_and_no_crash(tmp_path, weighlock_command):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"__metadata__": {"a": "\ud800"}}))
    for verb in (("info",), ("info", "--json"), ("convert", "-f")):
        target = (tmp_path / "out.safetensors",) if verb[0] == "convert" else ()
        result = weighlock_command(verb[0], path, *target, *verb[1:])
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert result.stderr.count("\n") == 1


CHANGES = re.compile(
    r"\b(?:mkdir|mkdirat|mknod|mknodat|rename|renameat2?|link|linkat|symlink|symlinkat|unlink"
    r"|unlinkat|rmdir|truncate|chmod|fchmodat|chown|utimensat)\("
    r"|\bopen(?:at2?)?\(.*(?:O_CREAT|O_WRONLY|O_RDWR|O_TMPFILE)"
)


@needs_strace
@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("verify", "--data"),
        ("convert", "out"),
        ("convert", "out", "--max-shard-size", "9"),
    ],
    ids=" ".join,
)
def test_command_touches_no_path_that_a_name_spells(model, run_traced, arguments):
    """Every call that changes the file system stays in the directory of the model."""
    trace = run_traced(arguments[0], model.name, *arguments[1:], cwd=model.parent)
    home = str(model.parent)
    assert "etc/x" not in trace
    assert "reboot" not in trace
    changes = [line for line in trace.splitlines() if CHANGES.search(line)]
    assert bool(changes) == (arguments[0] == "convert")
    for line in changes:
        for path in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
            outside = path.startswith("/") and not path.startswith((home, "/dev/", "/proc/self/"))
            assert not outside, line
            assert ".." not in path, line


@pytest.fixture
def run_traced(tmp_path):
    """Runs the command under strace; returns the calls it made on files."""
    import subprocess
    import sys

    def run(*arguments, cwd):
        log = tmp_path / "trace"
        command = ["strace", "-f", "-qq", "-s", "4096", "-e", "trace=%file", "-o", log]
        result = subprocess.run(
            [*command, sys.executable, "-m", "weighlock", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return log.read_text()

    return run
