"""A user's script: imports at its top what they import, then launches server nodes.

`python -m benchmarks.runs.launched_script NODES LAUNCHER` prints one JSON object: how
long its imports took, and how long from the launch to the answer of the last node.
"""

import time

_BEGAN_S = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402

import flax  # noqa: E402, F401
import jax  # noqa: E402, F401
import optax  # noqa: E402, F401

_IMPORT_S = time.perf_counter() - _BEGAN_S

import replicator.launchpad_bridge as lp  # noqa: E402

_TIMEOUT_S = 120.0


class Service:
    """Service of a node."""

    def __init__(self, number: int) -> None:
        self._number = number

    def number(self) -> int:
        """Return which node it is."""
        return self._number


def main(nodes: int, launcher: str) -> None:
    program = lp.Program("launched")
    with program.group("service"):
        handles = [program.add_node(lp.CourierNode(Service, i)) for i in range(nodes)]
    launched_s = time.perf_counter()
    with lp.launch(program, launch_type=launcher):
        clients = [handle.dereference() for handle in handles]
        futures = [client.futures.number() for client in clients]
        answers = [future.result(_TIMEOUT_S) for future in futures]
        answered_s = time.perf_counter()
    assert answers == list(range(nodes))
    result = {"imports": _IMPORT_S, "seconds": answered_s - launched_s}
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
