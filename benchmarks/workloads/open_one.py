"""A fresh process that opens a file and reads one 8 MB tensor: from process start to exit."""

from benchmarks.contender import Bar, Contender, Workload

__all__ = ["WORKLOAD"]

_LIMIT = """
import json, os, sys
import numpy as np
fd = os.open(sys.argv[1], os.O_RDONLY)
length = int.from_bytes(os.pread(fd, 8, 0), "little")
entry = json.loads(os.pread(fd, length, 8))[sys.argv[2]]
begin, end = entry["data_offsets"]
array = np.empty(entry["shape"], np.uint16)
assert os.preadv(fd, [array], 8 + length + begin) == end - begin
"""

_WEIGHLOCK = """
import sys
import weighlock
array = weighlock.open(sys.argv[1])[sys.argv[2]].load()
assert array.dtype.name == "bfloat16" and array.ndim == 2
"""

_SAFETENSORS = """
import sys
import torch
from safetensors import safe_open
with safe_open(sys.argv[1], framework="pt") as file:
    tensor = file.get_tensor(sys.argv[2])
assert tensor.dtype == torch.bfloat16 and tensor.ndim == 2
"""

WORKLOAD = Workload(
    "open-one",
    "A fresh process opens a file and loads one 8 MB tensor",
    (
        Contender("limit: numpy + preadv", None, script=_LIMIT),
        Contender("python alone", None, script="pass"),
        Contender("import numpy", None, script="import numpy"),
        Contender("import numpy, weighlock", None, script="import numpy, weighlock"),
        Contender(
            "import numpy, weighlock.open", None, script="import numpy, weighlock; weighlock.open"
        ),
        Contender(
            "safetensors with torch", None, needs=("safetensors", "torch"), script=_SAFETENSORS
        ),
        Contender("weighlock", None, script=_WEIGHLOCK),
    ),
    (Bar("weighlock", "safetensors with torch", 6.0),),
    extra_bars=(("import numpy, weighlock", "import numpy", 0.060),),
    limits={"weighlock": "limit: numpy + preadv"},
)
