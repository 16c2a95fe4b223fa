"""Make all turns of a loop, as `Session` does, without what a session opens."""

from replicator.inputs.skipped_batches import SkippedBatches
from replicator.monitoring.phases import Phases
from replicator.training.closing import close_all
from replicator.training.loop import Loop
from replicator.training.nonfinite.policy import RecoveryPolicy
from replicator.training.nonfinite.rollback import Recovery

RAISE = Recovery(RecoveryPolicy()).handle


def run_loop(
    step, state, batches, *, plan, hooks=(), phases=None, report_bad=RAISE, **options
):
    """Call `step` until the plan's steps are done or the input ends."""
    phases = phases or Phases()
    with close_all([*(hook.close for hook in hooks), batches.close]):
        loop = Loop(
            state,
            plan=plan,
            hooks=hooks,
            phases=phases,
            report_bad=report_bad,
            **options,
        )
        while (batch := loop.next(batches)) is not None:
            if isinstance(batches, SkippedBatches):
                batches.given(batch, step=loop.step)
            loop.dispatch(step, batch, batches.stall_s)
        if loop.goes_on:
            loop.require_end_of_plan()
        result = loop.end(batches.stall_s)
        phases.enter("end")
    return result
