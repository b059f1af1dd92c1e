"""What a file of weights holds beside its tensors. Knows names and values; reads nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weighlock.tensors.groups import Group

if TYPE_CHECKING:
    from weighlock.tensors.catalog import Catalog

__all__ = ["Beside"]


@dataclass(frozen=True, slots=True)
class Beside:
    """What a file holds beside tensors and metadata; the properties of `Catalog` tell."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[Any, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    globals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    check: Callable[[Callable[[int], None]], None] | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    has_named_parts: bool = False
    """What parts of a group are called, the file itself says; else they are named in reading."""
    has_all_groups: bool = False
    """Those of the files of a sharded model are among them, under the names they have now."""

    def with_shards(self, shards: "Mapping[str, Catalog]") -> "Beside":
        """This and what the files of a sharded model hold, told apart by the names of the files."""
        extras, notes = dict(self.extras), list(self.notes)
        unreadable, named = dict(self.unreadable), dict(self.globals)
        groups = dict(self.groups)
        for file, shard in shards.items():
            if shard.extras:
                extras[file] = shard.extras
            notes += [f"{file}: {note}" for note in shard.notes]
            unreadable.update(shard.unreadable)
            here = {} if self.has_all_groups else shard._beside.groups
            for name, group in here.items():
                if shard._beside.has_named_parts or not group.parts:
                    groups[name] = group  # of which parts may lie in other files
                else:  # an index names the whole, and no name leads to its parts
                    unreadable[name] = f"{group}: open {file} by itself"
            named = {**shard.globals, **named}  # a place is that in the first file
        return Beside(self.aliases, extras, tuple(notes), unreadable, named, self.check, groups)
