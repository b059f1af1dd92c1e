"""Groups of a catalog as text in the metadata of a safetensors file, and back. Pure.

A tensor that is several entries together (sparse, quantised, nested) is the same after it was
converted, shared or pushed:

    "weighlock.groups": {"x": {"kind": "sparse_coo", "dtype": "F32", "shape": [3, 4],
                               "parts": {"indices": "x.indices", "values": "x.values"}}}
"""

from collections.abc import Container, Mapping

import msgspec

from weighlock.errors import FormatError
from weighlock.formats import strict_json
from weighlock.limits import Limits
from weighlock.tensors.groups import Group

__all__ = ["GROUPS_KEY", "read_groups", "written_groups"]

GROUPS_KEY = "weighlock.groups"
"""Where they are in the metadata."""


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    dtype: str
    shape: tuple[int | None, ...]
    parts: dict[str, str]


def written_groups(groups: Mapping[str, Group]) -> dict[str, str]:
    """What the metadata says of groups; nothing of those without data, which a file cannot hold."""
    told = {
        name: _Written(group.kind, group.dtype, group.shape, dict(group.parts))
        for name, group in groups.items()
        if group.parts
    }
    return {GROUPS_KEY: msgspec.json.encode(told).decode()} if told else {}


def read_groups(
    metadata: Mapping[str, str], names: Container[str], limits: Limits
) -> tuple[dict[str, Group], tuple[str, ...]]:
    """The groups that metadata names, and what to note of it.

    Text of this name that is something else does no harm: it is noted. A group that goes by the
    name of a tensor is no group. One of which a part is not there is kept: a catalog of several
    files may have it.
    """
    text = metadata.get(GROUPS_KEY)
    if text is None:
        return {}, ()
    try:
        found = strict_json.parse(text.encode(), source=GROUPS_KEY, tokens=8 * limits.tensors)
        groups = msgspec.convert(found, dict[str, _Written])
        if any(size is not None and size < 0 for g in groups.values() for size in g.shape):
            raise FormatError("a size is negative")
    except (FormatError, msgspec.ValidationError) as error:
        return {}, (f"its metadata names groups of tensors in a way that is not read: {error}",)
    return {
        name: Group(group.kind, group.dtype, group.shape, group.parts)
        for name, group in groups.items()
        if group.parts and name not in names
    }, ()
