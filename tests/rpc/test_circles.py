"""What ends is freed at once: no circle of references waits for the collector.

That counts objects, and a closed connection is few of them with much memory behind.
"""

import contextlib
import gc

import numpy as np
import pytest

from replicator.errors import CallTimeoutError
from tests.rpc.courier_cases import LONG_S, NAMES, Probe, client_of, serving, wait_until


@contextlib.contextmanager
def without_collector():
    """Yield what returns the objects of ours that only the collector would free."""
    gc.disable()
    gc.freeze()  # to walk what other tests have left takes a second
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield ours_in_circles
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def ours_in_circles():
    gc.collect()
    return {
        type(found).__qualname__
        for found in gc.garbage
        if type(found).__module__.startswith("replicator.")
    }


@pytest.mark.parametrize("transport", NAMES)
def test_a_client_that_is_gone_leaves_nothing_to_the_collector(transport):
    probe = Probe()
    with serving(transport, probe) as server, without_collector() as in_circles:
        for _ in range(3):
            with client_of(server) as client:
                client.echo(np.zeros(50_000))
                client.futures.noop().result(LONG_S)
                with pytest.raises(ValueError, match="bad"):
                    client.fail()
                with pytest.raises(CallTimeoutError):
                    client.call("hold", timeout_s=0.01)
            del client
        probe.go_on.set()
        wait_until(lambda: not probe.running and not server._service.connections)
        assert in_circles() == set()
