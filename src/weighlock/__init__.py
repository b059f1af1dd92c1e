"""Weighlock moves model weights between disk, network and memory, holding a few megabytes."""

import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("weighlock runs on Linux and macOS; Windows is not supported (use WSL)")

if TYPE_CHECKING:
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

# Where each public name lives. A module is imported when its name is first used: who only opens a
# file does not wait for what writes one.
_HOMES = {
    "Catalog": "weighlock.tensors.catalog",
    "DType": "weighlock.tensors.dtypes",
    "Limits": "weighlock.limits",
    "TensorRef": "weighlock.tensors.ref",
    "TensorSpec": "weighlock.tensors.spec",
    "WeighlockError": "weighlock.errors",
    "Writer": "weighlock.formats.writer",
    "open": "weighlock.formats.detect",
    "save": "weighlock.formats.save",
}
_NAMES_THERE = {"open": "open_catalog"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weighlock' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
