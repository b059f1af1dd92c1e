"""What is measured: one module per piece of work. Adding one is adding a line here."""

from benchmarks.workloads import (
    checkpoints,
    convert,
    far,
    growth,
    load_all,
    many_tensors,
    mean,
    messages,
    open_one,
    push,
    rounds,
    save,
    transfer,
    transformers_load,
)

__all__ = ["ALL"]

ALL = {
    workload.name: workload
    for workload in (
        save.FROM_MEMORY,
        save.FROM_GENERATOR,
        load_all.WORKLOAD,
        convert.WORKLOAD,
        open_one.WORKLOAD,
        transformers_load.WORKLOAD,
        *checkpoints.ALL,
        *many_tensors.ALL,
        *transfer.ALL,
        *rounds.ALL,
        *far.ALL,
        *push.ALL,
        *messages.ALL,
        *mean.ALL,
        *growth.ALL,
    )
}
