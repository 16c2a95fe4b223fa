"""Show the progress of a run: a bar on a terminal, lines anywhere else."""

import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from replicator.base.host.standard_streams import lossy
from replicator.monitoring.progress import ProgressNumbers

_log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows the progress of a run to people."""

    @property
    def interval_s(self) -> float:
        """Seconds between two updates that make sense here."""
        ...

    def show(self, numbers: ProgressNumbers, scalars: Mapping[str, float]) -> None:
        """Show the newest numbers."""

    def note(self, text: str) -> None:
        """Show a text once, on a line of its own that stays."""

    def close(self) -> None:
        """Restore the stream."""


def make_display(stream: TextIO | None = None) -> Display:
    """Return the display that fits `stream`, standard error by default.

    A terminal gets a bar, without colours where `NO_COLOR` is set. Everything else,
    also a terminal that calls itself dumb, or has a bar of another run, gets lines.
    """
    place = lossy(sys.stderr if stream is None else stream)
    with _LOCK:
        if place.isatty() and os.environ.get("TERM") != "dumb" and not len(_BARS):
            _BARS.add(bar := TerminalDisplay(place))
            return bar
    return LineDisplay(place)


def _while_it_lasts(method: Callable[..., None]) -> Callable[..., None]:
    """Make a display show nothing more once its stream is gone; the run goes on."""

    @functools.wraps(method)
    def show(self: Any, *args: Any) -> None:
        try:
            if not self.is_gone:
                method(self, *args)
        except (
            OSError,
            ValueError,
        ) as failure:  # a broken pipe; a closed file
            self.is_gone = True
            # The log may go the same way.
            with contextlib.suppress(OSError, ValueError):
                _log.warning("Progress is shown no more: %s", failure)

    return show


class LineDisplay:
    """Print a line for each update.

    Args:
      stream: Stream to print to.
      interval_s: Seconds between lines.
    """

    def __init__(self, stream: TextIO, *, interval_s: float = 5.0):
        self._stream = stream
        self.interval_s = interval_s
        self.is_gone = False

    @_while_it_lasts
    def show(self, numbers: ProgressNumbers, scalars: Mapping[str, float]) -> None:
        """Print one line."""
        print(f"{counted(numbers)}  {summary(numbers, scalars)}", file=self._stream)
        self._stream.flush()

    @_while_it_lasts
    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: lines stay."""


class TerminalDisplay:
    """Keep one line with a bar at the bottom of a terminal.

    Args:
      stream: A terminal.
      interval_s: Seconds between updates. Nothing moves between them: no thread draws.
    """

    def __init__(self, stream: TextIO, *, interval_s: float = 0.25):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        numbers_column = Column(no_wrap=True, overflow="ellipsis")
        self.interval_s = interval_s
        self.is_gone = False
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._bar = Progress(
            TextColumn("{task.fields[counted]}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False, table_column=numbers_column),
            console=Console(file=stream),
            auto_refresh=False,
            redirect_stdout=_is_terminal(sys.stdout),
        )
        self._task = self._bar.add_task("", total=None, counted="")

    @_while_it_lasts
    def show(self, numbers: ProgressNumbers, scalars: Mapping[str, float]) -> None:
        """Redraw the line."""
        if not self._bar.live.is_started:
            self._bar.start()
            # Now `sys.stderr` writes above the bar; loggers have the one before.
            self._moved = [
                (each, each.setStream(sys.stderr))
                for each in _on_terminals()
                if each.stream is not sys.stderr
            ]
        self._bar.update(
            self._task,
            total=numbers.steps,
            completed=numbers.step,
            counted=counted(numbers),
            description=summary(numbers, scalars),
            refresh=True,
        )

    @_while_it_lasts
    def note(self, text: str) -> None:
        """Print it above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """End the line, which stays, and show the cursor again."""
        _BARS.discard(self)
        # Also on a stream without a reader: streams that were replaced are restored.
        with contextlib.suppress(OSError, ValueError):
            self._bar.stop()
        moved, self._moved = self._moved, []
        for handler, stream in moved:
            with contextlib.suppress(OSError, ValueError):
                handler.setStream(stream)


# Open bars: two, of runs in two threads, would draw over each other, and each redirect
# the stream that the other restores. Weak: a run may fail before it closes its own.
_BARS: "weakref.WeakSet[TerminalDisplay]" = weakref.WeakSet()
_LOCK = threading.Lock()  # guards `_BARS` while a display is made


def _on_terminals() -> list[Any]:
    """List the handlers of all loggers that write to a terminal."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [each for logger in loggers for each in getattr(logger, "handlers", ())]
    inner = {getattr(each, "python_handler", each) for each in handlers}  # of absl's
    return [each for each in inner if _is_terminal(getattr(each, "stream", None))]


def _is_terminal(stream: Any) -> bool:
    return hasattr(stream, "isatty") and not stream.closed and stream.isatty()


def counted(numbers: ProgressNumbers) -> str:
    """Write the step of a run.

    >>> counted(ProgressNumbers(step=100, steps=1000, time_s=0.0))
    'step 100/1000'
    """
    return f"step {numbers.step}" + (f"/{numbers.steps}" if numbers.steps else "")


def summary(numbers: ProgressNumbers, scalars: Mapping[str, float]) -> str:
    """Write metrics, rates and time left.

    >>> numbers = ProgressNumbers(step=9, steps=99, time_s=0.0, steps_per_s=9.4,
    ...                           examples_per_s=300.0, eta_s=96.0)
    >>> summary(numbers, {"loss": 0.31})
    'loss 0.31  300 examples/s  9.4 steps/s  ETA 1m36s'
    """
    loss_first = sorted(scalars, key=lambda name: name != "loss")
    parts = [f"{name} {scalars[name]:.4g}" for name in loss_first]
    if numbers.steps_per_s is None:
        parts.append(f"compiled in {_duration(numbers.compile_s)}")
    else:
        parts.append(f"{_rate(numbers.examples_per_s or 0.0)} examples/s")
        parts.append(f"{_rate(numbers.steps_per_s)} steps/s")
    if numbers.eta_s is not None:
        parts.append(f"ETA {_duration(numbers.eta_s)}")
    if numbers.input_stall_share is not None:
        parts.append(f"input {100 * numbers.input_stall_share:.0f} %")
    return "  ".join(parts)


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
