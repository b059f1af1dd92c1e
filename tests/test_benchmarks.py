"""What the benchmarks decide by themselves: when a line delivers, when a promise is met."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the package

from benchmarks import quiet, report, runner, warm, workloads
from benchmarks.contender import Bar, Contender, Workload
from benchmarks.line import Line
from benchmarks.model import QUICK
from benchmarks.promises import promises_of
from benchmarks.threads import at_once


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
    assert [kept.is_met for kept in promises_of(work, found)] == [met]
    assert f"| {500 / wall:.1f} |" in report.table(work, found, {})


def _measured(**walls):
    return {name: [runner.Sample(wall, wall, None)] for name, wall in walls.items()}


@pytest.mark.parametrize(
    ("ours", "limit", "verdict"),
    [
        (1.0, 0.5, "| 5.00 × | 10.00 × | met |"),
        (2.0, 1.0, "| 2.50 × | 5.00 × | **missed** |"),
        (2.0, 1.9, "| 2.50 × | 2.63 × | **missed**, above the limit |"),
        (1.0, 1.9, "| 5.00 × | 2.63 × | met |"),
    ],
)
def test_a_promise_that_the_limit_misses_too_is_above_it(ours, limit, verdict):
    work = Workload(
        *("w", "Work", ()),
        (Bar("ours", "peer", 4), Bar("ours", "limit", 0.1)),
        limits={"ours": "limit"},
        cpu_bars={"ours": 1.5},
    )
    samples = _measured(ours=ours, limit=limit, peer=5.0)
    lines = report.table(work, samples, {}).splitlines()
    assert f"| ours ≥ 4 × peer {verdict}" in lines
    assert f"| ours ≥ 0.1 × limit | {limit / ours:.2f} × |  | met |" in lines
    cpu = next(line for line in lines if "CPU s |" in line and "≤" in line)
    assert f"| {ours:.2f} s | {limit:.2f} s |" in cpu
    assert cpu.endswith("met |") == (ours <= 1.5)
    assert cpu.endswith("above the limit |") == (ours > 1.5 < limit)


def test_a_promise_whose_limit_did_not_run_is_judged_without():
    work = Workload("w", "Work", (), (Bar("ours", "peer", 4),), limits={"ours": "limit"})
    (kept,) = promises_of(work, _measured(ours=1.0, peer=2.0))
    assert (kept.is_met, kept.limit, kept.is_possible) == (False, "", True)


def test_a_promise_about_who_did_not_run_is_not_judged_and_told():
    work = Workload(
        *("w", "Work", (), (Bar("ours", "peer", 4),)),
        memory_bars={"other": 64},
    )
    samples = _measured(ours=1.0, other=1.0)
    verdicts = [kept.verdict for kept in promises_of(work, samples)]
    assert verdicts == ["not judged", "not judged"]  # nobody looked at the memory of the other
    text = report.document([report.table(work, samples, {})], QUICK)
    assert "Of 2 promises 0 are met in these tables. 2 could not be judged" in text


def test_who_beats_the_limit_is_not_excused_by_it():
    work = Workload("w", "Work", (), (Bar("ours", "peer", 4),), limits={"ours": "limit"})
    (kept,) = promises_of(work, _measured(ours=1.5, limit=1.6, peer=5.0))
    assert kept.verdict == "**missed**"


def test_a_limit_is_taken_at_its_best():
    work = Workload("w", "Work", (), (Bar("ours", "peer", 4),), limits={"ours": "limit"})
    samples = _measured(ours=2.0, peer=5.0)
    samples["limit"] = [runner.Sample(wall, 0.0, None) for wall in (1.0, 1.5, 1.6)]
    (kept,) = promises_of(work, samples)
    assert (kept.limit, kept.verdict) == ("5.00 ×", "**missed**")


def test_a_report_opens_with_every_promise_that_is_missed():
    old = Workload("old", "Kept from before", (), (Bar("ours", "peer", 4),))
    new = Workload("new", "Measured now", (), (Bar("ours", "peer", 4), Bar("ours", "peer", 1)))
    before = report.document([report.table(old, _measured(ours=1.0, peer=2.0), {})], QUICK)
    text = report.document([report.table(new, _measured(ours=1.0, peer=3.0), {})], QUICK, before)
    summary = text[: text.index("\n## ")]
    assert "Of 3 promises 1 are met" in summary
    assert "| Kept from before | ours ≥ 4 × peer | 2.00 × |  | **missed** |" in summary
    assert "| Measured now | ours ≥ 4 × peer | 3.00 × |  | **missed** |" in summary


@pytest.mark.parametrize("workload", workloads.ALL.values(), ids=lambda workload: workload.name)
def test_promises_and_limits_are_about_contenders_that_are_there(workload):
    names = {contender.name for contender in workload.contenders}
    told = {name for bar in workload.bars for name in (bar.ours, bar.peer)}
    told |= {name for bar in workload.extra_bars for name in bar[:2]}
    told |= {*workload.limits, *workload.limits.values()}
    for bars in (workload.memory_bars, workload.cpu_bars, workload.wall_bars):
        told |= set(bars)
    assert told | {*workload.beside_bars, *workload.rate_bars} <= names


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


def _stolen(tmp_path, monkeypatch, seconds, *, repeats, calm):
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
        calm=calm,
    )
    assert not failed
    found = {name: [sample.stolen for sample in taken] for name, taken in samples.items()}
    return found, [line for line in said if "again" in line]


def test_who_was_disturbed_by_the_host_does_it_once_more(tmp_path, monkeypatch):
    seconds = itertools.chain([0.0, 5.0], itertools.repeat(5.0))
    found, said = _stolen(tmp_path, monkeypatch, seconds, repeats=2, calm=runner.Calm())
    assert found == {"one": [0.0, 0.0], "two": [0.0, 0.0]}
    (line,) = said
    assert line.endswith(": again: the host took 5.00 s")


def test_of_two_runs_the_less_disturbed_counts(tmp_path, monkeypatch):
    seconds = itertools.chain([0.0, 5.0, 5.0, 99.0], itertools.repeat(99.0))
    found, said = _stolen(tmp_path, monkeypatch, seconds, repeats=1, calm=runner.Calm())
    assert sorted(found.values()) == [[0.0], [5.0]]
    assert len(said) == 1


def test_where_the_host_always_takes_time_each_is_done_again_once(tmp_path, monkeypatch):
    seconds = itertools.count(0.0, 1.0)
    found, said = _stolen(tmp_path, monkeypatch, seconds, repeats=4, calm=runner.Calm())
    assert found == {"one": [1.0] * 4, "two": [1.0] * 4}
    assert sorted(line.split()[0] for line in said) == ["one:", "two:"]


def test_a_quick_look_does_nothing_again(tmp_path, monkeypatch):
    _, said = _stolen(tmp_path, monkeypatch, itertools.count(0.0, 1.0), repeats=2, calm=None)
    assert not said


@pytest.mark.parametrize(
    ("cpu", "stolen", "is_disturbed"),
    [(1.0, 0.0, False), (1.0, 0.03, False), (1.0, 0.04, True), (0.1, 0.01, False), (4, 0.1, False)],
)
def test_a_few_hundredths_of_the_time_or_one_of_a_second_disturb_nobody(cpu, stolen, is_disturbed):
    assert runner.Sample(1.0, cpu, None, stolen=stolen).is_disturbed == is_disturbed


def test_nothing_is_measured_any_more_when_nobody_holds_memory(tmp_path):
    def ended():
        raise warm.Ended

    work = Workload("w", "Work", (Contender("ours", None, script="pass"),))
    calm = runner.Calm(hold=ended)
    with pytest.raises(warm.Ended):
        runner.run_workload(
            work, QUICK, "", str(tmp_path), repeats=1, check_all=True, say=print, calm=calm
        )
    assert not (tmp_path / "work").exists()


def test_memory_is_held_again_after_a_wait(tmp_path):
    done = []
    work = Workload("w", "Work", (Contender("ours", None, script="pass"),))
    waits = iter([False, True, False])
    calm = runner.Calm(lambda: done.append("hold"), lambda: done.append("wait") or next(waits))
    runner.run_workload(
        work, QUICK, "", str(tmp_path), repeats=2, check_all=True, say=print, calm=calm
    )
    assert done == ["hold", "wait"] * 3


def test_where_it_never_is_quiet_it_begins_all_the_same(tmp_path):
    done = []
    work = Workload("w", "Work", (Contender("ours", None, script="pass"),))
    calm = runner.Calm(lambda: done.append("hold"), lambda: done.append("wait") or True)
    runner.run_workload(
        work, QUICK, "", str(tmp_path), repeats=1, check_all=True, say=print, calm=calm
    )
    assert done == ["hold", "wait", "hold", "wait", "hold"]


def test_who_says_nothing_any_more_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_MOST_S", 0.2)
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with waiting, runner._killed_on_error(waiting):
        assert waiting.wait(60) == -signal.SIGKILL


def test_what_one_thread_raises_is_raised():
    done = []

    def work(given):
        done.append(given)
        if given == 1:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        at_once(work, range(3))
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["whole", "paged"])
def test_free_memory_of_neither_kind_runs_out(kind):
    """Whoever takes one kind leaves as much behind, in whole blocks."""
    held = {"whole": 180, "paged": 180}
    for _ in range(30):
        held[kind] -= 32
        whole = warm._lacking(32, held["whole"], held["paged"])
        held["whole"] += whole
        held["paged"] += 32 - whole
        assert held == {"whole": 180, "paged": 180}


def test_memory_that_always_stays_free_is_not_waited_for():
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) << 10
    assert 0 < warm._reserved() < total


def _quiet(monkeypatch, looks):
    """Somebody who waits, on a machine whose copies take as long as told."""
    took = itertools.chain([1.0] * 20, looks)
    monkeypatch.setattr(quiet.Quiet, "_look", lambda _: next(took))
    clock = itertools.count()
    monkeypatch.setattr(quiet.time, "sleep", lambda _: None)
    monkeypatch.setattr(quiet.time, "monotonic", lambda: next(clock))
    return quiet.Quiet(), took


def test_quiet_is_when_a_copy_takes_no_longer_than_it_usually_does(monkeypatch):
    waiting, left = _quiet(monkeypatch, [2.0, 1.2, 1.1, 1.1, 3.0])
    assert waiting.wait()
    assert not waiting.wait()
    assert list(left) == [3.0]


def test_a_wait_for_quiet_ends_and_does_not_take_noise_for_usual(monkeypatch):
    waiting, _ = _quiet(monkeypatch, itertools.repeat(2.0))
    assert [waiting.wait() for _ in range(10)] == [True] * 10


def test_what_the_host_took_is_read_where_it_is_told(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 0 0 0 0 0 0 0 1 0 0\n")
    assert quiet.stolen_s(str(stat)) == 250 / os.sysconf("SC_CLK_TCK")
    assert quiet.stolen_s(str(tmp_path / "none")) == 0.0


def test_arrays_begin_where_torch_lets_tensors_begin():
    arrays = QUICK.arrays()
    assert {array.ctypes.data % 64 for array in arrays.values()} == {0}
    assert {name: array.shape for name, array in arrays.items()} == QUICK.shapes


def test_a_run_that_is_told_to_end_leaves_nothing(tmp_path):
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks", "--quick", "--directory", str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if line.startswith("  1/1 "):  # the first has been measured, the next is at work
                break
        assert any(tmp_path.iterdir())
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    assert not any(tmp_path.iterdir())
