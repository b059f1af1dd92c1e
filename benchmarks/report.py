"""Samples as tables: medians, spread, ratios, bars. Knows Markdown; measures nothing."""

import datetime
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from statistics import median

__all__ = ["bars_of", "dated", "document", "table"]

_PACKAGES = (
    *("weighlock", "numpy", "blake3", "torch", "safetensors", "trinity-rft", "transformers"),
    *("nvflare", "flwr", "runai-model-streamer", "fastsafetensors"),
)
_PROGRAMS = {"nginx": ("-v",), "curl": ("--version",)}


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
    lines += [f"| contender | s (median) | spread | × first | CPU s | memory + MB |{other}"]
    lines += ["|---|---|---|---|---|---|" + "---|" * other.count("|")]
    first = None
    for name, found in samples.items():
        walls = [sample.wall for sample in found]
        wall = median(walls)
        first = first or wall
        memory = [sample.memory for sample in found if sample.memory is not None]
        lines.append(
            f"| {name} | {wall:.3f} | {min(walls):.3f}–{max(walls):.3f} | {wall / first:.2f} "
            f"| {median(sample.cpu for sample in found):.2f} "
            f"| {f'{max(memory) / 1e6:.0f}' if memory else ''} |"
            + (f" {_beside(found)} |" if paired else "")
            + (f" {moved / wall / 1e6:.1f} |" if moved else "")
            + (f" {wall / sizes[name] * 1e9:.2f} |" if name in sizes else " |" if sizes else "")
        )
    lines += [f"| {name} | {why} | | | | |" for name, why in skipped.items()]
    bars = bars_of(workload, samples) if promises else []
    if bars:
        lines += ["", "| promise | measured | |", "|---|---|---|"]
        lines += [
            f"| {what} | {found} | {'met' if met else '**missed**'} |" for what, found, met in bars
        ]
    return "\n".join([*lines, ""])


def _beside(found):
    others = [sample.beside for sample in found if sample.beside is not None]
    return f"{max(others) / 1e6:.0f}" if others else ""


def bars_of(workload, samples):
    """(promise, measured, met) for each bar whose contenders ran."""
    rows = []
    for bar in workload.bars:
        if samples.get(bar.ours) and samples.get(bar.peer):
            ours = median(sample.wall for sample in samples[bar.ours])
            peer = median(sample.wall for sample in samples[bar.peer])
            what = f"{bar.ours} ≥ {bar.ratio:g} × {bar.peer}"
            rows.append((what, f"{peer / ours:.2f} ×", peer / ours >= bar.ratio))
    for ours, other, seconds in workload.extra_bars:
        if samples.get(ours) and samples.get(other):
            more = median(s.wall for s in samples[ours]) - median(s.wall for s in samples[other])
            what = f"{ours} ≤ {other} + {seconds * 1000:.0f} ms"
            rows.append((what, f"+ {more * 1000:.0f} ms", more <= seconds))
    for name, (least, most) in workload.rate_bars.items():
        if samples.get(name):
            wall = median(sample.wall for sample in samples[name])
            found = workload.moved_bytes / wall / 1e6
            what = f"≥ {least:g} MB/s" if most is None else f"{least:g} to {most:g} MB/s"
            met = found >= least and (most is None or found <= most)
            rows.append((f"{name}: {what}", f"{found:.1f} MB/s", met))
    for name, megabytes in workload.memory_bars.items():
        memory = [s.memory for s in samples.get(name, ()) if s.memory is not None]
        if memory:
            found = max(memory) / 1e6
            rows.append((f"{name} adds ≤ {megabytes} MB", f"{found:.1f} MB", found <= megabytes))
    for name, seconds in workload.wall_bars.items():
        if samples.get(name):
            found = median(sample.wall for sample in samples[name])
            what = f"{name} takes ≤ {seconds * 1000:.0f} ms"
            rows.append((what, f"{found * 1000:.1f} ms", found <= seconds))
    for name, seconds in workload.cpu_bars.items():
        if samples.get(name):
            found = median(sample.cpu for sample in samples[name])
            rows.append((f"{name} takes ≤ {seconds:.2f} CPU s", f"{found:.2f} s", found <= seconds))
    for name, megabytes in workload.beside_bars.items():
        if samples.get(name):
            found = max(sample.beside for sample in samples[name]) / 1e6
            what = f"{name}: the owner adds ≤ {megabytes} MB"
            rows.append((what, f"{found:.1f} MB", found <= megabytes))
    return rows


def dated(text, command, repeats, where):
    """A table that says when, where and how it was made: a report holds those of several days."""
    title, rest = text.split("\n", 1)
    times = f"{repeats} repeats" if repeats > 1 else "1 repeat"
    machine = f"{os.cpu_count()} cores ({_cpu()})"
    how = f"{times}, files on {where}, free memory kept warm, begun when quiet"
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
            "host took more than 3 % is done again. Compare within a table only. The machine and "
            "the versions are those of the last run:",
            "",
            f"{platform.system()} {platform.release()}, {os.cpu_count()} cores ({_cpu()}), "
            f"{pages / 2**30:.0f} GiB, Python {platform.python_version()}, {', '.join(versions)}. "
            f"Our means were {means}.",
            "",
            *kept.values(),
        ]
    )


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
