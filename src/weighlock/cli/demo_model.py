"""The model of the demo: made on the spot, one tensor at a time. Knows shapes and numbers only."""

import math
from collections.abc import Iterator

import numpy as np

from weighlock.tensors.arrays import Array
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec

__all__ = ["is_trained", "specs_of", "tensors_of", "trained"]

_VOCABULARY = 8192
_LAYERS = 4
"""At the least: where the model is small, so are its layers."""


def specs_of(total_bytes: int) -> list[TensorSpec]:
    """A transformer-like model of about so many bytes in bf16."""
    widths = (2048, 1024, 512, 256)
    fits = [width for width in widths if _LAYERS * _layer_bytes(width) <= total_bytes]
    width = fits[0] if fits else widths[-1]
    vocabulary = min(_VOCABULARY, max(256, total_bytes // 4 // (2 * width)))
    count = max(_LAYERS, (total_bytes - 2 * width * vocabulary) // _layer_bytes(width))
    return [
        TensorSpec("embed.weight", DType.BF16, (vocabulary, width)),
        *(
            TensorSpec(f"layers.{number}.{name}", DType.BF16, shape)
            for number in range(count)
            for name, shape in _layer(width).items()
        ),
        TensorSpec("norm.weight", DType.BF16, (width,)),
    ]


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp.up.weight": (4 * width, width),
        "mlp.down.weight": (width, 4 * width),
        "norm.weight": (width,),
    }


def _layer_bytes(width: int) -> int:
    return 2 * sum(math.prod(shape) for shape in _layer(width).values())


def tensors_of(specs: list[TensorSpec]) -> Iterator[tuple[str, Array]]:
    """One tensor at a time, all from one small table of numbers."""
    table = np.random.default_rng(7).standard_normal(1 << 20, np.float32)
    numbers = (table * 0.02).astype(DType.BF16.numpy)
    for spec in specs:
        tensor = np.empty(spec.size, DType.BF16.numpy)
        for first in range(0, spec.size, numbers.size):
            part = tensor[first : first + numbers.size]
            part[:] = numbers[: part.size]
        yield spec.name, tensor.reshape(spec.shape)


def is_trained(name: str) -> bool:
    """Whether sites change a tensor; the others are frozen, as most are in fine-tuning."""
    return name.startswith("layers.0.") or not name.startswith(("layers.", "embed."))


def trained(model: Catalog, steps: int) -> Iterator[tuple[str, object]]:
    """The model after some training: so many units in the last place, in what is trained."""
    for name, ref in model.items():
        if not is_trained(name):
            yield name, ref
            continue
        values = ref.load()
        if not values.flags.writeable:  # it rode in the message
            values = values.copy()
        values.view(np.uint16)[...] += np.uint16(steps)
        yield name, values
