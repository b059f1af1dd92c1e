"""Runs contenders in fresh processes, interleaved, and watches their memory from outside."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass

from benchmarks.contender import Job

__all__ = ["Sample", "run_workload"]


class _Cannot(Exception):
    """A contender says that it cannot run on this machine."""


_FAILURES = OSError, RuntimeError, subprocess.SubprocessError
"""Of a contender that ended in the midst of it; the others go on."""


@dataclass(frozen=True)
class Sample:
    wall: float
    cpu: float
    memory: int | None
    """Anonymous memory added at the peak, in bytes; None where it is not sampled. Of several
    processes that work, that of the one which added most."""
    beside: int | None = None
    """The same of the other side, where there is one."""


def run_workload(workload, model, source, directory, *, repeats, check_all, say, hold=lambda: None):
    """Every contender `repeats` times: name → samples, name → why it did not run, who failed.

    `hold` takes care of free memory, before each starts and again before its clock does.
    """
    skipped = {c.name: f"not installed: {c.missing[0]}" for c in workload.contenders if c.missing}
    runnable = [c for c in workload.contenders if not c.missing]
    samples = {contender.name: [] for contender in runnable}
    failed = []
    kept = os.path.join(directory, "kept")
    os.makedirs(kept)
    order = random.Random(3)
    for repeat in range(repeats):
        # Another order each time: whoever follows a heavy contender must not always be the same.
        for contender in order.sample(runnable, len(runnable)):
            place = os.path.join(directory, "work")
            shutil.rmtree(place, ignore_errors=True)
            os.makedirs(place)
            check = check_all or repeat == 0
            hold()
            try:
                if contender.script:
                    sample = _measure_script(contender, model, source)
                else:
                    job = Job(model, source, place, kept)
                    sample = _measure_work(workload, contender, job, check, hold)
            except (_Cannot, *_FAILURES) as error:
                runnable.remove(contender)
                del samples[contender.name]
                what = "cannot run here" if isinstance(error, _Cannot) else "failed"
                failed += [contender.name] if what == "failed" else []
                skipped[contender.name] = f"{what}: {error}"
                say(f"  {contender.name}: {skipped[contender.name]}")
                continue
            samples[contender.name].append(sample)
            say(f"  {repeat + 1}/{repeats} {contender.name}: {sample.wall:.3f} s")
            shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(kept)
    return samples, skipped, failed


def _measure_work(workload, contender, job, check, hold):
    told = json.dumps({**asdict(job), "check": check})
    arguments = [
        sys.executable,
        *("-m", "benchmarks.child", workload.name, contender.name, told),
    ]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        said = _expect(child, ("ready", "cannot"), contender)
        if said[0] == "cannot":
            raise _Cannot(" ".join(said[1:]))
        others = json.loads(" ".join(said[1:]))
        hold()
        with contextlib.ExitStack() as watching:
            workers, beside = (
                [watching.enter_context(_Watch(pid)) for pid in pids]
                for pids in (others["workers"] or [child.pid], others["pids"])
            )
            child.stdin.write("go\n")
            child.stdin.flush()
            _expect(child, ("worked",), contender)
        child.stdin.write("go\n")
        child.stdin.flush()
        line = child.stdout.readline()
        while line and not line.startswith('{"wall"'):
            line = child.stdout.readline()
        if not line or child.wait() != 0:
            raise RuntimeError(f"{contender.name} failed its check (exit code {child.wait()})")
    found = json.loads(line)
    memory = None if contender.programs else max(each.added for each in workers)
    other = sum(each.added for each in beside) if beside else None
    return Sample(found["wall"], found["cpu"], memory, other)


def _measure_script(contender, model, source):
    """From process start to exit."""
    name = list(model.shapes)[1]
    arguments = [sys.executable, "-c", contender.script, source, name]
    before = os.times()
    start = time.perf_counter()
    subprocess.run(arguments, check=True)
    wall = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user + after.children_system
    return Sample(wall, cpu - before.children_user - before.children_system, None)


def _expect(child, words, contender):
    """The line that begins with one of these words, as words."""
    line = child.stdout.readline()
    while line and line.split(" ")[0].strip() not in words:  # some peers talk on stdout
        line = child.stdout.readline()
    if not line:
        child.kill()
        raise RuntimeError(f"{contender.name} ended before it was {words[0]}")
    return line.split()


def _anonymous(pid):
    """Anonymous memory of a process; 0 when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


class _Watch:
    """Samples the anonymous memory of a process every few milliseconds."""

    def __init__(self, pid):
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._before = self._peak = 0

    @property
    def added(self):
        """Bytes at the peak beyond those at the start."""
        return self._peak - self._before

    def __enter__(self):
        self._before = self._peak = _anonymous(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self._look()

    def _look(self):
        self._peak = max(self._peak, _anonymous(self._pid))

    def _run(self):
        while not self._stop.wait(0.005):
            self._look()
