"""Break a run on purpose, at a known place, once, to test that it survives.

    from replicator.testing import faults

    broken = faults.from_environment()  # REPLICATOR_FAULTS="kill rank 1 at step 40"
    rep.run(step_fn, broken.dataset(dataset), hooks=[broken], ...)

A schedule is text, or a list of `Fault`. A journal keeps over restarts the faults that
have happened. Nothing happens to a run without an injector.
"""

from replicator.testing.faults.injector import InjectedError, Injector, from_environment
from replicator.testing.faults.schedule import Fault, parse

__all__ = ["Fault", "InjectedError", "Injector", "from_environment", "parse"]
