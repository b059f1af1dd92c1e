"""`weighlock demo`: the library at work on a model made on the spot, with what it measured."""

import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator

import click
import numpy as np

import weighlock
from weighlock.cli.shared import SIZE
from weighlock.cli.text import escaped, quantity, size
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec

__all__ = ["command"]

_HIDDEN, _VOCABULARY = 2048, 8192


@click.command("demo")
@click.option(
    "--size", "total", type=SIZE, default="500MB", show_default=True, help="Bytes of the model."
)
@click.option("--keep", type=click.Path(), help="Leave the files in this new directory.")
def command(total: int, keep: str | None) -> None:
    """Make a model, stream it to disk, slice, shard and share it; measure all of it."""
    with contextlib.ExitStack() as stack:
        if keep is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="weighlock-demo-"))
        else:
            os.makedirs(keep)
            directory = keep
        _run(directory, total)
        if keep is not None:
            click.echo(f"\nThe files are in {escaped(directory)}.")


def _run(directory: str, total: int) -> None:
    path = os.path.join(directory, "model.safetensors")
    specs = _specs(total)
    nbytes = sum(spec.nbytes for spec in specs)
    values = sum(spec.size for spec in specs)
    _say(f"A model of {len(specs)} tensors, {quantity(values)} parameters, {size(nbytes)} in bf16.")
    weighlock.open(_tiny())  # imports what is imported on first use, so that it is not measured
    before = _memory()

    with _measured("write it, tensor by tensor, from a generator", nbytes):
        weighlock.save(path, _tensors(specs), specs=specs, metadata={"made by": "weighlock demo"})
    with _measured("open it (the header only)"):
        catalog = weighlock.open(path)
    with _measured("read 16 rows of embed.weight"):
        rows = catalog["embed.weight"][1000:1016]
    click.echo(f"      {rows.dtype} {list(rows.shape)}, first row starts {rows[0, :4]}")
    sharded = os.path.join(directory, "sharded")
    with _measured("copy it into shards of 200 MB, from file to file", nbytes):
        weighlock.save(sharded, catalog, max_shard_bytes=200_000_000)
    click.echo(f"      {', '.join(sorted(os.listdir(sharded)))}")
    with _measured("compare every byte of both", 2 * nbytes):
        other = weighlock.open(sharded)
        same = all(_equal(catalog[name], other[name]) for name in catalog)
    click.echo(f"      {'all equal' if same else 'THEY DIFFER'}")
    _share(catalog, directory, nbytes)
    largest = size(max(spec.nbytes for spec in specs))
    _say(
        f"Memory at the peak, beyond start-up: {size(max(0, _memory() - before))}, "
        f"of which {largest} for the largest tensor while it was made."
    )
    _say(
        "Look into it yourself: weighlock demo --keep models; weighlock ls models/model.safetensors"
    )


def _share(catalog: weighlock.Catalog, directory: str, nbytes: int) -> None:
    """Offer the file, pull it again, then pull a version of it of which little differs."""
    first, second = (os.path.join(directory, f"{name}.safetensors") for name in ("pulled", "next"))
    with weighlock.Server() as server:
        with _measured("share it over HTTP (nothing is copied)"):
            share = server.share(catalog)
        with _measured("pull it to another file, every block hashed there and here", nbytes):
            weighlock.fetch(share.url, into=first).close()
        with _measured("read 16 rows of it through the network"):
            remote = weighlock.open(share.url)
            rows = remote["embed.weight"][1000:1016]
        click.echo(f"      equal to the file's: {_same(rows, catalog['embed.weight'][1000:1016])}")
        remote.close()
        changed = {**catalog, "embed.weight": catalog["embed.weight"].load() * 2}
        with server.share(changed) as again, _measured("pull the next version, with this as base"):
            weighlock.fetch(again.url, into=second, base=first).close()


def _same(a: Array, b: Array) -> str:
    return "yes" if np.array_equal(a.view(np.uint8), b.view(np.uint8)) else "NO"


def _specs(total: int) -> list[TensorSpec]:
    """A transformer-like model of about `total` bytes."""
    layer = [
        ("attention.qkv.weight", (3 * _HIDDEN, _HIDDEN)),
        ("attention.out.weight", (_HIDDEN, _HIDDEN)),
        ("mlp.up.weight", (4 * _HIDDEN, _HIDDEN)),
        ("mlp.down.weight", (_HIDDEN, 4 * _HIDDEN)),
        ("norm.weight", (_HIDDEN,)),
    ]
    per_layer = 2 * sum(int(np.prod(shape)) for _, shape in layer)
    embedding = min(_VOCABULARY, max(1016, total // 4 // (2 * _HIDDEN)))
    count = max(1, (total - 2 * _HIDDEN * embedding) // per_layer)
    return [
        TensorSpec("embed.weight", DType.BF16, (embedding, _HIDDEN)),
        *(
            TensorSpec(f"layers.{number}.{name}", DType.BF16, shape)
            for number in range(count)
            for name, shape in layer
        ),
    ]


def _tensors(specs: list[TensorSpec]) -> Iterator[tuple[str, Array]]:
    """One tensor at a time, all from one small table of numbers."""
    table = np.random.default_rng(7).standard_normal(1 << 20, np.float32)
    numbers = (table * 0.02).astype(DType.BF16.numpy)
    for spec in specs:
        tensor = np.empty(spec.size, DType.BF16.numpy)
        for first in range(0, spec.size, numbers.size):
            part = tensor[first : first + numbers.size]
            part[:] = numbers[: part.size]
        yield spec.name, tensor.reshape(spec.shape)


def _tiny() -> bytes:
    header = b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    return len(header).to_bytes(8, "little") + header + b"\0\0"


def _equal(a: weighlock.TensorRef, b: weighlock.TensorRef) -> bool:
    pieces = zip(a.pieces(), b.pieces(), strict=True)
    return all(
        np.array_equal(np.frombuffer(x, np.uint8), np.frombuffer(y, np.uint8)) for x, y in pieces
    )


@contextlib.contextmanager
def _measured(what: str, nbytes: int = 0) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    took = f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    rate = f"  {size(int(nbytes / seconds))}/s" if nbytes else ""
    click.echo(f"  {took:>9}  {what}{rate}")


def _memory() -> int:
    """Most memory this process has had so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _say(text: str) -> None:
    click.secho(text, bold=True)
