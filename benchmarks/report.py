"""Samples as tables: medians, spread, ratios, bars. Knows Markdown; measures nothing."""

import datetime
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from statistics import median

from benchmarks.promises import promises_of

__all__ = ["dated", "document", "table"]

_PACKAGES = (
    *("weighlock", "numpy", "blake3", "torch", "safetensors", "trinity-rft", "transformers"),
    *("nvflare", "flwr", "runai-model-streamer", "fastsafetensors"),
)
_PROGRAMS = {"nginx": ("-v",), "curl": ("--version",)}

_PROMISES = "| promise | measured | the limit there, at its best | |"


def table(workload, samples, skipped, *, promises=True):
    """One workload as Markdown. The first contender that ran is the measure of the others.

    Promises are about real sizes: at small ones start-up costs hide everything.
    """
    lines = [f"## {workload.title}", ""]
    if workload.note is not None:
        lines += [workload.note(), ""]
    paired = any(sample.beside is not None for found in samples.values() for sample in found)
    moved = workload.moved_bytes if promises else None
    sizes = {c.name: c.nbytes for c in workload.contenders if c.nbytes and promises}
    other = " other process + MB |" if paired else ""
    other += " MB/s |" if moved else ""
    other += " ns per byte |" if sizes else ""
    ratio = "" if workload.is_curve else " × first |"  # of a curve, the first is its least point
    lines += [f"| contender | s (median) | spread |{ratio} CPU s | memory + MB |{other}"]
    lines += ["|---|---|---|---|---|" + "---|" * (ratio + other).count("|")]
    first = None
    for name, found in samples.items():
        walls = [sample.wall for sample in found]
        wall = median(walls)
        first = first or wall
        memory = [sample.memory for sample in found if sample.memory is not None]
        lines.append(
            f"| {name} | {wall:.3f} | {min(walls):.3f}–{max(walls):.3f} |"
            + (f" {wall / first:.2f} |" if ratio else "")
            + f" {median(sample.cpu for sample in found):.2f} "
            f"| {f'{max(memory) / 1e6:.0f}' if memory else ''} |"
            + (f" {_beside(found)} |" if paired else "")
            + (f" {moved / wall / 1e6:.1f} |" if moved else "")
            + (f" {wall / sizes[name] * 1e9:.2f} |" if name in sizes else " |" if sizes else "")
        )
    lines += [f"| {name} | {why} | | | | |" for name, why in skipped.items()]
    found = promises_of(workload, samples) if promises else []
    if found:
        lines += ["", _PROMISES, "|---|---|---|---|", *map(_promise, found)]
    return "\n".join([*lines, ""])


def _promise(kept):
    return f"| {kept.promise} | {kept.measured} | {kept.limit} | {kept.verdict} |"


def _beside(found):
    others = [sample.beside for sample in found if sample.beside is not None]
    return f"{max(others) / 1e6:.0f}" if others else ""


def dated(text, command, repeats, where, *, unseen=False):
    """A table that says when, where and how it was made: a report holds those of several days.

    `unseen` if each run began with free memory that the host would leave alone.
    """
    title, rest = text.split("\n", 1)
    times = f"{repeats} repeats" if repeats > 1 else "1 repeat"
    machine = f"{os.cpu_count()} cores ({_cpu()})"
    how = f"{times}, files on {where}, free memory kept warm, begun when quiet"
    how += ", and two seconds before the host looks for free memory again" if unseen else ""
    return f"{title}\n\n{datetime.date.today()}, {machine}, `{command}`, {how}.\n{rest}"


def document(tables, model, before=""):
    """The whole report: these tables, and those of the report before that they do not replace."""
    from weighlock.combining import compiled  # not before the peers' environment is entered

    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    versions += [found for found in map(_program, _PROGRAMS) if found]
    means = "compiled" if compiled.is_built() else "made by numpy"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    kept = {_title(section): section for section in _sections(before)}
    kept |= {_title(section): section for section in tables}
    return "\n".join(
        [
            "# Measurements",
            "",
            f"{len(model.shapes)} tensors of bf16, {model.nbytes / 1e9:.2f} GB unless said "
            "otherwise, each run in a fresh process, contenders in a new order each time. Where a "
            "table says so, a run begins when a copy in memory takes no longer than it usually "
            "does, or after five seconds; and once for each contender, a run of whose time the "
            "host took more than 3 % is done again, of which two the less disturbed counts. "
            "Compare within a table only. The machine and the versions are those of the last run:",
            "",
            f"{platform.system()} {platform.release()}, {os.cpu_count()} cores ({_cpu()}), "
            f"{pages / 2**30:.0f} GiB, Python {platform.python_version()}, {', '.join(versions)}. "
            f"Our means were {means}.",
            "",
            *_summary(kept.values()),
            *kept.values(),
        ]
    )


def _summary(sections):
    """How many promises these tables keep, and each that they do not."""
    met, missed, unjudged = 0, [], 0
    for section in sections:
        for line in section.partition("\n| promise |")[2].splitlines()[2:]:
            met += line.endswith("| met |")
            unjudged += line.endswith("| not judged |")
            if "**missed**" in line:
                missed.append(f"| {_title(section).removeprefix('## ')} {line}")
    lines = [f"Of {met + len(missed) + unjudged} promises {met} are met in these tables."]
    if unjudged:
        lines[0] += f" {unjudged} could not be judged: somebody they are about did not run."
    if missed:
        lines[0] += (
            " Those that are missed, with what bare system calls that do the same work come to "
            "beside them, in their best run; where these miss a promise too, and are no slower "
            "than we are, it is above the limit:"
        )
        lines += ["", f"| work {_PROMISES}", "|---|---|---|---|---|", *missed]
    return [*lines, ""]


def _program(name):
    """A program and its version; nothing if it is not here."""
    if shutil.which(name) is None:
        return None
    said = subprocess.run([name, *_PROGRAMS[name]], capture_output=True, text=True, check=True)
    found = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
    return f"{name} {found[0] if found else 'of an unknown version'}"


def _sections(text):
    return [f"## {section}" for section in text.split("\n## ")[1:]]


def _title(section):
    return section.split("\n", 1)[0]


def _cpu():
    try:
        with open("/proc/cpuinfo") as cpus:
            return next(
                line.split(":")[1].strip() for line in cpus if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.machine()
