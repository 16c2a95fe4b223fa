"""What each process of `test_processes` runs."""

from replicator import Replicator
from tests.multiprocess.programs import global_batches
from tests.tuning.choosing.subjects import plain


def chosen():
    """Train under the strategy that a run chooses; return what it decided by."""
    rep = Replicator(strategy="auto", compilation_cache=False)
    step_fn, init_fn, _ = plain(rep)
    result = rep.run(step_fn, global_batches(), init_fn=init_fn, steps=2, display=False)
    record = rep.decision.record
    timed = {each["name"]: each["seconds"] for each in record["candidates"]}
    return {"chosen": record["chosen"], "seconds": timed, "step": result.step}
