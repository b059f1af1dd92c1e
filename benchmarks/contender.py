"""What a contender is: a way of doing one piece of work, and how to see that it was done."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.model import Model

__all__ = ["Bar", "Contender", "Job", "Workload"]


@dataclass(frozen=True)
class Job:
    """What a contender is given."""

    model: Model
    source: str
    """A safetensors file of the model; contenders must not change it."""
    directory: str
    """An empty directory for what it makes."""
    kept: str = ""
    """A directory that all runs of a workload share, and that goes with the last."""


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[Any], Any]
    """The work that is measured; gets what `prepare` gave."""
    prepare: Callable[[Job], Any] = lambda job: job
    """Imports and input; not measured. What it gives may name other processes whose CPU counts:
    by `pids` those of the other side, by `workers` those that do the work in its place."""
    check: Callable[[Job, Any, Any], None] = lambda job, prepared, result: None
    """Raises if the work was not done; not measured."""
    needs: tuple[str, ...] = ()
    """Modules without which it cannot run."""
    programs: tuple[str, ...] = ()
    """Programs without which it cannot run. They do the work, so that the memory of the process
    that starts them says nothing."""
    nbytes: int | None = None
    """Bytes it goes through at real size, where the table shall tell the time a byte takes."""
    script: str = ""
    """Instead of the three functions: a program measured from process start to exit."""

    @property
    def missing(self) -> list[str]:
        modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return modules + [name for name in self.programs if shutil.which(name) is None]


@dataclass(frozen=True)
class Bar:
    """A promise: `ours` is at least `ratio` times as fast as `peer`."""

    ours: str
    peer: str
    ratio: float


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    contenders: tuple[Contender, ...]
    bars: tuple[Bar, ...] = ()
    memory_bars: dict[str, int] = field(default_factory=dict)
    """Most megabytes of anonymous memory a contender may add."""
    cpu_bars: dict[str, float] = field(default_factory=dict)
    """Most CPU seconds a contender may take, all its processes together."""
    wall_bars: dict[str, float] = field(default_factory=dict)
    """Most seconds a contender may take."""
    beside_bars: dict[str, int] = field(default_factory=dict)
    """Most megabytes of anonymous memory the other process of a contender may add."""
    is_curve: bool = False
    """Its contenders are points of a curve: three repeats show it, to a quick look a few points."""
    source: str = "safetensors"
    """The kind of file the work starts from: safetensors, or of torch: zip, legacy, many."""
    fills_memory: bool = False
    """Some contender fills gigabytes of new arrays: what is free of huge pages decides how long
    that takes, so a run begins when none was given to the host, nor will be for two seconds."""
    moved_bytes: int | None = None
    """Bytes that each contender moves: the table tells MB/s too."""
    rate_bars: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Least and most MB/s of a contender."""
    note: Callable[[], str] | None = None
    """What the table says of the machine it was measured on."""
    extra_bars: tuple[tuple[str, str, float], ...] = ()
    """(ours, other, seconds): ours takes at most so much longer than the other."""
    limits: dict[str, str] = field(default_factory=dict)
    """Of a contender of ours, the one that shows what is possible here: the same work by bare
    system calls. A promise that it misses too is above the limit."""
