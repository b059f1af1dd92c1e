"""The context manager of the house: who is entered is told once how its block ended."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Lifetime"]


class Lifetime(ABC):
    """Something whose life is a `with` block, or ends by its own methods."""

    __slots__ = ()

    @abstractmethod
    def _leave(self, error: BaseException | None) -> None:
        """The block is over; `error` is what ended it, if it did not end well."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(error)
