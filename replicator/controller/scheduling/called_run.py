"""A run as it was called, until all of its ops ended."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicator.controller.future import ClientRecord, Pending
from replicator.controller.islands.protocol import Key
from replicator.controller.scheduling.planned import Plan


@dataclasses.dataclass(kw_only=True, eq=False)
class CalledRun:
    """A run of a dataflow.

    Attributes:
      dataflow: Name of its function.
      client: Whose it is.
      plan: What islands do for it.
      keys: Keys of values of earlier runs, by their number in it.
      values: Arrays of the host, likewise; none once it is sent.
      results: What it computes, by number.
      taken: Results of earlier runs, by their number in it.
      sent_s: When it was sent.
      made_s: When its values were computed, by number.
    """

    dataflow: str
    client: ClientRecord
    plan: Plan
    keys: Mapping[int, Key]
    values: Mapping[int, Any]
    results: Mapping[int, Pending]
    taken: Mapping[int, Pending]
    sent_s: float = 0.0
    made_s: dict[int, float] = dataclasses.field(default_factory=dict)

    def ready_s(self, values: Sequence[int]) -> float:
        """Return when the last of some values was computed."""
        latest_s, taken, own = self.sent_s, self.taken, self.made_s
        for each in values:
            made_s = taken[each].made_s if each in taken else own.get(each, 0.0)
            latest_s = max(latest_s, made_s)
        return latest_s

    def note(self, values: Sequence[int], end_s: float) -> None:
        """Note when values were computed."""
        for value in values:
            self.made_s[value] = end_s
            if value in self.results:
                self.results[value].made_s = end_s
