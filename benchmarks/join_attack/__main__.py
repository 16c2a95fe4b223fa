"""Try to join a group unasked; count how often that succeeds.

Groups of two real processes meet and start JAX, while strangers come to the meeting and
to JAX's coordination service. After each attack the group must meet, and both processes
must still reach each other. The service asks for certificates from jax 0.12 on: its
attacks run on `.venv-newest`, which `make test-newest` makes; without it they are left
out, and `newest` is 0.
"""

import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from benchmarks.join_attack import coordinator, meeting
from benchmarks.join_attack.group import ROOT, Group
from benchmarks.rpc_attack.attack import Won

_ONLY = flags.DEFINE_multi_string("only", [], "Attacks whose name holds this.")
_PAIRS = flags.DEFINE_integer("pairs", 7, "Joins that are timed, with a secret each.")


def _try(name: str, attack: Callable[[Group], None], group: Group) -> bool:
    start_s = time.monotonic()
    failed, outcome = False, "held"
    try:
        with group:
            attack(group)
            if not group.has_joined:
                group.joined_s()
            group.still_talks()
    except Won as how:
        failed, outcome = True, f"SUCCEEDED: {how}"
    except Exception:
        # Another error is not a defence: somebody has to look.
        failed, outcome = True, f"BROKE: {traceback.format_exc()}"
    print(f"{name}: {outcome} ({time.monotonic() - start_s:.1f} s)", flush=True)
    return failed


def _seconds_more(folder: Path, python: str) -> float:
    """Return how much longer joining takes with proofs than without; medians."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for has_secret in (True, False) * _PAIRS.value:
        with Group(folder, python, has_secret=has_secret) as group:
            taken[has_secret].append(group.joined_s())
    return statistics.median(taken[True]) - statistics.median(taken[False])


def main(argv: list[str]) -> None:
    del argv
    start_s = time.monotonic()
    newest = ROOT / ".venv-newest" / "bin" / "python"
    has_newest = newest.exists()
    pythons = [sys.executable, *[str(newest)] * has_newest]
    attacks = [
        (f"{name} ({Path(python).parts[-3]})", attack, python)
        for python in pythons
        for name, attack in meeting.ATTACKS.items()
    ] + [
        (name, attack, str(newest))
        for name, attack in coordinator.ATTACKS.items()
        if has_newest
    ]
    wanted = [
        each
        for each in attacks
        if not _ONLY.value or any(part in each[0] for part in _ONLY.value)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failed = [
            name
            for name, attack, python in wanted
            if _try(name, attack, Group(folder, python))
        ]
        result = {
            "failures": len(failed),
            "total": len(wanted),
            "failed": failed,
            "newest": int(has_newest),
            "seconds": round(_seconds_more(folder, pythons[-1]), 3),
        }
    print(json.dumps(result | {"total_s": round(time.monotonic() - start_s, 1)}))
    sys.exit(0)


if __name__ == "__main__":
    app.run(main)
