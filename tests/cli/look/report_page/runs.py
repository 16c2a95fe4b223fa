"""Directories of runs, as healthy and as hostile as a disk can hold."""

import json

from replicator.base.host.strict_json import strict_json
from replicator.monitoring.events import EventLog
from tests.fakes import FakeClock

HOSTILE = "<script>alert(1)</script>"


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(strict_json(row) + "\n" for row in rows))


def rows(count, *, first_step=1, **numbers):
    """Return lines of metrics: loss falls, `numbers` stay."""
    return [
        {"step": step, "time_s": 0.1 * (step - first_step), "loss": 1 / step, **numbers}
        for step in range(first_step, first_step + count)
    ]


def make_run(root, *, name="loss_of_b"):
    """Write a run that was killed once, resumed, spiked, and came to its end."""
    root.mkdir(parents=True, exist_ok=True)
    second = rows(100, first_step=101, **{"progress/steps_per_s": 10.0, name: 0.5})
    second[20]["loss"] = float("nan")
    write_rows(root / "metrics.jsonl", rows(100, **{name: 0.6}) + second)
    write_rows(root / "earlier" / "0" / "metrics.jsonl", rows(30, **{name: 0.7}))
    record = {
        "seed": 7,
        "arguments": {"steps": 200, "num_replicas": 8, "note": name, "inputs": []},
        "argv": ["train.py", "--name", name],
        "started_at": "2026-11-21T12:00:00+00:00",
        "host": "a-host",
        "versions": {"jax": "0.10.2", "flax": None},
        "devices": {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1},
    }
    (root / "run.json").write_text(json.dumps(record))
    write_events(root)
    (root / "postmortem" / "120").mkdir(parents=True)
    (root / "postmortem" / "120" / "batch.npz").write_bytes(b"\0" * 2000)
    (root / "stacks").mkdir()
    (root / "stacks" / "0-120.txt").write_text(f"Thread {name}: in wait")
    return root


def write_events(root):
    clock = FakeClock()
    first = EventLog(root, clock=clock)
    first.write("started", step=0)
    first.write("phases", step=0, seconds={"compile": 2.0})
    first.write("saved", step=50)
    first.write("saved", step=100)
    first.write("phases", step=100, seconds={"compile": 2.0, "step": 9.0})
    second = EventLog(root, clock=clock)
    second.write("phases", step=100, seconds={"restore": 1.0})
    second.write("resumed", step=100, why=HOSTILE)
    second.write("spike", step=120, leaf=HOSTILE, found=3.5)
    second.write("saved", step=200)
    second.write("phases", step=200, seconds={"restore": 1.0, "step": 8.0})
    second.write("ended", step=200)
