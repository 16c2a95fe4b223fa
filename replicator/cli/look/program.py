"""`replicator program`: a program of service nodes that runs, live in the terminal."""

import argparse
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

from replicator.cli.look.program_view import (
    HEADER,
    RIGHT,
    last_line,
    line_above,
    line_below,
    lines_of,
)
from replicator.cli.tables import live_display, make_console, print_table, show_table
from replicator.errors import ArgumentError, LaunchError
from replicator.launchpad_bridge.view.watching.found_runs import (
    FoundRun,
    matching,
    run_in,
    running_programs,
)
from replicator.launchpad_bridge.view.watching.samples import ProgramSample
from replicator.launchpad_bridge.view.watching.watcher import Watcher

SUMMARY = "Show a running program: its nodes, their states, calls and traffic"
_FAILED = 1
_LINES_AROUND = 8
_SHORT_S = 0.5
_EPILOG = """\
Looks at programs of this user on this host, which `lp.launch` started. On a terminal it
goes on until the program ends, or Ctrl-C, which ends the looking only; elsewhere, and
with --once, it prints the state, and ends. Exit code 1 if the program has failed, or
none runs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "program",
        nargs="?",
        metavar="PROGRAM",
        help="its name, the id of its run or the folder of that; needed if several run",
    )
    parser.add_argument(
        "--once", action="store_true", help="say how things are, and end"
    )
    parser.add_argument(
        "--json", action="store_true", help="say it as one line of JSON, with all edges"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: %(default)g)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Show it, once or until it ends.

    Raises:
      LaunchError: No program runs, or it has just ended.
      ArgumentError: Several do, and it is not clear which is meant.
    """
    if not 0.05 <= arguments.interval <= 3600:
        raise ArgumentError(
            "`--interval` must be 0.05 to 3600 seconds, got "
            f"{arguments.interval:g}. Use 1."
        )
    run = _chosen(arguments.program)
    link = f"\npage: {run.link}" if run.link else ""
    with Watcher(run.folder) as watcher:
        if arguments.json or arguments.once or not sys.stdout.isatty():
            snapshot = _once(watcher, min(arguments.interval, _SHORT_S))
            _print(snapshot, link, as_json=arguments.json)
        else:
            snapshot = _live(watcher, arguments.interval, link)
    return _FAILED if snapshot.failure else 0


def _chosen(words: str | None) -> FoundRun:
    """Return the program that is meant."""
    if words is not None and ("/" in words or Path(words).is_dir()):
        return run_in(Path(words))
    running = running_programs()
    meant = running if words is None else matching(running, words)
    if len(meant) == 1:
        return meant[0]
    if not running:
        raise LaunchError(
            "No program of this user runs on this host. `lp.launch(program)` starts "
            "one; if that had another TMPDIR, give the folder of the run."
        )
    _list(meant or running)
    asked = "nothing" if words is None else repr(words)
    found = f"and {len(meant)} of these run" if meant else "which is none of these"
    raise ArgumentError(
        f"`PROGRAM` must mean one of the programs that run, got {asked}, {found}. Give "
        "a name, the id of a run, or its folder."
    )


def _list(runs: list[FoundRun]) -> None:
    rows = [
        (
            run.program,
            run.run_id,
            str(run.pid),
            str(run.workers),
            datetime.fromtimestamp(run.started_s).isoformat(" ", "seconds"),
            str(run.folder),
        )
        for run in runs
    ]
    print_table(("program", "run", "process", "nodes", "since", "folder"), rows)


def _once(watcher: Watcher, interval_s: float) -> ProgramSample:
    """Look twice, so that there are rates."""
    watcher.sample()
    threading.Event().wait(interval_s)
    return watcher.sample()


def _print(snapshot: ProgramSample, link: str, *, as_json: bool) -> None:
    if as_json:
        print(snapshot.to_json())
        return
    console = make_console()
    console.print(
        line_above(snapshot) + link, soft_wrap=True, markup=False, highlight=False
    )
    print_table(HEADER, lines_of(snapshot), right=RIGHT)
    if below := line_below(snapshot):
        console.print(below, markup=False, highlight=False)


def _live(watcher: Watcher, interval_s: float, link: str) -> ProgramSample:
    """Show it until it ends."""
    snapshot = watcher.sample()
    try:
        with live_display() as live:
            while snapshot.phase != "ended":
                # Not after the end: the last numbers of the servers stay to be read.
                show_table(
                    live,
                    HEADER,
                    lines_of(snapshot, live.console.height - _LINES_AROUND),
                    above=line_above(snapshot) + link,
                    below=line_below(snapshot),
                    right=RIGHT,
                )
                _wait(watcher, interval_s)
                snapshot = watcher.sample()
    except KeyboardInterrupt:
        return snapshot
    print(last_line(snapshot))
    return snapshot


def _wait(watcher: Watcher, interval_s: float) -> None:
    """Wait for the next look, or for the end of the program, which is shown at once."""
    until_s = time.monotonic() + interval_s
    pause = threading.Event()
    while (left_s := until_s - time.monotonic()) > 0:
        if watcher.note().phase == "ended":
            return
        pause.wait(min(left_s, 0.1))
