"""Check the first updates of steps that are wrong, and of steps that are right.

Without the guards of `engine/sharding_constraints`, XLA's partitioner makes many
writes, shifts and grouped convolutions wrong: `missed` counts those that the check lets
pass. With the guards, `false_alarms` counts the steps that it ends and that are right
in float64: all models of `strategy_matrix`, steps in bfloat16 and float16, accuracies,
queues of sorted indices, norms and accumulation, with optimizers as users set them.
`cost` is the share of the check in the time to the first step, with nothing cached.
Each strategy has a process of its own, which may die. Prints what failed, and one JSON
object.
"""

import concurrent.futures
import itertools
import json
import time
from collections.abc import Iterator

from absl import app, flags

import replicator
from benchmarks import worker
from benchmarks.first_update.faults import PATTERNS, ROUTES, is_possible
from benchmarks.first_update.judge import Setting, cost, verdict
from benchmarks.first_update.sound import OPTIMIZERS, SOUND

_FULL = flags.DEFINE_bool("full", False, "All patterns and optimizers everywhere.")
_ONLY = flags.DEFINE_multi_string("only", [], "Settings whose words hold this.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes side by side.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 300.0, "What one step may take.")
_COST = flags.DEFINE_bool("cost", True, "Measure what the check costs, too.")
_SERVE = flags.DEFINE_bool("serve", False, "Be such a process.")

DEVICES = 8
_AT_A_TIME = 16  # in one process
_CUT = ("fsdp", "zero2", "rules", "hybrid", "zero1", "tensor_parallel")
_NARROW = ("bfloat16", "float16", "all-bfloat16", "all-float16", "mixed")
# They take the longest; the norms of `classifier` are like theirs.
_SLOW = ("impala", "resnet", "scan-lm")


def settings(*, full: bool) -> Iterator[Setting]:
    """List what is run."""
    both = ("adamw", "sgd")
    for number, (pattern, route) in enumerate(itertools.product(PATTERNS, ROUTES)):
        if not is_possible(pattern, route):
            continue
        ways = ("zero2",) if pattern != "clipped" else ("fsdp", "zero1")
        optimizers = (both[number % 2],)
        if full:
            ways, optimizers = _CUT, both
        for way, optimizer in itertools.product(ways, optimizers):
            yield Setting("fault", f"{pattern}/{route}", way, optimizer)
    optimizers = itertools.cycle(OPTIMIZERS)
    for number, case in enumerate(SOUND):
        if full:
            for way, optimizer in itertools.product(_CUT, OPTIMIZERS):
                yield Setting("sound", case, way, optimizer)
            continue
        way = _CUT[number % len(_CUT)]
        yield Setting("sound", case, way, next(optimizers))
        if case not in _SLOW:
            other = _CUT[(number + 1) % len(_CUT)]
            yield Setting("sound", case, other, next(optimizers))
    for optimizer in OPTIMIZERS:
        yield Setting("sound", "norm", "fsdp", optimizer)
    for case, optimizer in itertools.product((*_NARROW[:2], "norm"), ("adam", "sgd")):
        yield Setting("sound", case, "fsdp", optimizer, accumulate=2)


def _serve() -> None:
    replicator.fake_devices(DEVICES)
    worker.serve(
        lambda request: (
            cost(DEVICES) if request == "cost" else verdict(Setting(*request), DEVICES)
        )
    )


def _judge(group: list[Setting]) -> dict[Setting, dict]:
    process = worker.Worker(
        ["-m", "benchmarks.first_update", "--serve"], timeout_s=_TIMEOUT_S.value
    )
    found = {}
    for setting in group:
        began_s = time.monotonic()
        try:
            found[setting] = process.ask(setting)
        except worker.WorkerEnded as ended:
            found[setting] = {"ended": str(ended)}
        spent_s = time.monotonic() - began_s
        print(f"{setting}: {found[setting]} ({spent_s:.1f} s)", flush=True)
    process.close()
    return found


def _share() -> float:
    process = worker.Worker(["-m", "benchmarks.first_update", "--serve"], timeout_s=600)
    try:
        return process.ask("cost")
    finally:
        process.close()


def main(argv: list[str]) -> None:
    del argv
    if _SERVE.value:
        _serve()
        return
    began_s = time.monotonic()
    chosen = [
        each
        for each in dict.fromkeys(settings(full=_FULL.value))
        if all(word in f"{each.kind} {each}" for word in _ONLY.value)
    ]
    groups = []
    for kind in ("fault", "sound"):  # a process has its guards, or has none
        part = [each for each in chosen if each.kind == kind]
        groups += [part[at : at + _AT_A_TIME] for at in range(0, len(part), _AT_A_TIME)]
    with concurrent.futures.ThreadPoolExecutor(_WORKERS.value) as pool:
        parts = pool.map(_judge, groups)
        found = {setting: each for part in parts for setting, each in part.items()}
    faults = {s: each for s, each in found.items() if s.kind == "fault"}
    wrong = {s: each for s, each in faults.items() if each.get("wrong")}
    missed = [s for s, each in wrong.items() if not each["alarm"]]
    alarms = [
        s
        for s, each in found.items()
        if "ended" in each or (each["alarm"] and not each["wrong"])
    ]
    for name, failed in (("missed", missed), ("false alarm", alarms)):
        for each in failed:
            print(f"{name}: {each}: {found[each]}")
    result = {
        "missed": len(missed),
        "wrong": len(wrong),
        "false_alarms": len(alarms),
        "unchecked": sum(bool(each.get("unchecked")) for each in found.values()),
        "total": len(found),
        "cost": round(_share(), 3) if _COST.value else None,
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
