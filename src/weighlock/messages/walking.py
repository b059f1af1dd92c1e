"""A walk through an object to the refs in it. Knows what objects are made of; reads nothing."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from weighlock.errors import LimitExceeded
from weighlock.limits import Limits
from weighlock.messages.codecs import Registry
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef

__all__ = ["replace_refs"]


def replace_refs(
    obj: object,
    change: Callable[[TensorRef], object],
    registry: Registry,
    limits: Limits,
    change_in_catalog: Callable[[TensorRef], TensorRef] | None = None,
) -> object:
    """The object with something in place of its refs. What holds none stays the same object.

    Args:
        obj: dicts, lists, tuples, catalogs and registered objects are looked into.
        change: gives what stands for a ref; the ref itself, if it stays.
        registry: the types that are looked into.
        limits: how deep.
        change_in_catalog: as `change`, for refs of catalogs, which hold refs only.

    Raises:
        LimitExceeded: it is nested too deep, or without end.
    """
    return _Walk(change, change_in_catalog, registry, limits).of(obj, 0)


class _Walk:
    def __init__(
        self,
        change: Callable[[TensorRef], object],
        change_in_catalog: Callable[[TensorRef], TensorRef] | None,
        registry: Registry,
        limits: Limits,
    ) -> None:
        self._change = change
        self._change_in_catalog = change_in_catalog
        self._registry = registry
        self._most = limits.message_depth

    def of(self, value: Any, depth: int) -> Any:
        if depth > self._most:
            raise LimitExceeded(
                f"the object is nested deeper than {self._most} levels, or holds itself",
                limit="message_depth",
                asked=depth,
                allowed=self._most,
            )
        kind = type(value)
        if isinstance(value, TensorRef):
            return self._change(value)
        if kind is dict or kind is OrderedDict:
            found = {key: self.of(child, depth + 1) for key, child in value.items()}
            return found if any(found[key] is not value[key] for key in found) else value
        if kind is list or kind is tuple:
            items = [self.of(child, depth + 1) for child in value]
            is_same = all(new is old for new, old in zip(items, value, strict=True))
            return value if is_same else kind(items)
        if isinstance(value, Catalog):
            return self._catalog(value)
        codec = self._registry.of_type(kind)
        if codec is not None:
            plain = codec.encode(value)
            changed = self.of(plain, depth + 1)
            return value if changed is plain else codec.decode(changed)
        return value

    def _catalog(self, catalog: Catalog) -> Catalog:
        if self._change_in_catalog is None:
            for ref in catalog.values():
                self._change(ref)
            return catalog
        return catalog.map(self._change_in_catalog)
