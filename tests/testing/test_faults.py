"""Faults happen where the schedule says, once, also over restarts."""

import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import optax
import pytest

from replicator import InputOptions
from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError, CheckpointError, NonFiniteError
from replicator.hooks import StateEvent
from replicator.testing import faults
from replicator.testing.faults import Fault, InjectedError, Injector, effects, parse
from replicator.training.options import Retention
from tests.checkpoint.states import small_snapshot
from tests.steps import regression_batch, replicas, trainer

ROOT = Path(__file__).parents[2]

SENTENCES = [
    "kill rank 1 at step 40",
    "terminate at step 3",
    "always raise at step 17",
    "stuck rank 0 at step 5",
    "hold the interpreter 70 s at step 5",
    "stall input 0.5 s at step 5",
    "nan in the next batch on replica 3 of 8 at step 7",
    "disk full at write 3",
    "flip a bit in the last checkpoint at step 20",
    "flip a bit in the state on replica 3 of 8 at step 20",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_fault_is_written_as_it_is_read(sentence):
    (fault,) = parse(sentence)
    assert str(fault) == sentence
    assert parse(str(fault)) == (fault,)


def test_a_schedule_is_lines_or_semicolons():
    text = "kill at step 4;disk full at write 2\n\n raise  at step 9 ;"
    assert parse(text) == (
        Fault(kind="kill", at=4),
        Fault(kind="disk full", at=2),
        Fault(kind="raise", at=9),
    )


def test_a_range_is_picked_from_by_the_seed_the_same_at_each_restart():
    text = "; ".join(["kill at step 10..50"] * 20)
    first, second = parse(text, seed=1), parse(text, seed=1)
    assert first == second
    assert first != parse(text, seed=2)
    steps = {fault.at for fault in first}
    assert len(steps) > 5
    assert steps <= set(range(10, 51))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "must hold faults such as"),
        ("kill at write 3", "must hold faults such as"),
        ("disk full at step 3", "must hold faults such as"),
        ("explode at step 3", "got 'explode at step 3'"),
        ("kill at step 9..3", "must name a range upwards, got 9..3"),
        ("kill at step 0", "`at` must be at least 1, got 0"),
        ("stall input at step 3", "`stall input` must have a time, got None"),
        ("kill 3 s at step 3", "`kill` must have no time, got 3.0"),
        ("nan in the next batch on replica 8 of 8 at step 1", "one of those"),
        ("raise on replica 1 of 8 at step 1", "one of those"),
    ],
)
def test_what_is_no_fault_is_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse(text)


def event(step, advanced=1):
    progress = types.SimpleNamespace(time_s=0.0)
    return StateEvent(
        step=step,
        advanced=advanced,
        examples=0,
        progress=progress,
        read_state=lambda: None,
    )


def steps_that_raise(injector, steps, advanced=1):
    raised = []
    for step in range(advanced, steps + 1, advanced):
        try:
            injector.on_state(event(step, advanced))
        except InjectedError:
            raised.append(step)
    return raised


def test_a_fault_happens_once_at_its_step():
    injector = Injector(parse("raise at step 3; raise at step 5"))
    assert steps_that_raise(injector, 10) == [3, 5]
    assert steps_that_raise(injector, 10) == []


def test_a_call_of_several_steps_meets_the_faults_in_it():
    injector = Injector(parse("raise at step 3"))
    assert steps_that_raise(injector, 10, advanced=2) == [4]


def test_a_fault_of_another_rank_does_not_happen_here():
    schedule = parse("raise rank 1 at step 3; raise at step 4")
    assert steps_that_raise(Injector(schedule, rank=0), 10) == [4]
    assert steps_that_raise(Injector(schedule, rank=1), 10) == [3, 4]


def test_a_journal_remembers_over_restarts(tmp_path):
    schedule, journal = parse("raise at step 3; always raise at step 5"), tmp_path / "j"
    assert steps_that_raise(Injector(schedule, journal=journal), 10) == [3, 5]
    assert steps_that_raise(Injector(schedule, journal=journal), 10) == [5]
    # Each rank has its own life.
    assert steps_that_raise(Injector(schedule, journal=journal, rank=1), 10) == [3, 5]


def test_a_line_that_a_crash_cut_short_is_passed_by(tmp_path):
    journal = tmp_path / "j"
    Injector(parse("raise at step 3"), journal=journal)
    row = json.dumps({"number": 0, "fault": "raise at step 3", "rank": 0})
    journal.write_text(row + '\n{"number": 1, "fa')
    schedule = parse("raise at step 3; raise at step 4")
    assert steps_that_raise(Injector(schedule, journal=journal), 9) == [4]


def test_the_journal_is_written_before_the_process_dies(tmp_path):
    code = f"""
from replicator.testing.faults import Injector, parse
from tests.testing.test_faults import event
Injector(parse("kill at step 2"), journal={str(tmp_path / "j")!r}).on_state(event(2))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300)
    assert done.returncode == -9
    assert json.loads((tmp_path / "j").read_text())["fault"] == "kill at step 2"


def test_the_environment_says_what_happens(monkeypatch, tmp_path):
    monkeypatch.setenv("REPLICATOR_FAULTS", "raise at step 2")
    monkeypatch.setenv("REPLICATOR_FAULTS_JOURNAL", str(tmp_path / "j"))
    assert steps_that_raise(faults.from_environment(), 5) == [2]
    assert steps_that_raise(faults.from_environment(), 5) == []


def test_an_empty_environment_breaks_nothing(monkeypatch):
    monkeypatch.delenv("REPLICATOR_FAULTS", raising=False)
    assert steps_that_raise(faults.from_environment(), 5) == []


def train(dataset, injector, *, steps=12, **options):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    return rep.run(
        step_fn,
        dataset,
        init_fn=init_fn,
        steps=steps,
        hooks=[injector],
        inputs=InputOptions(prefetch=1),
        display=False,
        **options,
    )


def batches(count=3):
    return [regression_batch(seed=seed) for seed in range(count)]


def generate():
    yield from batches(12)


def input_fn(context):
    del context
    return batches()


@pytest.mark.parametrize(
    "dataset",
    [batches(), tuple(batches()), generate, input_fn],
    ids=["list", "tuple", "generator", "input function"],
)
def test_a_dataset_without_faults_is_read_as_before(dataset):
    def fresh():
        return dataset() if dataset is generate else dataset

    injector = Injector(())
    found = train(injector.dataset(fresh()), injector).state["params"]
    wanted = train(fresh(), injector).state["params"]
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf)


def test_a_resumed_run_reads_a_faulty_dataset_from_its_middle(tmp_path, caplog):
    broken = Injector(parse("raise at step 5"), journal=tmp_path / "j")
    arguments = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 2}
    with pytest.raises(InjectedError, match="raise at step 5"):
        train(broken.dataset(batches()), broken, **arguments)
    result = train(broken.dataset(batches()), broken, **arguments)
    wanted = train(batches(), Injector(()))
    assert "reading all before it again" not in caplog.text
    for name, leaf in wanted.state["params"].items():
        np.testing.assert_array_equal(result.state["params"][name], leaf)


def test_a_stalled_input_is_waited_for_and_counted():
    injector = Injector(parse("stall input 1 s at step 2"))
    result = train(injector.dataset(batches()), injector)
    assert result.step == 12
    assert result.progress.elapsed_s >= 1


def test_nan_reaches_the_part_of_one_replica():
    batch = {"x": np.ones((16, 2), np.float32), "label": np.ones(16, np.int32)}
    spoiled = effects.poison(batch, (3, 8))
    assert np.flatnonzero(np.isnan(spoiled["x"]).any(axis=1)).tolist() == [6, 7]
    np.testing.assert_array_equal(spoiled["label"], batch["label"])
    assert not np.isnan(batch["x"]).any()


def test_nan_in_a_batch_is_found_by_the_run():
    injector = Injector(parse("nan in the next batch on replica 1 of 2 at step 2"))
    with pytest.raises(NonFiniteError):
        train(injector.dataset(batches()), injector)


def test_a_full_disk_fails_one_save_and_the_next_is_whole(tmp_path):
    disk = Injector(parse("disk full at write 2")).disk
    with CheckpointStore(tmp_path, disk=disk) as store:
        store.save(small_snapshot(1))
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.save(small_snapshot(2))
        store.save(small_snapshot(3))
        assert store.steps() == (1, 3)


def test_a_run_goes_on_over_a_full_disk(tmp_path, caplog):
    broken = Injector(parse("disk full at write 1"))
    train(batches(), broken, checkpoint_dir=tmp_path, checkpoint_every=6)
    assert "could not be saved, training goes on" in caplog.text
    assert CheckpointStore(tmp_path).steps() == (12,)


def test_a_run_goes_on_from_the_checkpoint_before_the_flipped_bit(tmp_path, caplog):
    text = "flip a bit in the last checkpoint at step 11; raise at step 11"
    broken = Injector(parse(text), journal=tmp_path / "j")
    arguments = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 100}
    for steps in (5, 10):  # saved at the end of each
        train(batches(), broken, steps=steps, **arguments)
    with pytest.raises(InjectedError):
        train(batches(), broken, **arguments)
    result = train(batches(), broken, **arguments)
    assert "The damaged step 10 is kept" in caplog.text
    wanted = train(batches(), Injector(()))
    for name, leaf in wanted.state["params"].items():
        np.testing.assert_array_equal(result.state["params"][name], leaf)


def test_a_flipped_bit_is_found_and_the_step_before_it_used(tmp_path):
    injector = Injector(parse("flip a bit in the last checkpoint at step 7"))
    policy = Retention(keep_last=3)
    with CheckpointStore(tmp_path, disk=injector.disk, retention=policy) as store:
        store.save(small_snapshot(1))
        store.save(small_snapshot(2))
        injector.on_state(event(7))
        restored = store.restore()
        assert (restored.step, restored.damaged) == (1, (2,))


def test_exactly_one_bit_is_flipped(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(small_snapshot(1))
    files = [path for path in (tmp_path / f"{1:012d}").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    flipped = effects.flip_bit(tmp_path, random.Random(0))
    differing = [path for path in files if path.read_bytes() != before[path]]
    assert differing == [flipped]
    bits = np.unpackbits(
        np.frombuffer(before[flipped], np.uint8)
        ^ np.frombuffer(flipped.read_bytes(), np.uint8)
    )
    assert bits.sum() == 1


def test_without_a_checkpoint_there_is_nothing_to_flip(tmp_path, caplog):
    assert effects.flip_bit(tmp_path, random.Random(0)) is None
    assert "No checkpoint" in caplog.text


def test_a_journal_that_cannot_be_written_lets_no_fault_happen(tmp_path):
    journal = tmp_path / "file" / "j"
    journal.parent.write_text("in the way")
    injector = Injector(parse("raise at step 1"), journal=journal)
    with pytest.raises(OSError, match=os.strerror(17)):
        injector.on_state(event(1))
