"""Wait for what the journal of a run says, where others than the run itself look."""

from replicator.launchpad_bridge.view.watching.journal import JOURNAL, JournalReader
from tests.rpc.courier_cases import wait_until


def wait_until_noted(run, phase="running"):
    wait_until((run.plan.folder / JOURNAL).exists)
    reader = JournalReader(run.plan.folder)
    try:
        wait_until(lambda: reader.read().phase == phase)
    finally:
        reader.close()
