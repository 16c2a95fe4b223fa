"""Watch a run from a thread; when it hangs, print all stacks and end it.

The thread checks at least once a second, decides by `watch`, and learns about the other
processes from `heartbeats`. If one process exceeds a limit, all of them write their
stacks and exit with code 76, so that their launcher can start all again. Two things may
block the thread itself, and `faulthandler`'s timer in C covers both: code that holds
the interpreter's lock, and a disk that hangs while the stacks are written.
"""

import dataclasses
import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from replicator.base.host.standard_streams import flush_output, say_raw
from replicator.distributed.notices import Notices
from replicator.exit_codes import HUNG
from replicator.monitoring.phases import Phases
from replicator.training.watchdog.hang_report import Statement, format_hang_report
from replicator.training.watchdog.heartbeats import Heartbeats
from replicator.training.watchdog.limits import Limits
from replicator.training.watchdog.peers import Beat, Straggler
from replicator.training.watchdog.stacks import (
    also_in_user_code,
    format_stacks,
    runs_callback,
    save_stacks,
    waits_in_debugger,
    where_is,
)
from replicator.training.watchdog.watch import Seen, WatchState, decide, nears_limit

STACKS_FOLDER = "stacks"
_ANSWER_S = 10.0  # wait for the reports of the others
_LEAVE_S = 5.0  # process 0 stays so long: its end would cut off the others
_WRITE_S = 60.0  # then C code ends a process that hangs while it writes its stacks
_STDERR = 2
_log = logging.getLogger(__name__)

Log = Callable[..., None]
"""`log(kind, **fields)`: for example `EventLog.write`."""


class Watchdog:
    """Watches from `start`, or entering, until `close`.

    Start it in the thread that runs the loop, whose line is reported first.

    Args:
      phases: Current phase of the run.
      limits: Longest time of each phase.
      directory: Directory of the run; stacks go into `stacks/<process>-<step>.txt`
        there. None writes them to standard error only.
      notices: Notices of all processes; None watches this one alone.
      log: Called for the events `hung` and `straggler`.
      exit_process: Ends the process at once.
      fail: Called with the report instead of ending the process, if the run is in a
        node of a program that shares the process with others.
    """

    def __init__(
        self,
        phases: Phases,
        *,
        limits: Limits | None = None,
        directory: str | os.PathLike[str] | None = None,
        notices: Notices | None = None,
        log: Log | None = None,
        exit_process: Callable[[int], Any] = os._exit,
        fail: Callable[[str], Any] | None = None,
    ) -> None:
        self._phases = phases
        self._limits = limits or Limits()
        self._directory = None if directory is None else Path(directory)
        self._process = 0 if notices is None else notices.process
        self._log = log or _drop
        self._exit_process = exit_process
        self._fail = fail
        # Three threads, no lock: each attribute has one writer, and is replaced whole.
        # The watchdog's thread writes `_fails`, once, before it calls `fail`; `close`,
        # in the loop's thread, reads it.
        self._fails = False
        # Written by the watchdog's thread; read by `_beat`, in that of the heartbeats.
        self._state = WatchState()
        self._loop_thread = 0  # written before the threads start
        self._armed = False  # of the watchdog's thread alone
        self._closed = threading.Event()
        # A daemon: it must not keep a process whose main thread ends alive.
        self._thread = threading.Thread(
            target=self._run, name="replicator-watchdog", daemon=True
        )
        self._heartbeats = None
        if notices is not None and notices.count > 1:
            self._heartbeats = Heartbeats(
                notices,
                clock=phases.clock,
                beat=self._beat,
                every_s=self._limits.tick_s,
                on_straggler=self._report_straggler,
            )

    def start(self) -> Self:
        """Begin to watch the calling thread."""
        self._loop_thread = threading.get_ident()
        if self._heartbeats is not None:
            self._heartbeats.start()
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching; closing twice is fine."""
        self._closed.set()
        if self._thread.ident is not None and not self._fails:
            # A thread in `_end` does not return: within this time the process ends.
            self._thread.join(timeout=_WRITE_S)
        if self._heartbeats is not None:
            self._heartbeats.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._limits.tick_s):
                self._arm(self._limits.interpreter_s)
                if (limit_s := self._look()) is not None or self._others_hang():
                    self._end(limit_s)
                    return
        finally:
            if self._armed:  # else the timer is the user's own, if there is one
                faulthandler.cancel_dump_traceback_later()

    def _arm(self, seconds: float) -> None:
        """Have C code write all stacks and exit in `seconds`, unless armed again.

        Python has one such timer: a timer of the user is replaced.
        """
        if seconds < threading.TIMEOUT_MAX:
            self._armed = True
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)

    def _look(self) -> float | None:
        """Return the limit that is exceeded, if one is."""
        seen = Seen(
            now_s=self._phases.clock.now_s(),
            current=self._phases.current,
            steps_s=self._phases.seconds()["step"],
            in_debugger=waits_in_debugger(self._loop_thread),
            peers=() if self._heartbeats is None else self._heartbeats.status.peers,
        )
        self._state, limit_s = decide(self._state, seen, limits=self._limits)
        if self._heartbeats is not None:
            self._heartbeats.wants_peers = nears_limit(self._state, self._limits)
        return limit_s

    def _others_hang(self) -> bool:
        return self._heartbeats is not None and any(self._heartbeats.status.hung)

    def _end(self, limit_s: float | None) -> None:
        """Report the hang, and exit, also after an error on the way."""
        # First: each step below may hang, on a disk, a lock or the service.
        self._arm(_WRITE_S)
        text = "The run makes no progress, and could not report where it is."
        try:
            own = self._make_statement(limit_s)
            statements = self._collect(own)
            text = format_hang_report(
                statements, silent_s=_ANSWER_S, of_node=self._fail is not None
            )
            say_raw(f"{text}\n")
            self._log("hung", step=own.step, phase=own.phase, report=text)
            self._leave_last()
        finally:
            _flush_output()
            if self._fail is None:
                self._exit_process(HUNG)
            else:
                # Other nodes go on in this process: the timer in C must not end it. The
                # node's thread may call `close` now, which must not wait for this one.
                faulthandler.cancel_dump_traceback_later()
                self._fails = True
                # `close` sets `_closed`, then reads `_fails`: it does not wait for this
                # thread, or the run has ended meanwhile, and there is nothing to fail.
                if not self._closed.is_set():
                    self._fail(text)

    def _make_statement(self, limit_s: float | None) -> Statement:
        current, where = self._phases.current, where_is(self._loop_thread)
        stacks = format_stacks(first=self._loop_thread)
        say_raw(f"replicator: stacks of process {self._process}\n{stacks}\n")
        return Statement(
            phase=current.phase,
            step=current.step,
            seconds=self._state.counted_s,
            limit_s=limit_s,
            where=where,
            also=also_in_user_code(self._loop_thread),
            stacks=self._save(stacks, current.step),
            in_callback=runs_callback(),
        )

    def _save(self, stacks: str, step: int) -> str | None:
        if self._directory is None:
            return None
        path = self._directory / STACKS_FOLDER / f"{self._process}-{step}.txt"
        try:
            save_stacks(stacks, path)
        except OSError as failure:
            text = f"the stacks could not be written to {path}: {failure}"
            say_raw(f"replicator: {text}\n")
            return None
        return str(path)

    def _collect(self, own: Statement) -> list[Statement | None]:
        if self._heartbeats is None:
            return [own]
        heartbeats = self._heartbeats
        heartbeats.publish("hung", dataclasses.asdict(own))
        self._wait_until(
            lambda: bool(heartbeats.status.hung) and None not in heartbeats.status.hung,
            _ANSWER_S,
        )
        statements = [each and Statement(**each) for each in heartbeats.status.hung]
        statements += [None] * (self._process + 1 - len(statements))
        statements[self._process] = own
        return statements

    def _leave_last(self) -> None:
        """Announce the exit. Process 0 hosts the service of all, so it leaves last."""
        if self._heartbeats is None:
            return
        heartbeats = self._heartbeats
        heartbeats.publish("left", True)
        if self._process == 0:
            self._wait_until(lambda: heartbeats.status.left.count(False) == 0, _LEAVE_S)
        else:
            self._wait_until(
                lambda: (
                    self._process < len(heartbeats.status.left)
                    and heartbeats.status.left[self._process]
                ),
                _LEAVE_S,
            )

    def _wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        assert self._heartbeats is not None
        clock = self._phases.clock
        deadline_s, pause = clock.now_s() + limit_s, threading.Event()
        while not condition() and clock.now_s() < deadline_s:
            self._heartbeats.hurry()
            pause.wait(self._limits.tick_s / 10)

    def _beat(self, count: int) -> Beat:
        current, seconds = self._phases.current, self._phases.seconds()
        return Beat(
            count=count,
            phase=current.phase,
            step=current.step,
            seconds=self._state.counted_s,
            own_s=seconds["input"] + seconds["report"],
        )

    def _report_straggler(self, straggler: Straggler) -> None:
        _log.warning(
            "Process %d is a straggler: it takes %.1f ms a step on its own, for input "
            "and on the host; the median is %.1f ms.",
            straggler.rank,
            straggler.own_s * 1e3,
            straggler.median_s * 1e3,
        )
        self._log(
            "straggler",
            step=self._phases.current.step,
            rank=straggler.rank,
            own_s=straggler.own_s,
            median_s=straggler.median_s,
        )


def _flush_output() -> None:
    """Flush the program's output; a thread, as the hung code may hold its lock."""
    # If it blocks it is left behind: the process exits right after.
    thread = threading.Thread(target=flush_output, daemon=True)
    thread.start()
    thread.join(timeout=1.0)


def _drop(kind: str, /, **fields: Any) -> None:
    del kind, fields
