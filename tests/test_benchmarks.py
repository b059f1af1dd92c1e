"""What the benchmarks decide by themselves: when a line delivers, when a promise is met."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the package

from benchmarks import quiet, report, runner
from benchmarks.contender import Contender, Workload
from benchmarks.line import Line
from benchmarks.model import QUICK


def test_a_line_delivers_late_and_one_after_another():
    line = Line(rate=1000, delay_s=1.0, room_bytes=10_000)
    assert line.due(5.0, 500) == 6.5
    assert line.due(5.0, 500) == 7.0  # waits for the one before
    assert line.due(9.0, 500) == 10.5  # what was idle is not made up for


def test_a_line_takes_no_more_than_it_has_room_for():
    line = Line(rate=1000, delay_s=0.0, room_bytes=1000)
    assert [line.due(0.0, 600) for _ in range(3)] == [0.6, 1.2, None]
    assert line.due(0.5, 600) == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("wall", "met"), [(10.0, True), (11.0, True), (9.2, True), (11.2, False), (9.0, False)]
)
def test_a_rate_is_kept_within_its_bounds(wall, met):
    work = Workload("w", "Work", (), moved_bytes=500_000_000, rate_bars={"ours": (45.0, 55.0)})
    found = {"ours": [runner.Sample(wall, 0.0, None)]}
    assert [row[2] for row in report.bars_of(work, found)] == [met]
    assert f"| {500 / wall:.1f} |" in report.table(work, found, {})


def test_a_contender_that_is_not_here_is_a_line_with_its_reason(tmp_path):
    contenders = (
        Contender("a module", print, needs=("no_such_module",)),
        Contender("a program", print, programs=("no-such-program",)),
    )
    work = Workload("w", "Work", contenders)
    samples, skipped, failed = runner.run_workload(
        work, QUICK, "", str(tmp_path), repeats=1, check_all=True, say=print
    )
    assert not failed
    text = report.table(work, samples, skipped)
    assert "| a module | not installed: no_such_module |" in text
    assert "| a program | not installed: no-such-program |" in text


def test_a_contender_that_fails_is_told_and_the_others_go_on(tmp_path):
    contenders = (
        Contender("wrong", None, script="raise SystemExit(3)"),
        Contender("right", None, script="pass"),
    )
    work = Workload("w", "Work", contenders)
    samples, skipped, failed = runner.run_workload(
        work, QUICK, "", str(tmp_path), repeats=2, check_all=True, say=print
    )
    assert failed == ["wrong"]
    assert skipped["wrong"].startswith("failed: ")
    assert len(samples["right"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_it_begins_where_nothing_is_installed():
    """`make bench` starts with the system's Python, and makes the environment of the peers."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-S", "-m", "benchmarks", "--help"]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def _stolen(tmp_path, monkeypatch, seconds, *, repeats):
    """What two contenders' samples say of the host, which took time as told; what was said."""
    monkeypatch.setattr(runner, "stolen_s", lambda: next(seconds))
    contenders = (Contender("one", None, script="pass"), Contender("two", None, script="pass"))
    said = []
    samples, _, failed = runner.run_workload(
        Workload("w", "Work", contenders),
        QUICK,
        "",
        str(tmp_path),
        repeats=repeats,
        check_all=True,
        say=said.append,
    )
    assert not failed
    found = {name: [sample.stolen for sample in taken] for name, taken in samples.items()}
    return found, [line for line in said if "again" in line]


def test_who_was_disturbed_by_the_host_does_it_once_more_and_that_counts(tmp_path, monkeypatch):
    seconds = itertools.chain([0.0, 5.0], itertools.repeat(5.0))
    found, said = _stolen(tmp_path, monkeypatch, seconds, repeats=2)
    assert found == {"one": [0.0, 0.0], "two": [0.0, 0.0]}
    (line,) = said
    assert line.endswith(": again: the host took 5.00 s")


def test_where_the_host_always_takes_time_a_few_are_done_again(tmp_path, monkeypatch):
    found, said = _stolen(tmp_path, monkeypatch, itertools.count(0.0, 1.0), repeats=4)
    assert found == {"one": [1.0] * 4, "two": [1.0] * 4}
    assert len(said) == 2


def test_quiet_is_when_a_copy_takes_no_longer_than_it_usually_does(monkeypatch):
    took = iter([*[1.0] * 80, *[2.0] * 4, *[1.2] * 4, 1.5, 1.1, 1.3, 1.4, 3.0])
    monkeypatch.setattr(quiet.Quiet, "_copied_s", lambda _: next(took))
    monkeypatch.setattr(quiet.time, "sleep", lambda _: None)
    quiet.Quiet().wait()
    assert list(took) == [3.0]
