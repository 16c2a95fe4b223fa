"""What nodes returned, by worker; one that could not be sent says so when asked for."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import final

from replicator.base.types import PyTree
from replicator.errors import EncodeError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unsendable:
    """In place of a result that cannot travel: of a node that has done its work.

    Attributes:
      reason: What in it cannot, and why.
    """

    reason: str


@final
class Results(Mapping[str, PyTree]):
    """The results of a run's workers, by name."""

    def __init__(self, found: Mapping[str, PyTree]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> PyTree:
        """Return what a worker returned.

        Raises:
          KeyError: It has not returned, or there is no such worker.
          EncodeError: What it returned could not be sent; says why.
        """
        value = self._found[name]
        if isinstance(value, Unsendable):
            raise EncodeError(
                f"`{name}` must return what can be sent, got a result of which "
                f"{value.reason}"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Results({self._found!r})"
