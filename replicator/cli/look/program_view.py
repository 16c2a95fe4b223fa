"""Lines of a terminal that show a running program."""

from replicator.launchpad_bridge.view.watching import columns
from replicator.launchpad_bridge.view.watching.samples import (
    ProgramSample,
    WorkerSample,
)

HEADER = tuple(column for column in columns.COLUMNS if column != "runs")
RIGHT = HEADER[2:]


def lines_of(snapshot: ProgramSample, most: int | None = None) -> list[tuple[str, ...]]:
    """Return a line for each worker, and below it for its methods if it has several.

    Args:
      snapshot: The program.
      most: Number of lines that there may be. Where all are too many, methods are left
        out; then workers of one group become one line.
    """
    by_worker = [columns.rows_of(worker) for worker in snapshot.workers]
    rows = [
        {**row, "node": f"  {row['node']}" if number else row["node"]}
        for rows in by_worker
        for number, row in enumerate(rows)
    ]
    if most is not None and len(rows) > most:
        rows = [row for row, *_ in by_worker]
    if most is not None and len(rows) > most:
        groups: dict[str, list[WorkerSample]] = {}
        for worker in snapshot.workers:
            groups.setdefault(worker.label, []).append(worker)
        rows = [
            columns.row_of(columns.merged(label, group))
            for label, group in groups.items()
        ]
    return [tuple(row.get(column, "") for column in HEADER) for row in rows]


def line_above(snapshot: ProgramSample) -> str:
    """Return the line above the table: the program and its phase."""
    stopped = f" (asked by {snapshot.stopped_by})" if snapshot.stopped_by else ""
    return f"{snapshot.program}: {snapshot.phase}{stopped}, {columns.about(snapshot)}"


def line_below(snapshot: ProgramSample) -> str:
    """Return the line below the table: the failure or newest error; "" for none."""
    if snapshot.failure:
        return f"failed: {snapshot.failure}"
    errors = [w.error for w in snapshot.workers if w.state == "waiting" and w.error]
    return f"last: {errors[-1]}" if errors else ""


def last_line(snapshot: ProgramSample) -> str:
    """Return the sentence for how a program ended."""
    if snapshot.failure:
        return f"{snapshot.program} failed: {snapshot.failure}"
    if snapshot.stopped_by:
        return f"{snapshot.program} was stopped by {snapshot.stopped_by}."
    if snapshot.workers and all(worker.outcome for worker in snapshot.workers):
        return f"{snapshot.program} ended: all nodes have returned."
    return f"{snapshot.program} ended."
