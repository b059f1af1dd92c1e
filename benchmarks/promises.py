"""What was promised of a workload, held against what was measured: pure arithmetic.

A promise may be more than the machine can do. So beside ours the same figure is taken of the
contender that shows what is possible, where the workload names one: a promise that bare system
calls miss too is a fault of the promise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

__all__ = ["Kept", "promises_of"]


@dataclass(frozen=True)
class Kept:
    """A promise, and whether what was measured keeps it."""

    promise: str
    measured: str
    is_met: bool
    limit: str = ""
    """What the limit measured beside it comes to; nothing where there is none."""
    is_possible: bool = True
    """False where that limit misses the promise too."""


@dataclass(frozen=True)
class _Promise:
    """One figure of one contender: how it is taken, when it is kept, how it is told."""

    text: str
    ours: str
    measure: Callable[[str], float]
    holds: Callable[[float], bool]
    tell: Callable[[float], str]
    peer: str | None = None
    """With whom ours is compared."""
    is_limited: bool = True
    """Whether bare system calls have this figure too."""


def promises_of(workload, samples):
    """Every promise of the workload whose contenders ran."""

    def ran(name):
        return name is None or bool(samples.get(name))

    found = []
    for promise in _promises(workload, samples):
        if not (ran(promise.ours) and ran(promise.peer)):
            continue
        value = promise.measure(promise.ours)
        kept = Kept(promise.text, promise.tell(value), promise.holds(value))
        limit = workload.limits.get(promise.ours) if promise.is_limited else None
        if limit is not None and limit != promise.peer and ran(limit):
            value = promise.measure(limit)
            kept = replace(kept, limit=promise.tell(value), is_possible=promise.holds(value))
        found.append(kept)
    return found


def _promises(workload, samples):
    def wall(name):
        return median(sample.wall for sample in samples[name])

    def cpu(name):
        return median(sample.cpu for sample in samples[name])

    def rate(name):
        return workload.moved_bytes / wall(name) / 1e6

    def memory(name):
        return max(sample.memory for sample in samples[name]) / 1e6

    def beside(name):
        return max(sample.beside for sample in samples[name]) / 1e6

    for bar in workload.bars:
        yield _Promise(
            f"{bar.ours} ≥ {bar.ratio:g} × {bar.peer}",
            bar.ours,
            lambda name, peer=bar.peer: wall(peer) / wall(name),
            lambda ratio, least=bar.ratio: ratio >= least,
            "{:.2f} ×".format,
            bar.peer,
        )
    for ours, other, seconds in workload.extra_bars:
        yield _Promise(
            f"{ours} ≤ {other} + {seconds * 1000:.0f} ms",
            ours,
            lambda name, other=other: wall(name) - wall(other),
            lambda more, most=seconds: more <= most,
            lambda more: f"+ {more * 1000:.0f} ms",
            other,
        )
    for name, (least, most) in workload.rate_bars.items():
        what = f"≥ {least:g} MB/s" if most is None else f"{least:g} to {most:g} MB/s"
        yield _Promise(
            f"{name}: {what}",
            name,
            rate,
            lambda found, least=least, most=most: found >= least and (not most or found <= most),
            "{:.1f} MB/s".format,
        )
    for name, megabytes in workload.memory_bars.items():
        yield _Promise(
            f"{name} adds ≤ {megabytes} MB",
            name,
            memory,
            lambda found, most=megabytes: found <= most,
            "{:.1f} MB".format,
            is_limited=False,
        )
    for name, seconds in workload.wall_bars.items():
        yield _Promise(
            f"{name} takes ≤ {seconds * 1000:.0f} ms",
            name,
            wall,
            lambda found, most=seconds: found <= most,
            lambda found: f"{found * 1000:.1f} ms",
        )
    for name, seconds in workload.cpu_bars.items():
        yield _Promise(
            f"{name} takes ≤ {seconds:.2f} CPU s",
            name,
            cpu,
            lambda found, most=seconds: found <= most,
            "{:.2f} s".format,
        )
    for name, megabytes in workload.beside_bars.items():
        yield _Promise(
            f"{name}: the owner adds ≤ {megabytes} MB",
            name,
            beside,
            lambda found, most=megabytes: found <= most,
            "{:.1f} MB".format,
            is_limited=False,
        )
