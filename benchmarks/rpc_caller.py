"""Be one client of many: make calls that carry nothing for so long, and say how many.

`python -m benchmarks.rpc_caller ADDRESS` reads seconds, one number a line, and answers
each with its calls a second.
"""

import sys
import time

from replicator.rpc.client import Client

_TIMEOUT_S = 60.0


def main(address: str) -> None:
    with Client(address, timeout_s=_TIMEOUT_S) as client:
        client.noop()
        print("ready", flush=True)
        for line in sys.stdin:
            print(calls_per_s(client, float(line)), flush=True)


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
