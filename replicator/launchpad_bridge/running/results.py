"""Results of nodes, by worker; reading one that could not be sent raises."""

import dataclasses
from collections.abc import Iterator, Mapping

from replicator.base.types import PyTree
from replicator.errors import EncodeError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unsendable:
    """Replaces a result that cannot be sent, of a node that has done its work.

    Attributes:
      reason: Part of it that cannot be sent, and why.
    """

    reason: str


class Results(Mapping[str, PyTree]):
    """The results of a run's workers, by name."""

    def __init__(self, found: Mapping[str, PyTree]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> PyTree:
        """Return the result of a worker.

        Raises:
          KeyError: It has not returned, or there is no such worker.
          EncodeError: Its result could not be sent; gives the reason.
        """
        value = self._found[name]
        if isinstance(value, Unsendable):
            raise EncodeError(
                f"`{name}` must return a value that can be sent, got a result of which "
                f"{value.reason}"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Results({self._found!r})"
