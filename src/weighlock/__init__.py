"""Weighlock moves model weights between disk, network and memory, holding a few megabytes."""

import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("weighlock runs on Linux and macOS; Windows is not supported (use WSL)")

if TYPE_CHECKING:
    from weighlock.abort import Abort
    from weighlock.combining.incremental import Mean
    from weighlock.combining.kin import apply, difference, median, trimmed_mean
    from weighlock.combining.mean import mean
    from weighlock.disk.spool import Spool
    from weighlock.disk.sweep import SweepReport, sweep
    from weighlock.errors import WeighlockError
    from weighlock.fetching.fetch import fetch
    from weighlock.fetching.push import Pushed, push
    from weighlock.fetching.reporting import done
    from weighlock.fetching.resolve import resolve
    from weighlock.fetching.stream import stream
    from weighlock.formats.detect import open_catalog as open
    from weighlock.formats.save import save
    from weighlock.formats.writer import Writer
    from weighlock.limits import Limits
    from weighlock.messages.codecs import Registry, register, register_dataclass, register_enum
    from weighlock.messages.message import Draft, pack, unpack
    from weighlock.sharing.inbox import Inbox
    from weighlock.sharing.packing import Packed
    from weighlock.sharing.server import Server
    from weighlock.sharing.share import Outcome, Receiver, State
    from weighlock.sharing.shared import Share
    from weighlock.sources.access import Access, Credential
    from weighlock.sources.base import Source
    from weighlock.tensors.arrays import SlicedArray
    from weighlock.tensors.catalog import Catalog
    from weighlock.tensors.dtypes import DType
    from weighlock.tensors.groups import Group
    from weighlock.tensors.naming import LoadReport
    from weighlock.tensors.ref import TensorRef
    from weighlock.tensors.spec import TensorSpec

__all__ = [
    "Abort",
    "Access",
    "Catalog",
    "Credential",
    "DType",
    "Draft",
    "Group",
    "Inbox",
    "Limits",
    "LoadReport",
    "Mean",
    "Outcome",
    "Packed",
    "Pushed",
    "Receiver",
    "Registry",
    "Server",
    "Share",
    "SlicedArray",
    "Source",
    "Spool",
    "State",
    "SweepReport",
    "TensorRef",
    "TensorSpec",
    "WeighlockError",
    "Writer",
    "apply",
    "difference",
    "done",
    "fetch",
    "mean",
    "median",
    "open",
    "pack",
    "push",
    "register",
    "register_dataclass",
    "register_enum",
    "resolve",
    "save",
    "stream",
    "sweep",
    "trimmed_mean",
    "unpack",
]
__version__ = "0.1.0"

# Where each public name lives. A module is imported when its name is first used: who only opens a
# file does not wait for what writes one.
_HOMES = {
    "Abort": "weighlock.abort",
    "Access": "weighlock.sources.access",
    "Catalog": "weighlock.tensors.catalog",
    "Credential": "weighlock.sources.access",
    "DType": "weighlock.tensors.dtypes",
    "Draft": "weighlock.messages.message",
    "Group": "weighlock.tensors.groups",
    "Inbox": "weighlock.sharing.inbox",
    "Limits": "weighlock.limits",
    "LoadReport": "weighlock.tensors.naming",
    "Mean": "weighlock.combining.incremental",
    "Outcome": "weighlock.sharing.share",
    "Packed": "weighlock.sharing.packing",
    "Pushed": "weighlock.fetching.push",
    "Receiver": "weighlock.sharing.share",
    "Registry": "weighlock.messages.codecs",
    "Server": "weighlock.sharing.server",
    "Share": "weighlock.sharing.shared",
    "SlicedArray": "weighlock.tensors.arrays",
    "Source": "weighlock.sources.base",
    "Spool": "weighlock.disk.spool",
    "State": "weighlock.sharing.share",
    "SweepReport": "weighlock.disk.sweep",
    "TensorRef": "weighlock.tensors.ref",
    "TensorSpec": "weighlock.tensors.spec",
    "WeighlockError": "weighlock.errors",
    "Writer": "weighlock.formats.writer",
    "apply": "weighlock.combining.kin",
    "difference": "weighlock.combining.kin",
    "done": "weighlock.fetching.reporting",
    "fetch": "weighlock.fetching.fetch",
    "mean": "weighlock.combining.mean",
    "median": "weighlock.combining.kin",
    "open": "weighlock.formats.detect",
    "pack": "weighlock.messages.message",
    "push": "weighlock.fetching.push",
    "register": "weighlock.messages.codecs",
    "register_dataclass": "weighlock.messages.codecs",
    "register_enum": "weighlock.messages.codecs",
    "resolve": "weighlock.fetching.resolve",
    "save": "weighlock.formats.save",
    "stream": "weighlock.fetching.stream",
    "sweep": "weighlock.disk.sweep",
    "trimmed_mean": "weighlock.combining.kin",
    "unpack": "weighlock.messages.message",
}
_NAMES_THERE = {"open": "open_catalog"}

_MODULES = ("errors", "torch")
"""Modules that are named in full, as in `except weighlock.errors.ShareGone`."""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"weighlock.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weighlock' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
