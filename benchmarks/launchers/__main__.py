"""Count the processes that train alone unasked, or elsewhere than they ought to.

First by the environments of `cases.py`; then two processes are trained by each launcher
that is on this machine, and by the variables of the others, and must have the loss of
`replicator launch`, bit for bit.
"""

import json
import time

from absl import app, flags

from benchmarks.launchers import starting
from benchmarks.launchers.cases import CASES, count

_TORCHRUN = flags.DEFINE_string("torchrun", None, "Path of a real torchrun.")


def main(argv: list[str]) -> None:
    """Print the counts as one JSON object."""
    del argv
    started_s = time.monotonic()
    counted = {name: count(case) for name, case in CASES.items()}
    for name, (alone, wrong) in counted.items():
        if alone or wrong:
            print(f"{name}: {alone} alone, {wrong} wrong")
    [loss] = {each["loss"] for each in starting.trained(starting.reference())}
    real = {
        name: _is_right(name, starting.trained(command), loss)
        for name, command in starting.real_launchers(_TORCHRUN.value).items()
    }
    by_hand = {
        kind: _is_right(kind, starting.trained_by_hand(kind, environ), loss)
        for kind, environ in starting.stand_ins().items()
        if kind not in real
    }
    result = {
        "environments": len(CASES),
        "alone": sum(alone for alone, _ in counted.values()),
        "wrong": sum(wrong for _, wrong in counted.values())
        + list(by_hand.values()).count(False),
        "started_missing": list(real.values()).count(False),
        "started": sorted(real),
        "by_their_variables": sorted(by_hand),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


def _is_right(name: str, results: list[dict], loss: float) -> bool:
    """Return whether two processes were one group of this kind, with the loss."""
    kind = name.partition(" ")[0]
    found = [(each["kind"], each["processes"], each["loss"]) for each in results]
    print(f"{name}: {found}", flush=True)
    return found == [(kind, 2, loss)] * 2


if __name__ == "__main__":
    app.run(main)
