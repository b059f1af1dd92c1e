"""What was promised of a workload, held against what was measured: pure arithmetic.

A promise may be more than the machine can do. So beside ours the same figure is taken of the
contender that shows what is possible, where the workload names one: a promise that bare system
calls miss too, in their best run, is a fault of the promise; unless ours are faster than they.
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
    is_met: bool | None
    """None where somebody it is about did not run."""
    limit: str = ""
    """What the limit measured beside it comes to in its best run; nothing where there is none."""
    is_possible: bool = True
    """False where that limit misses the promise too."""

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.is_met is None:
            return "not judged"
        if self.is_met:
            return "met"
        return "**missed**" if self.is_possible else "**missed**, above the limit"


@dataclass(frozen=True)
class _Promise:
    """One figure of one contender: how it is taken, when it is kept, how it is told."""

    text: str
    ours: str
    measure: Callable[[Callable, str], float]
    """Of a contender, with what is made of the figures of its runs: a median, or the least."""
    holds: Callable[[float], bool]
    tell: Callable[[float], str]
    peer: str | None = None
    """With whom ours is compared."""
    is_limited: bool = True
    """Whether bare system calls have this figure too."""
    cost: str = "wall"
    """What decides who is faster."""


def promises_of(workload, samples):
    """Every promise of the workload; those that cannot be judged are told as such."""

    def ran(name):
        return name is None or bool(samples.get(name))

    def cost(promise, name):
        return median(getattr(sample, promise.cost) for sample in samples[name])

    found = []
    for promise in _promises(workload, samples):
        if not (ran(promise.ours) and ran(promise.peer)):
            found.append(Kept(promise.text, "did not run", None))
            continue
        value = promise.measure(median, promise.ours)
        if value is None:
            found.append(Kept(promise.text, "nobody looked", None))
            continue
        kept = Kept(promise.text, promise.tell(value), promise.holds(value))
        limit = workload.limits.get(promise.ours) if promise.is_limited else None
        if limit is not None and limit != promise.peer and ran(limit):
            value = promise.measure(min, limit)
            beaten = cost(promise, promise.ours) < cost(promise, limit)
            is_possible = beaten or promise.holds(value)
            kept = replace(kept, limit=promise.tell(value), is_possible=is_possible)
        found.append(kept)
    return found


def _promises(workload, samples):
    def wall(of, name):
        return of(sample.wall for sample in samples[name])

    def cpu(of, name):
        return of(sample.cpu for sample in samples[name])

    def rate(of, name):
        return workload.moved_bytes / wall(of, name) / 1e6

    def memory(_, name):
        return _most(sample.memory for sample in samples[name])

    def beside(_, name):
        return _most(sample.beside for sample in samples[name])

    for bar in workload.bars:
        yield _Promise(
            f"{bar.ours} ≥ {bar.ratio:g} × {bar.peer}",
            bar.ours,
            lambda of, name, peer=bar.peer: wall(median, peer) / wall(of, name),
            lambda ratio, least=bar.ratio: ratio >= least,
            "{:.2f} ×".format,
            bar.peer,
        )
    for ours, other, seconds in workload.extra_bars:
        yield _Promise(
            f"{ours} ≤ {other} + {seconds * 1000:.0f} ms",
            ours,
            lambda of, name, other=other: wall(of, name) - wall(median, other),
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
            cost="cpu",
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


def _most(sizes):
    """The largest in megabytes; None where nobody could look."""
    known = [size for size in sizes if size is not None]
    return max(known) / 1e6 if known else None
