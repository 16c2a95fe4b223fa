"""Draw the picture of README: two clients share two islands, four to one.

    python -m tests.controller.picture docs/two_clients.svg

Each calls a dataflow of two ops of 20 ms, a device each. Drawn is a second in which
both have calls that wait.
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np

from replicator import controller
from replicator.controller.scheduling.timeline import Timeline

CALLS = 60
SHOWN_S = (0.5, 1.4)


def slept(x):
    time.sleep(0.02)
    return x


def a(x):
    return jax.pure_callback(slept, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def b(x):
    return a(x)


def called(client):
    """Return a dataflow of a client: an op on each island."""
    first, second = (
        client.fn(op, client.slice(1, island=f"island{n}"))
        for n, op in enumerate((a, b))
    )
    flow = client.program(lambda x: second(first(x)))
    flow(np.ones(1, np.float32)).result()  # compiled
    return flow


def main(path):
    with controller.local(islands=2, devices=1) as pw:
        flows = [called(pw.client("alice", weight=4)), called(pw.client("bob"))]
        begin_s = pw.timeline().until_s
        x = np.ones(1, np.float32)
        results = [flow(x) for _ in range(CALLS) for flow in flows]
        for each in results:
            each.result()
        times = pw.timeline()
    first_s, last_s = SHOWN_S
    shown = [
        span
        for span in times.spans
        if span.op in ("a", "b") and first_s <= span.begin_s - begin_s < last_s
    ]
    path.write_text(Timeline(shown, times.until_s).to_svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
