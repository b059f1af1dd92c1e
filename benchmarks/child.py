"""One contender, once, in a fresh process: `python -m benchmarks.child WORKLOAD CONTENDER JOB`.

Speaks with the runner over its pipes: prints `ready`, waits for a line, works, prints what it took.
"""

import json
import os
import resource
import sys
import time

from benchmarks import workloads
from benchmarks.contender import Job
from benchmarks.model import Model

__all__ = []

_PACKAGES = {
    *("weighlock", "numpy", "ml_dtypes", "blake3", "torch", "safetensors", "nvflare", "flwr"),
    *("trinity", "transformers", "runai_model_streamer", "fastsafetensors"),
}
"""What must have been imported when the clock starts, if it is used at all."""


def main():
    workload, name, text = sys.argv[1:]
    given = json.loads(text)
    job = Job(Model(**given["model"]), given["source"], given["directory"], given["kept"])
    contender = next(c for c in workloads.ALL[workload].contenders if c.name == name)
    try:
        prepared = contender.prepare(job)
    except ImportError as error:  # installed, but not for this machine: no CUDA, another libc
        if not contender.needs:  # what we import ourselves must be there
            raise
        print("cannot", error, flush=True)
        os._exit(0)
    others = {kind: list(getattr(prepared, kind, ())) for kind in ("pids", "workers")}
    pids = [pid for some in others.values() for pid in some]
    print("ready", json.dumps(others), flush=True)
    if not sys.stdin.readline():  # who measures has ended
        os._exit(1)
    imported = _PACKAGES & sys.modules.keys()
    beside = sum(map(_cpu_of, pids))
    before = _cpu_here()
    start = time.perf_counter()
    result = contender.run(prepared)
    wall = time.perf_counter() - start
    cpu = _cpu_here() - before + sum(map(_cpu_of, pids)) - beside
    late = _PACKAGES & sys.modules.keys() - imported
    assert not late, f"imported within the time: {late}"
    print("worked", flush=True)
    sys.stdin.readline()  # the runner reads the memory before the check allocates any
    if given["check"]:
        contender.check(job, prepared, result)
    print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)
    os._exit(0)  # some peers leave threads that never end


def _cpu_here():
    """CPU seconds of this process, and of programs it ran."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _cpu_of(pid):
    """CPU seconds another process has taken so far, and programs it ran."""
    with open(f"/proc/{pid}/stat") as status:
        fields = status.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
