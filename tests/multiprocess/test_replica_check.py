"""A bit flips in one process's memory: all processes name it, and do the same (10)."""

import platform
import re

import optax
import pytest

from replicator import Replicator
from replicator.errors import ReplicaMismatchError
from replicator.testing.faults import Injector, parse
from tests.multiprocess.processes import run_processes, values
from tests.multiprocess.programs import bits, host
from tests.steps import regression_batch, trainer

pytestmark = pytest.mark.slow
FLIP = "flip a bit in the state on replica 2 of 4 at step 5"


def train(directory, fault=None, **options):
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    result = rep.run(
        step_fn,
        [regression_batch(24, seed=seed) for seed in range(3)],
        init_fn=init_fn,
        hooks=[Injector(parse(fault))] if fault else [],
        **{"steps": 9, "check_replicas_every": 3, "display": False},
        **options,
    )
    return bits(host(result.state))


def flipped(directory):
    try:
        found = train(directory, FLIP)
    except ReplicaMismatchError as failure:
        found = str(failure)
    saved = {"checkpoint_dir": f"{directory}/saved", "checkpoint_every": 2}
    mended = train(directory, FLIP, on_mismatch="rollback", **saved)
    return found, mended == train(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flipped")
    ended = run_processes(
        flipped, folder, processes=2, devices=2, directory=str(folder)
    )
    return values(ended)


def test_all_processes_name_the_device_of_one(found):
    (first, _), (second, _) = found
    assert first == second
    place = r"replica 2 \(device \d+, process 1, host "
    assert re.search(f"{place}{re.escape(platform.node())}\\) at step 6", first)


def test_a_rollback_ends_with_the_bits_of_an_undisturbed_run(found):
    assert [mended for _, mended in found] == [True, True]
