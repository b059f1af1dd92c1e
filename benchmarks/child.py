"""One contender, once, in a fresh process: `python -m benchmarks.child WORKLOAD CONTENDER JOB`.

Speaks with the runner over its pipes: prints `ready`, waits for a line, works, prints what it took.
"""

import json
import resource
import sys
import time

from benchmarks import workloads
from benchmarks.contender import Job
from benchmarks.model import Model

__all__ = []


def main():
    workload, name, text = sys.argv[1:]
    given = json.loads(text)
    job = Job(Model(**given["model"]), given["source"], given["directory"])
    contender = next(c for c in workloads.ALL[workload].contenders if c.name == name)
    prepared = contender.prepare(job)
    print("ready", flush=True)
    sys.stdin.readline()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    result = contender.run(prepared)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print("worked", flush=True)
    sys.stdin.readline()  # the runner reads the memory before the check allocates any
    if given["check"]:
        contender.check(job, prepared, result)
    print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    main()
