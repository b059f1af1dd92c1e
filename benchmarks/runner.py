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
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.contender import Job
from benchmarks.quiet import stolen_s

__all__ = ["Calm", "Sample", "run_workload"]

_MOST_STOLEN, _LEAST_STOLEN_S = 0.03, 0.02
"""Of the time that processors worked or wanted to, what the host may have given to others; it is
counted in hundredths of a second, of which one alone says little."""


class _Cannot(Exception):
    """A contender says that it cannot run on this machine."""


_ROUNDS = 2
"""Waits for quiet before one run; where neighbours are always at work, it begins all the same."""

_MOST_S = 900.0
"""Who has said nothing for so long never will: a peer that hangs must not keep the others."""

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
    stolen: float = 0.0
    """Seconds the host gave to others meanwhile, of all processors together."""

    @property
    def lost(self):
        """The part of the time its processors wanted to work that the host gave to others."""
        return self.stolen / (self.cpu + self.stolen) if self.stolen else 0.0

    @property
    def is_disturbed(self):
        return self.lost > _MOST_STOLEN and self.stolen > _LEAST_STOLEN_S


@dataclass(frozen=True)
class Calm:
    """What is done so that all find the machine alike."""

    hold: Callable[[], None] = lambda: None
    """Takes care of free memory, before the clock starts."""
    wait: Callable[[], bool] = lambda: False
    """Returns when nobody else is at work, before the clock starts: whether that took a while."""


def run_workload(workload, model, source, directory, *, repeats, check_all, say, calm=None):
    """Every contender `repeats` times: name → samples, name → why it did not run, who failed.

    With `calm`, a contender that was disturbed by the host does its work once more, and what was
    disturbed less counts, however long it took. Each may do so once: where nobody is ever left
    alone, all would take twice as long.
    """
    skipped = {c.name: f"not installed: {c.missing[0]}" for c in workload.contenders if c.missing}
    runnable = [c for c in workload.contenders if not c.missing]
    samples = {contender.name: [] for contender in runnable}
    failed, may_again = [], {c.name for c in runnable if calm is not None}
    calm = calm or Calm()
    kept = os.path.join(directory, "kept")
    os.makedirs(kept)
    order = random.Random(3)
    for repeat in range(repeats):
        # Another order each time: whoever follows a heavy contender must not always be the same.
        for contender in order.sample(runnable, len(runnable)):
            job = Job(model, source, os.path.join(directory, "work"), kept)
            check = check_all or repeat == 0
            try:
                sample = _measure(workload, contender, job, check, calm)
                if sample.is_disturbed and contender.name in may_again:
                    may_again.remove(contender.name)
                    say(f"  {contender.name}: again: the host took {sample.stolen:.2f} s")
                    second = _measure(workload, contender, job, check, calm)
                    sample = min(sample, second, key=lambda each: each.stolen)
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
    shutil.rmtree(kept)
    return samples, skipped, failed


def _measure(workload, contender, job, check, calm):
    """One contender once, with an empty directory that is gone afterwards."""
    shutil.rmtree(job.directory, ignore_errors=True)
    os.makedirs(job.directory)
    try:
        if contender.script:
            return _measure_script(contender, job, calm)
        return _measure_work(workload, contender, job, check, calm)
    finally:
        shutil.rmtree(job.directory, ignore_errors=True)


def _settle(calm):
    """The last thing before a clock starts."""
    for _ in range(_ROUNDS):
        calm.hold()
        if not calm.wait():
            return  # else what was let go of lay idle meanwhile, and the host may have it
    calm.hold()


@contextlib.contextmanager
def _killed_on_error(child):
    """Who waits for a word that never comes, or for threads of a peer's, does not keep us."""
    late = threading.Timer(_MOST_S, child.kill)
    late.daemon = True
    late.start()
    try:
        yield
    except BaseException:
        child.kill()
        raise
    finally:
        late.cancel()


def _measure_work(workload, contender, job, check, calm):
    told = json.dumps({**asdict(job), "check": check})
    arguments = [
        sys.executable,
        *("-m", "benchmarks.child", workload.name, contender.name, told),
    ]
    with (
        subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
        _killed_on_error(child),
    ):
        said = _expect(child, ("ready", "cannot"), contender)
        if said[0] == "cannot":
            raise _Cannot(" ".join(said[1:]))
        others = json.loads(" ".join(said[1:]))
        _settle(calm)
        with contextlib.ExitStack() as watching:
            workers, beside = (
                [watching.enter_context(_Watch(pid)) for pid in pids]
                for pids in (others["workers"] or [child.pid], others["pids"])
            )
            before = stolen_s()
            child.stdin.write("go\n")
            child.stdin.flush()
            _expect(child, ("worked",), contender)
            stolen = stolen_s() - before
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
    return Sample(found["wall"], found["cpu"], memory, other, stolen)


def _measure_script(contender, job, calm):
    """From process start to exit."""
    name = list(job.model.shapes)[1]
    arguments = [sys.executable, "-c", contender.script, job.source, name]
    _settle(calm)
    stolen, before = stolen_s(), os.times()
    start = time.perf_counter()
    subprocess.run(arguments, check=True)
    wall = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return Sample(wall, cpu, None, stolen=stolen_s() - stolen)


def _expect(child, words, contender):
    """The line that begins with one of these words, as words."""
    line = child.stdout.readline()
    while line and line.split(" ")[0].strip() not in words:  # some peers talk on stdout
        line = child.stdout.readline()
    if not line:
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
