"""Faults 21 and 22 in a whole run: one process dies, then one stands still.

As `docs/guides/reliability.md` shows it: faults by the environment, a journal that
remembers them over restarts, and the launcher that starts all again, twice.
"""

import pytest

from replicator.monitoring.events import read_events
from tests.distributed.processes.launched import Launched, script

pytestmark = pytest.mark.slow

TRAIN = """
import hashlib
import replicator
from replicator import distributed
from replicator.testing import faults
from replicator.training.watchdog import Limits
distributed.initialize()
import jax, numpy as np, optax
from tests.steps import regression_batch, trainer
rep = replicator.Replicator(compilation_cache=False)
init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
broken = faults.from_environment()
result = rep.run(
    step_fn,
    broken.dataset([regression_batch(seed=seed) for seed in range(5)]),
    init_fn=init_fn,
    steps=60,
    directory="records",
    checkpoint_dir="checkpoints",
    checkpoint_every=5,
    hooks=[broken],
    step_timeout=Limits(step_s=100, report_s=8),
    display=False,
)
leaves = jax.tree.leaves(jax.device_get(result.state))
bits = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
print("ended", result.step, hashlib.sha256(bits).hexdigest())
"""


def launched(folder, monkeypatch, **environ):
    """Train in two processes of two devices; return what the launcher told."""
    folder.mkdir()
    train = script(folder, TRAIN)
    monkeypatch.chdir(folder)
    words = ("--processes", 2, "--devices-per-process", 2, train)
    with Launched(*words, environ=environ) as group:
        assert group.wait() == 0, group.text
        assert not group.alive()
    ended = [line[4:] for _, line in group.wait_for("] ended 60 ", count=2)]
    assert len(ended) == 2
    return group, set(ended)


def test_a_run_that_lost_a_process_and_hung_ends_with_the_same_bits(
    tmp_path, monkeypatch, pytestconfig
):
    environ = {"PYTHONPATH": str(pytestconfig.rootpath)}
    _, whole = launched(tmp_path / "whole", monkeypatch, **environ)
    group, broken = launched(
        tmp_path / "broken",
        monkeypatch,
        REPLICATOR_FAULTS="kill rank 1 at step 20; stuck rank 0 at step 40",
        REPLICATOR_FAULTS_JOURNAL="faults.jsonl",
        **environ,
    )
    assert len(whole) == 1
    assert broken == whole
    assert "process 1 was killed by SIGKILL" in group.text
    assert "exited with code 76 (hung)" in group.text
    assert len(group.wait_for("starting all processes again")) == 2
    records = tmp_path / "broken" / "records"
    hung = [event for event in read_events(records) if event["kind"] == "hung"]
    assert {event["process"] for event in hung} == {0, 1}
    # The stacks of all processes are kept, and tell which of them slept.
    stacks = sorted((records / "stacks").iterdir())
    assert [path.name.partition("-")[0] for path in stacks] == ["0", "1"]
    assert "sleep_forever" in stacks[0].read_text()
