"""Put every case under every strategy: one update is that of one device.

Models, and patterns of writes, shifts and grouped convolutions side by side. What is
run holds each pair of ideas once: all cases under all builders, each with all numbers
of devices and optimizers (`settings.py`). Rules by which replicas add up gradients have
settings of their own (`synchronisers.py`); `--accuracy` trains ResNets on digits with
them instead, three seeds each. `--full` makes it all. Each mesh has
processes of its own, which may die: compilers abort on meshes of several axes. Then
that case failed, and the next one gets a new process. Prints what failed, and one JSON
object.
"""

import concurrent.futures
import json
import resource
import time

from absl import app, flags

import replicator
from benchmarks import worker
from benchmarks.strategy_matrix.law import Oracles, Setting, explained, problem
from benchmarks.strategy_matrix.settings import settings
from benchmarks.strategy_matrix.synchronisers import (
    METHODS,
    WITHIN,
    accuracies,
    judged,
    sums_settings,
)

_FULL = flags.DEFINE_bool("full", False, "All cases with all of all, not a cover.")
_ACCURACY = flags.DEFINE_bool("accuracy", False, "Train with narrow numbers instead.")
_ONLY = flags.DEFINE_multi_string("only", [], "Settings whose words hold this.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes side by side.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 300.0, "What one case may take.")
_SERVE = flags.DEFINE_integer("serve", 0, "Be such a process, of so many devices.")


def _serve(devices: int) -> None:
    replicator.fake_devices(devices)
    oracles = Oracles()

    def judge(request: list) -> str | None:
        setting = Setting(*request)
        if setting.builder in METHODS:
            return explained(lambda: judged(setting))
        return problem(setting, oracles)

    worker.serve(judge)


def _judge(devices: int, group: list[Setting]) -> dict[Setting, str]:
    """Return what is wrong, by setting of one mesh."""
    arguments = ["-m", "benchmarks.strategy_matrix", f"--serve={devices}"]
    process, wrong = worker.Worker(arguments, timeout_s=_TIMEOUT_S.value), {}
    for setting in group:
        began_s = time.monotonic()
        try:
            found = process.ask(setting)
        except worker.WorkerEnded as ended:
            found = str(ended)
        if found is not None:
            wrong[setting] = found
        verdict = "ok" if found is None else f"FAILED {found}"
        print(f"{setting}: {verdict} ({time.monotonic() - began_s:.1f} s)", flush=True)
    process.close()
    return wrong


def _compare_accuracy(began_s: float) -> None:
    """Print the accuracies of ResNets whose gradients travel in each narrow form."""
    replicator.fake_devices(8)
    narrow = [
        name
        for name, words in METHODS.items()
        if words["compress"] and words["synchronise"] == "all_reduce"
        if all(word in name for word in _ONLY.value)
    ]
    found = accuracies(narrow)
    plain = found["all_reduce"]
    result = {
        "failed": sum(plain - found[name] > WITHIN for name in narrow),
        "accuracy": {name: round(value, 4) for name, value in found.items()},
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(result))


def main(argv: list[str]) -> None:
    del argv
    if _SERVE.value:
        _serve(_SERVE.value)
        return
    began_s = time.monotonic()
    if _ACCURACY.value:
        _compare_accuracy(began_s)
        return
    chosen = [
        each
        for each in (*settings(full=_FULL.value), *sums_settings(full=_FULL.value))
        if all(word in str(each) for word in _ONLY.value)
    ]
    meshes: dict[tuple[str, int], list[Setting]] = {}
    for each in chosen:
        mesh = "sums" if each.builder in METHODS else each.builder
        meshes.setdefault((mesh, each.devices), []).append(each)
    with concurrent.futures.ThreadPoolExecutor(_WORKERS.value) as pool:
        found = pool.map(
            lambda mesh: _judge(mesh[1], meshes[mesh]), sorted(meshes, reverse=True)
        )
        failed = {setting: wrong for group in found for setting, wrong in group.items()}
    for setting, wrong in failed.items():
        print(f"failed: {setting}: {wrong}")
    result = {
        "failed": len(failed),
        "total": len(chosen),
        "seconds": round(time.monotonic() - began_s),
        "processor_seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN)[0]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
