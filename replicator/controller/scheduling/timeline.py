"""What ran when, where and for whom.

An op begins when its devices and inputs are there: when the ops before it on its
devices ended, and those that made its inputs. That is known of no device by asking it,
so it is taken from the ends of all ops.
"""

import collections
import dataclasses
import json
import threading
from collections.abc import Sequence

from replicator.base.host.clock import Clock
from replicator.controller.scheduling.called_run import CalledRun
from replicator.controller.scheduling.planned import PlannedOp
from replicator.monitoring.drawing.spans import Span, spans_svg

_MOST = 10_000
_HOST_TRACK = 10_000
"""The track of a device's functions of the host comes so many behind its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpSpan:
    """An op that ran.

    Attributes:
      op: Its name.
      dataflow: Name of the function that called it.
      client: Name of the client whose it was.
      island: Where it ran.
      places: Numbers of its devices there.
      is_host: Whether it ran beside these: a function of `pw.host`.
      begin_s: When it began, in seconds since `pw` was opened.
      end_s: When it ended.
    """

    op: str
    dataflow: str
    client: str
    island: str
    places: tuple[int, ...]
    is_host: bool
    begin_s: float
    end_s: float


class Timeline:
    """The last ops that ran, from `pw.timeline()`.

    Attributes:
      spans: The ops, in the order in which they ended; at most 10,000.
      until_s: When it was asked for, in seconds since `pw` was opened.
    """

    def __init__(self, spans: Sequence[OpSpan], until_s: float) -> None:
        self.spans = spans
        self.until_s = until_s

    def to_perfetto(self) -> str:
        """Return JSON for https://ui.perfetto.dev: islands with tracks for devices."""
        islands = sorted({span.island for span in self.spans})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": n, "args": {"name": name}}
            for n, name in enumerate(islands)
        ]
        for span in self.spans:
            pid = islands.index(span.island)
            about = {"client": span.client, "dataflow": span.dataflow}
            events += [
                {
                    "ph": "X",
                    "name": span.op,
                    "cat": span.client,
                    "pid": pid,
                    "tid": place + _HOST_TRACK * span.is_host,
                    "ts": span.begin_s * 1e6,
                    "dur": (span.end_s - span.begin_s) * 1e6,
                    "args": about,
                }
                for place in span.places
            ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def to_svg(self) -> str:
        """Return a picture: a row for each device, a colour for each client."""
        spans = [
            Span(
                row=f"{span.island}:{place}{' host' * span.is_host}",
                begin_s=span.begin_s,
                end_s=span.end_s,
                name=span.op,
                kind=span.client,
            )
            for span in self.spans
            for place in span.places
        ]
        return spans_svg(spans)


class OpTimes:
    """Times of ops; any thread may call it.

    Args:
      clock: Tells the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._opened_s = clock.now_s()
        self._lock = threading.Lock()
        self._busy_s: dict[tuple[str, bool], dict[int, float]] = {}
        # Run and op by name, begin and end: what a span is made of, if it is asked for.
        self._ended: collections.deque[tuple[str, str, PlannedOp, float, float]]
        self._ended = collections.deque(maxlen=_MOST)

    def now_s(self) -> float:
        """Return seconds since it was made."""
        return self._clock.now_s() - self._opened_s

    def ended(
        self, run: CalledRun, op: PlannedOp, values: Sequence[int], age_s: float
    ) -> float:
        """Note that an op ended; return its seconds times its devices.

        Args:
          run: The run that it is of.
          op: The op.
          values: Numbers of its results.
          age_s: How long ago that was.
        """
        places = op.places
        with self._lock:
            busy_s = self._busy_s.setdefault((op.island, op.is_host), {})
            free_s = max([busy_s.get(place, 0.0) for place in places])
            # On one device ops end one after the other, whenever that is heard of.
            end_s = max(self.now_s() - age_s, free_s)
            begin_s = min(max(free_s, run.ready_s(op.inputs)), end_s)
            busy_s.update(dict.fromkeys(places, end_s))
            run.note(values, end_s)
            what = run.dataflow, run.client.name, op, begin_s, end_s
            self._ended.append(what)
        return 0.0 if op.is_host else (end_s - begin_s) * len(places)

    def timeline(self) -> Timeline:
        """Return what ended until now."""
        with self._lock:
            ended, until_s = list(self._ended), self.now_s()
        return Timeline([_span(*each) for each in ended], until_s)


def _span(
    dataflow: str, client: str, op: PlannedOp, begin_s: float, end_s: float
) -> OpSpan:
    return OpSpan(
        op=op.name,
        dataflow=dataflow,
        client=client,
        island=op.island,
        places=op.places,
        is_host=op.is_host,
        begin_s=begin_s,
        end_s=end_s,
    )
