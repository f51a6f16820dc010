"""A source of batches that tells when it is asked for the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Announced"]

_Batch = TypeVar("_Batch")


class Announced(Generic[_Batch]):
    """The same batches, as often as one iterates over it; its attributes are the source's."""

    def __init__(self, source: Iterable[_Batch], tell: Callable[[], None]) -> None:
        self._source, self._tell = source, tell

    def __iter__(self) -> Iterator[_Batch]:
        self._tell()
        batches = iter(self._source)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            self._tell()

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made there is no source yet
            raise AttributeError(name)
        return getattr(self._source, name)
