"""Put many training programs through the law: the answer of one device, everywhere.

Each program is run in processes that may die or hang: then that program failed, and the
next one gets a new process. Prints what failed, where and by how much, and one JSON
object.
"""

import concurrent.futures
import json
import time

from absl import app, flags

from benchmarks.truth.programs import PROGRAMS
from benchmarks.truth.worker import Worker, serve

_FULL = flags.DEFINE_bool("full", False, "Run every program in all its settings.")
_ONLY = flags.DEFINE_multi_string("only", [], "Run programs whose name holds this.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes that run programs.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 240.0, "What a program may take.")
_SERVE = flags.DEFINE_bool("serve", False, "Be such a process.")


def main(argv: list[str]) -> None:
    del argv
    if _SERVE.value:
        serve()
        return
    chosen = [
        program.name
        for program in PROGRAMS
        if not _ONLY.value or any(word in program.name for word in _ONLY.value)
    ]
    started_s = time.monotonic()
    workers = [Worker(_TIMEOUT_S.value) for _ in range(_WORKERS.value)]
    runs, failed, slowest = 0, {}, {}
    waiting = iter(chosen)

    def work(worker: Worker):
        for name in waiting:
            began_s = time.monotonic()
            yield name, worker.run(name, full=_FULL.value), time.monotonic() - began_s

    def tell(worker: Worker) -> None:
        nonlocal runs
        for name, found, took_s in work(worker):
            slowest[name] = took_s
            runs += found.settings
            for wrong in found.wrong:
                failed.setdefault(name, []).append(wrong)
            verdict = "FAILED" if found.wrong else "ok"
            print(f"{name}: {verdict} {found.settings} settings {took_s:.1f} s")
            for wrong in found.wrong:
                print("   ", wrong.replace("\n", "\n    "), flush=True)

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        for done in [pool.submit(tell, worker) for worker in workers]:
            done.result()
    for worker in workers:
        worker.close()
    result = {
        "failed": len(failed),
        "total": len(chosen),
        "runs": runs,
        "seconds": round(time.monotonic() - started_s),
    }
    print("failed:", ", ".join(failed) or "nothing")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
