"""Seconds in which slices compute, for the picture and the shares of an experiment."""

from replicator import controller


class Spans:
    """When slices computed since it was made, by their controller's timeline.

    Args:
      pw: The controller.
      slices: The slices, by their names in the picture; not on the same devices.
    """

    def __init__(self, pw: controller.Controller, **slices: controller.Slice) -> None:
        self._pw, self._slices = pw, slices
        self._zero = pw.timeline().until_s

    def now(self) -> float:
        """Return seconds since it was made."""
        return self._pw.timeline().until_s - self._zero

    @property
    def found(self) -> dict[str, list[tuple[float, float]]]:
        """(began, ended) of each op of the last 10,000, by the name of its slice."""
        spans = [s for s in self._pw.timeline().spans if s.begin_s >= self._zero]
        return {
            name: [
                (each.begin_s - self._zero, each.end_s - self._zero)
                for each in spans
                if each.island == on.island and set(each.places) <= set(on.places)
            ]
            for name, on in self._slices.items()
        }


def busy(found: dict[str, list[tuple[float, float]]], name: str, since: float) -> float:
    """Return the share of the seconds from `since` on that a slice computed.

    Args:
      found: Of `Spans`: from the first of these on, if that is later.
      name: Of the slice.
      since: In seconds.
    """
    every = [span for spans in found.values() for span in spans]
    since = max(since, min(began for began, _ in every))
    until = max(ended for _, ended in every)
    spent = (max(0.0, end - max(begin, since)) for begin, end in found[name])
    return sum(spent) / (until - since)
