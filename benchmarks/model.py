"""The model everybody works on: shapes of a language model, numbers made on the spot."""

import json
import math
import os
from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Model"]

_ALIGNMENT = 64
"""Torch's, of what it allocates; numpy's is 16."""


@dataclass(frozen=True)
class Model:
    """147 tensors of bf16, shaped like a small language model."""

    hidden: int
    layers: int
    vocabulary: int
    many: int = 100_000
    """Tensors of the checkpoint that has very many, all small."""

    @property
    def shapes(self):
        h = self.hidden
        layer = {
            "self_attn.q_proj.weight": (h, h),
            "self_attn.k_proj.weight": (h, h),
            "self_attn.v_proj.weight": (h, h),
            "self_attn.o_proj.weight": (h, h),
            "mlp.gate_proj.weight": (4 * h, h),
            "mlp.up_proj.weight": (4 * h, h),
            "mlp.down_proj.weight": (h, 4 * h),
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
        }
        return {
            "model.embed_tokens.weight": (self.vocabulary, h),
            **{
                f"model.layers.{number}.{name}": shape
                for number in range(self.layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (h,),
            "lm_head.weight": (self.vocabulary, h),
        }

    @property
    def nbytes(self):
        total = 0
        for shape in self.shapes.values():
            count = 2
            for size in shape:
                count *= size
            total += count
        return total

    def arrays(self):
        """name → uint16 array holding bf16 bits; every tensor different, all of it touched."""
        import numpy as np

        table = np.random.default_rng(11).integers(0x3C00, 0x3FFF, 1 << 20, dtype=np.uint16)
        arrays = {}
        for number, (name, shape) in enumerate(self.shapes.items()):
            array = _empty(shape)
            flat = array.reshape(-1)
            rolled = np.roll(table, 4099 * number)
            for first in range(0, flat.size, table.size):
                part = flat[first : first + table.size]
                part[:] = rolled[: part.size]
            arrays[name] = array
        return arrays

    def tensors(self):
        """name → torch tensor of bf16."""
        import torch

        return {
            name: torch.from_numpy(array).view(torch.bfloat16)
            for name, array in self.arrays().items()
        }

    def _small_tensors(self):
        import torch

        return {
            f"layers.{number}.weight": torch.full((4, 8), float(number))
            for number in range(self.many)
        }

    def file(self, directory, kind="safetensors"):
        """A file of the model, made once for each directory; torch's kinds are made by torch."""
        if kind != "safetensors":
            return self._torch_file(directory, kind)
        path = os.path.join(directory, "model.safetensors")
        if not os.path.exists(path):
            header, offset = {}, 0
            arrays = self.arrays()
            for name, array in arrays.items():
                end = offset + array.nbytes
                header[name] = {
                    "dtype": "BF16",
                    "shape": array.shape,
                    "data_offsets": [offset, end],
                }
                offset = end
            text = json.dumps(header).encode()
            text += b" " * (-(8 + len(text)) % 64)
            with open(path + ".new", "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for array in arrays.values():
                    file.write(array)
            os.rename(path + ".new", path)
        return path

    def _torch_file(self, directory, kind):
        path = os.path.join(directory, f"model-{kind}.pt")
        if not os.path.exists(path):
            import torch

            tensors = self._small_tensors() if kind == "many" else self.tensors()
            torch.save(tensors, path, _use_new_zipfile_serialization=kind != "legacy")
        return path


def _empty(shape):
    """An array of uint16 that begins where torch lets tensors begin.

    How fast a page of a file is filled depends on where both lie: 8 bytes beside such a place in
    the file, it took half as long again.
    """
    import numpy as np

    nbytes = 2 * math.prod(shape)
    reserved = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -reserved.ctypes.data % _ALIGNMENT
    return reserved[start : start + nbytes].view(np.uint16).reshape(shape)


FULL = Model(hidden=2048, layers=16, vocabulary=32_000)
QUICK = Model(hidden=64, layers=16, vocabulary=1000, many=1000)
