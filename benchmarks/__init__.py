"""Weighlock and its peers on the same work in the same run: `make bench`.

The peers live in an environment of their own (`.bench-venv`), never in the one the tests use.

    workloads/   what is done: one module per piece of work, with all contenders for it
    child.py     one contender, once, in a fresh process
    owners.py    the other side of a transfer; receivers.py: many of them at once
    line.py      a way to the other side that is long and narrow
    runner.py    spawns children, contenders interleaved, and watches their memory from outside
    promises.py  which promises the samples keep, and whether the limit beside them would
    report.py    medians and promises as Markdown
"""
