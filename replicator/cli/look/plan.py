"""`replicator plan`: what a step needs on devices that need not be there."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from replicator.base.host.paths import expanded, write_whole
from replicator.base.out_of_memory import readable
from replicator.cli.look.plan_plot import plot_of
from replicator.engine.program_cost import engineering
from replicator.errors import ArgumentError, check_count, check_positive
from replicator.replicator import Replicator
from replicator.strategies.machine import Machine
from replicator.strategies.table import aligned
from replicator.tuning.choosing.choice import reason_of
from replicator.tuning.choosing.topology_choice import TopologyChoice
from replicator.tuning.named import named_strategies
from replicator.tuning.plan import (
    Planner,
    PlanOptions,
    PlanRow,
    advice,
    best_of,
    efficiencies,
    nearest_of,
)
from replicator.tuning.problem import ProblemFile
from replicator.tuning.rehearsal import Rehearsal
from replicator.tuning.rehearse import RehearsalOrder, rehearse

SUMMARY = "Forecast memory and speed of a step on devices that need not be there"
_NOTHING_FITS = _DIFFERS = 1
_HEADER = (
    *("topology", "strategy", "fits", "GiB", "of", "s a step", "examples/s"),
    *("efficiency", "sent by a device"),
)
_NUMBERS = (3, 4, 5, 6, 7)
_EPILOG = """\
FUNCTION is `problem(rep)` and returns step_fn, init_fn and a batch of
`jax.ShapeDtypeStruct`s; it reads no data. TPUs need libtpu, which compiles the real
step: pip install 'jax-replicator[tpu]'. For GPUs, or without libtpu, it is traced, and
the rest is a forecast. GiB are those of a device. Seconds are a range: all that is sent
hides behind the work, or nothing does; the other numbers are for the latter. Exit code
1 if nothing fits, or if a rehearsal is not as one device.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "problem", metavar="FILE:FUNCTION", help="such as train.py:problem"
    )
    parser.add_argument(
        "--topology",
        required=True,
        metavar="NAME,...",
        help="such as v5e:16x16 (chips), v5p:4x4x4,8x8x8, or h100:4x8 (hosts, GPUs)",
    )
    parser.add_argument(
        "--strategy",
        default="auto",
        metavar="NAME,...",
        help="builders, such as fsdp,hybrid(shard=8); auto to choose one (default)",
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="K",
        help="microbatches of an update (default: %(default)s)",
    )
    parser.add_argument(
        "--forecast", action="store_true", help="compile nothing: seconds, not minutes"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="make two updates at small sizes, problem(rep, small=True), on as many "
        "faked devices, and compare them with those of one",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="that one compilation, or rehearsal, may take (default: %(default)g)",
    )
    parser.add_argument(
        "--json", type=expanded, metavar="FILE", help="write all numbers there"
    )
    parser.add_argument(
        "--plot", type=expanded, metavar="FILE", help="write a picture there (SVG)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Compile or forecast, one after the other; print the table, and what to change.

    Returns:
      1 if it is known that nothing fits, or a rehearsal is not as one device.

    Raises:
      ArgumentError: An argument breaks its rule, or the problem is none.
    """
    check_count("--accumulate", arguments.accumulate)
    check_positive("--limit", arguments.limit, "Use 3600.")
    for file in (arguments.json, arguments.plot):
        if file is not None:  # before hours of compiling
            _check_place(file)
    problem = ProblemFile.from_text(arguments.problem)
    topologies = topologies_of(arguments.topology)
    options = PlanOptions(
        accumulate=arguments.accumulate,
        compiles=not arguments.forecast,
        rehearses=arguments.rehearse,
        limit_s=arguments.limit,
    )
    planner = Planner(problem, Replicator, options)
    choices: list[TopologyChoice] = []
    if arguments.strategy == "auto":
        choices = [TopologyChoice(planner, each) for each in topologies]
        found = itertools.chain.from_iterable(each.rows() for each in choices)
    else:
        found = planner.rows(topologies, named_strategies(arguments.strategy))
    rows, rehearsed = [], []
    for row in found:
        rows.append(row)
        outcome = row.outcome
        _note(f"{row.topology} {row.strategy}: {outcome.status}", outcome.seconds)
        if arguments.rehearse:
            rehearsed.append(_rehearsed(problem, row, limit_s=arguments.limit))
            _note(f"rehearsed: {rehearsed[-1].status}", rehearsed[-1].seconds)
        _write(arguments.json, rows, rehearsed, choices)
    _write(arguments.json, rows, rehearsed, choices)
    chosen = {each.topology: each.choice.chosen.name for each in choices if each.choice}
    if rows:
        cells = table_rows(rows, chosen)
        print(*aligned([_HEADER, *cells], numbers=_NUMBERS), sep="\n")
        print(*notes_of(rows), sep="\n")
    for each in choices:
        print(*choice_lines(each), sep="\n")
    for row, each in zip(rows, rehearsed, strict=False):
        print(f"{row.topology} {row.strategy}, {each}")
    if arguments.plot is not None:
        arguments.plot.write_text(plot_of(rows))
    if any(each.status == "differs" for each in rehearsed):
        return _DIFFERS
    fits = chosen if choices else any(row.fits is not False for row in rows)
    return 0 if fits else _NOTHING_FITS


def _check_place(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.is_file():
        raise ArgumentError(
            f"`--json` and `--plot` must name files, got {file}, which is another "
            "thing. Name a file that is not there yet."
        )


def _note(text: str, seconds: float) -> None:
    print(f"{text} ({seconds:g} s)", file=sys.stderr)


def _rehearsed(problem: ProblemFile, row: PlanRow, *, limit_s: float) -> Rehearsal:
    order = RehearsalOrder(
        problem=problem,
        make_replicator=Replicator,
        strategy=row.placed,
        devices=row.num_devices,
    )
    return rehearse(order, limit_s=limit_s)


def _write(
    file: Path | None,
    rows: Sequence[PlanRow],
    rehearsed: Sequence[Rehearsal],
    choices: Sequence[TopologyChoice],
) -> None:
    """Write what is known so far."""
    if file is None:
        return
    plain = [row.as_json() for row in rows]
    for each, found in zip(plain, rehearsed, strict=False):
        each["rehearsal"] = dataclasses.asdict(found)
    plain += [
        {"topology": each.topology, "choice": each.choice.as_json()}
        for each in choices
        if each.choice is not None
    ]
    write_whole(file, json.dumps(plain, indent=1) + "\n")


def topologies_of(text: str) -> list[str]:
    """Return the topologies of a list; those without a name have the last one's.

    Raises:
      ArgumentError: There is none of such a name; the error names those that there are.

    >>> topologies_of("v5p:4x4x4,8x8x8")
    ['v5p:4x4x4', 'v5p:8x8x8']
    """
    found, name = [], ""
    for part in text.replace(" ", "").split(","):
        first, colon, shape = part.partition(":")
        name, shape = (first, shape) if colon else (name, first)
        found.append(f"{name}:{shape}")
        Machine.from_topology(found[-1])
    return found


def table_rows(
    rows: Sequence[PlanRow], chosen: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[str, ...]]:
    """Return the cells of each row; the best by the model has a star.

    Args:
      rows: The rows.
      chosen: By topology the strategy that was chosen, where one was.
    """
    best = {
        row.topology: best_of([each for each in rows if each.topology == row.topology])
        for row in rows
    }
    starred = {
        topology: row.strategy for topology, row in best.items() if row is not None
    } | dict(chosen)
    return [
        (
            row.topology,
            row.strategy + " *" * (row.strategy == starred.get(row.topology)),
            _fits(row),
            _gib(_needed(row)),
            _gib(row.limit_bytes),
            _seconds(row),
            _number(row.examples_per_s),
            "" if share is None else f"{share:.3f}",
            ", ".join(
                f"{axes} {engineering(sent)}B" for axes, sent in row.sent_bytes.items()
            ),
        )
        for row, share in zip(rows, efficiencies(rows), strict=True)
    ]


def notes_of(rows: Sequence[PlanRow]) -> list[str]:
    """Return lines below the table: reasons, what to change, and what is a forecast."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.fits is False:
            others = [each for each in rows if each.topology == row.topology]
            reason = f"too large: {advice(row, others)}."
        elif row.outcome.reason:
            reason = f"{row.outcome.status}: {row.outcome.reason}"
        else:
            continue
        reasons.setdefault(reason, []).append(f"{row.topology} {row.strategy}")
    notes = [f"{'; '.join(names)} {reason}" for reason, names in reasons.items()]
    if any(row.outcome.status == "forecast" for row in rows):
        notes.append(
            "Not compiled: a forecast from the traced step and the strategy's table. "
            "GiB are those of the state; activations come on top of it."
        )
    if rows and all(row.fits is False for row in rows):
        nearest = nearest_of(rows)
        assert nearest is not None, "each of them lacks memory"
        missing = readable(round(nearest.excess_bytes or 0))
        notes.append(
            f"Nothing fits. The nearest is {nearest.strategy} on {nearest.topology}, "
            f"which lacks {missing} of each device."
        )
    else:
        notes.append("* the fastest by the cost model of those that may fit.")
    return [*_work_of(rows), *notes]


def choice_lines(found: TopologyChoice) -> list[str]:
    """Return a line on what was chosen, or why nothing was; then why not the others.

    Args:
      found: The choice for a topology.
    """
    if found.choice is None:
        return [f"{found.topology}: {found.refusal}"]
    choice, reasons = found.choice, {}
    for each in choice.candidates:
        if each is not choice.chosen:
            is_slower = each.status == "compiled"
            why = "slower by the model" if is_slower else reason_of(each)
            reasons.setdefault(why, []).append(each.name)
    return [
        f"{found.topology}: {choice.summary}",
        *(f"  {', '.join(names)}: {reason}" for reason, names in reasons.items()),
    ]


def _work_of(rows: Sequence[PlanRow]) -> list[str]:
    work = {(row.outcome.examples, row.outcome.flops) for row in rows}
    return [
        f"A step of {examples:,} examples: {engineering(flops)}FLOP of products."
        for examples, flops in sorted(work)
        if flops
    ]


def _fits(row: PlanRow) -> str:
    if row.fits is False:
        return f"no, {readable(round(row.excess_bytes or 0))} over"
    named = {"compiled": "yes", "forecast": "its state does"}
    return named.get(row.outcome.status, row.outcome.status)


def _needed(row: PlanRow) -> float | None:
    if row.outcome.status == "forecast":
        return row.outcome.state_bytes
    return row.outcome.memory_bytes


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def _seconds(row: PlanRow) -> str:
    if row.time is None:
        return ""
    low, high = f"{row.time.low_s:.3g}", f"{row.time.high_s:.3g}"
    return low if low == high else f"{low} to {high}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
