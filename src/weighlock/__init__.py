"""Weighlock moves model weights between disk, network and memory, holding a few megabytes."""

import sys

if sys.platform == "win32":
    raise ImportError("weighlock runs on Linux and macOS; Windows is not supported (use WSL)")

from weighlock.errors import WeighlockError
from weighlock.formats.detect import open_catalog as open
from weighlock.formats.save import save
from weighlock.formats.writer import Writer
from weighlock.limits import Limits
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import TensorSpec

__all__ = [
    "Catalog",
    "DType",
    "Limits",
    "TensorRef",
    "TensorSpec",
    "WeighlockError",
    "Writer",
    "open",
    "save",
]
__version__ = "0.1.0"
