"""`python -m benchmarks [--quick] [--only NAME …] [--contender WORD …] [--repeats N] …`."""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial

from benchmarks import environment, workloads
from benchmarks.model import FULL, QUICK
from benchmarks.promises import promises_of
from benchmarks.quiet import Quiet
from benchmarks.report import dated, document, table
from benchmarks.runner import Calm, run_workload
from benchmarks.warm import Warm


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, one repeat, this environment, no report: shows that everything runs",
    )
    parser.add_argument("--only", nargs="+", choices=list(workloads.ALL), help="these workloads")
    parser.add_argument(
        "--contender",
        nargs="+",
        metavar="WORD",
        help="contenders in whose name one of these words occurs; no report is written of a part",
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each contender")
    parser.add_argument("--directory", help="where files go; a tmpfs if there is one")
    parser.add_argument(
        "--output",
        help="write the report here; tables of other workloads in it stay",
        metavar="FILE",
    )
    options = parser.parse_args()
    if sys.platform != "linux":
        parser.error("memory and processors are read from Linux's /proc: nothing is measured here")
    _check(parser, options)
    if not options.quick:
        environment.enter()
    model, repeats = (QUICK, 1) if options.quick else (FULL, options.repeats)
    root = options.directory or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    directory = tempfile.mkdtemp(prefix="weighlock-bench-", dir=root)
    where = _file_system(directory)
    chosen = options.only, options.contender, options.directory
    is_all = not any(chosen) and repeats == parser.get_default("repeats")
    command = "make bench" if is_all else f"python -m benchmarks {' '.join(sys.argv[1:])}"
    tables, missed, failed, ran = [], [], [], 0
    before = ""
    if options.output and os.path.exists(options.output):
        with open(options.output) as file:
            before = file.read()
    signal.signal(signal.SIGTERM, _end)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        if not options.quick:  # of a small model for a quick look everything is small
            warm, quiet = stack.enter_context(Warm()), Quiet()
        names = list(options.only or workloads.ALL)
        for number, name in enumerate(names):
            workload = _with(workloads.ALL[name], options.contender)
            if options.quick and workload.is_curve:
                workload = replace(workload, contenders=workload.contenders[:3])
            if not workload.contenders:
                continue
            if workload.source != "safetensors" and importlib.util.find_spec("torch") is None:
                print(f"{name}: skipped: not installed: torch", flush=True)
                continue
            source = model.file(directory, workload.source)
            times = min(3, repeats) if workload.is_curve else repeats
            calm = None
            if not options.quick:
                calm = Calm(partial(warm.hold, unseen=workload.fills_memory), quiet.wait)
            print(f"{name}: {workload.title}", flush=True)
            samples, skipped, wrong = run_workload(
                workload,
                model,
                source,
                directory,
                repeats=times,
                check_all=options.quick,
                say=lambda line: print(line, flush=True),
                calm=calm,
            )
            text = table(workload, samples, skipped, promises=not options.quick)
            print("\n" + text, flush=True)
            tables.append(dated(text, command, times, where, unseen=workload.fills_memory))
            failed += [f"{name}: {contender}" for contender in wrong]
            ran += sum(map(len, samples.values()))
            if not options.quick:
                found = promises_of(workload, samples)
                missed += [kept for kept in found if kept.is_met is False]
            if options.output:  # after each, so that an interrupted run keeps what it measured
                with open(options.output, "w") as file:
                    file.write(document(tables, model, before))
            if not any(workloads.ALL[n].source == workload.source for n in names[number + 1 :]):
                os.unlink(source)  # on tmpfs it takes the memory of who comes later
    if options.quick:
        told = "all checked; promises are about real sizes, none was looked at"
    else:
        told = f"the first of each checked; {len(missed)} promises missed"
    print(f"{ran} runs of {len(tables)} workloads, {told}")
    for contender in failed:
        print(f"failed: {contender}")
    return 1 if failed else 0


def _end(number, _):
    """Leave by an exception, so that files and processes go, and only once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _check(parser, options):
    """End with a line about what cannot be, before anything is measured."""
    if options.contender and options.output:
        parser.error("--output holds whole workloads: leave out --contender")
    if options.quick and options.output:
        parser.error("--output holds what was measured at real sizes: leave out --quick")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    if options.directory and not os.path.isdir(options.directory):
        parser.error(f"--directory {options.directory}: there is no such directory")
    if options.output and not os.path.isdir(os.path.dirname(options.output) or "."):
        parser.error(f"--output {options.output}: there is no such directory to write it to")
    named = [workloads.ALL[name] for name in options.only or workloads.ALL]
    if not any(_with(workload, options.contender).contenders for workload in named):
        parser.error(f"--contender {' '.join(options.contender)}: nobody's name has such a word")


def _file_system(directory):
    """What a directory lies on, as the system calls it."""
    path, found = os.path.realpath(directory), ("", "disk")
    with contextlib.suppress(OSError), open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, place, kind = line.split(" ")[:3]
            if path == place or path.startswith(place.rstrip("/") + "/"):
                found = max(found, (place, kind))
    return found[1]


def _with(workload, words):
    """The workload with the contenders that were chosen."""
    if not words:
        return workload
    chosen = [c for c in workload.contenders if any(word in c.name for word in words)]
    return replace(workload, contenders=tuple(chosen))


if __name__ == "__main__":
    sys.exit(main())
