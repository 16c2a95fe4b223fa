"""One process of a group of two: join, and exchange a message for each input line."""

import json
import sys
import time

import jax

from replicator.distributed import initialize
from replicator.distributed.agreement import exchange
from replicator.distributed.leaving import leave_at_once


def main(coordinator: str, process_id: str, timeout_s: str) -> None:
    """Join, then exchange; print one line of JSON each time."""
    start_s = time.perf_counter()
    initialize(coordinator, 2, int(process_id), timeout_s=float(timeout_s))
    joined_s = time.perf_counter() - start_s
    print(json.dumps({"joined_s": joined_s, "devices": jax.device_count()}), flush=True)
    for number, _ in enumerate(sys.stdin):
        received = exchange(f"round-{number}", int(process_id), timeout_s=30)
        print(json.dumps({"received": received}), flush=True)
    leave_at_once(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
