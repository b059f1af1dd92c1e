"""The README and the pages of docs/ run: Python blocks as programs, console blocks as commands.

In expected output `…` stands for anything within a line.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_a_page_shows_is_what_happens(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page_name(page)}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 2
        if block[1] == "python":
            code = compile("\n" * (line - 1) + block[2], str(page), "exec")
            exec(code, namespace)
        else:
            run_console(block[2], f"{page_name(page)}:{line}")


def run_console(block, where):
    for session in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = session.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "weighlock", where
        result = subprocess.run(
            [sys.executable, "-m", "weighlock", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, f"{where}: {result.stderr}"
        pattern = ".*".join(map(re.escape, expected.split("…")))
        assert re.fullmatch(pattern, result.stdout), f"{where}: {command}\n{result.stdout}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_promise_says_which_tests_show_it():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    promised, shown = text.split("## Where it is shown")
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", shown, re.MULTILINE))
    assert set(re.findall(r"^- (I\d+) ", promised, re.MULTILINE)) == {
        r for r in rows if r[0] == "I"
    }
    files = re.findall(r"`([^`]+\.py)`", shown)
    assert files
    for name in files:
        assert (ROOT / "tests" / name).exists(), name
