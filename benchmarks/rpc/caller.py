"""Be some clients of many: make calls that carry nothing for so long, and say how many.

`python -m benchmarks.rpc.caller ADDRESS CLIENTS` writes `ready`, reads seconds, one
number a line, and answers each with the calls a second of all its clients, which have a
thread each.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from replicator.rpc.client.client import Client

_TIMEOUT_S = 60.0


def main(address: str, clients: str) -> None:
    callers = [Client(address, timeout_s=_TIMEOUT_S) for _ in range(int(clients))]
    for client in callers:
        client.noop()
    print("ready", flush=True)
    for line in sys.stdin:
        print(all_calls_per_s(callers, float(line)), flush=True)
    for client in callers:
        client.close()


def all_calls_per_s(callers: Sequence[Client], window_s: float) -> float:
    """Call with all clients at once."""
    with ThreadPoolExecutor(len(callers)) as threads:
        rates = threads.map(calls_per_s, callers, [window_s] * len(callers))
        return sum(rates)


def calls_per_s(client: Client, window_s: float) -> float:
    """Call until the window is over."""
    started_s = time.monotonic()
    calls, past_s = 0, 0.0
    while past_s < window_s:
        client.noop()
        calls += 1
        past_s = time.monotonic() - started_s
    return calls / past_s


if __name__ == "__main__":
    main(*sys.argv[1:])
