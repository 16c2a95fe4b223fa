"""What a session saves, and waits for, while a turn of an own loop is half made."""

import signal
import threading
from contextlib import suppress

import jax.numpy as jnp
import numpy as np
import pytest

from replicator import InputOptions
from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError, BatchError, Preempted, StateError
from replicator.hooks import Hook, StateCallback, every
from tests.steps import regression_batch, replicas

BATCHES = [regression_batch(seed=seed) for seed in range(8)]


def opened(dataset=None, *, steps=6, **options):
    """A session whose state counts the updates made of it, by `count`."""
    return replicas(2).session(
        dataset=dataset,
        init_fn=lambda key: {"made": jnp.zeros(())},
        steps=steps,
        display=False,
        **options,
    )


def count(state, batch):
    return {"made": state["made"] + 1}, {"made": state["made"]}


def saved_in(directory):
    """Return the newest step that is saved, what was made of it, and what was read."""
    with CheckpointStore(directory) as store:
        found = store.restore()
    if found is None:
        return None
    batches = found.meta["position"]["batches"]
    return found.step, float(found.arrays["user"]["made"]), batches


class Node:
    """A node of a program that never was."""

    def __init__(self):
        self.stop_event = threading.Event()

    def fail(self, message):
        raise AssertionError(message)


def test_a_loop_that_ends_in_the_midst_of_a_turn_is_refused_and_not_saved(tmp_path):
    def train():
        options = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
        with opened(BATCHES, **options) as session:
            step = session.compile(count)
            for batch in session.batches():
                metrics = step(batch)
                if session.steps_done == 3:
                    break
                session.after(metrics)

    with pytest.raises(ArgumentError, match=r"session\.after.*after step 3"):
        train()
    assert saved_in(tmp_path) == (2, 2.0, 2)


def test_a_loop_that_never_calls_after_is_refused_at_its_end():
    def train():
        with opened(BATCHES, steps=None) as session:
            step = session.compile(count)
            for batch in session.batches():
                step(batch)

    with pytest.raises(ArgumentError, match="until step 1 is done"):
        train()


def test_a_signal_where_a_turn_waits_for_a_batch_of_its_own_lets_it_end(tmp_path):
    def train():
        with opened(checkpoint_dir=tmp_path) as session:
            step, calls = session.compile(count), 0
            for _ in session.steps():  # two of them to one step of the run
                if calls == 3:
                    signal.raise_signal(signal.SIGTERM)
                metrics, calls = step(BATCHES[0]), calls + 1
                if calls % 2 == 0:
                    session.after(metrics)

    with pytest.raises(Preempted):
        train()
    assert saved_in(tmp_path) == (2, 4.0, 0)


def test_a_signal_where_a_turn_waits_for_its_first_batch_lets_it_end(tmp_path):
    waits = threading.Event()

    def dataset():
        yield BATCHES[0]
        yield BATCHES[1]
        waits.wait(60)
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGTERM)
        while session._preemption._asked.signal is None:
            threading.Event().wait(0.01)
        yield BATCHES[2]

    session = opened(
        dataset(), checkpoint_dir=tmp_path, inputs=InputOptions(prefetch=1)
    )

    def train():
        with session:
            step, replay = session.compile(count), session.compile(count)
            batches = session.batches()
            for number in session.steps():
                replay(BATCHES[7])
                if number == 3:
                    waits.set()
                session.after(step(next(batches)))

    with pytest.raises(Preempted):
        train()
    assert saved_in(tmp_path) == (3, 6.0, 3)


@pytest.mark.parametrize("of", ["batches", "steps"])
def test_the_users_own_stop_iteration_behind_the_loop_is_raised(of):
    def train():
        with opened(BATCHES[:2], steps=2) as session:
            step, batches = session.compile(count), session.batches()
            for _ in getattr(session, of)():
                session.after(step(BATCHES[0]))
            assert next(batches, None) is None
            next(iter(()))

    with pytest.raises(StopIteration) as raised:
        train()
    assert type(raised.value) is StopIteration


def test_the_state_of_an_event_is_gone_once_the_next_turn_has_made_a_step():
    kept = []

    def train():
        hook = StateCallback(kept.append, every(n_steps=1))
        with opened(BATCHES, hooks=[hook]) as session:
            step = session.compile(count)
            for batch in session.batches():
                metrics = step(batch)
                if kept:
                    _ = kept[0].state
                session.after(metrics)

    with pytest.raises(ArgumentError, match="got step 2 begun for the state after"):
        train()


@pytest.mark.parametrize("skips", [True, False], ids=["skips", "takes two"])
def test_a_node_that_stops_between_two_batches_of_a_turn_is_saved(tmp_path, skips):
    node, ended = Node(), threading.Event()

    def dataset():
        yield from BATCHES[:3]
        ended.wait(60)

    class Ended(Hook):
        def close(self):
            ended.set()  # before the input is closed

    options = {"checkpoint_dir": tmp_path, "node": node, "hooks": [Ended()]}
    with opened(dataset(), **options) as session:
        step, batches = session.compile(count), session.batches()
        for number, batch in enumerate(batches):
            if number < 2:
                session.after(step(batch))
                continue
            node.stop_event.set()
            if not skips:
                step(next(batches))
    assert session.result.step == 2
    assert saved_in(tmp_path) == (2, 2.0, 2)


def test_the_last_batch_may_be_skipped():
    with opened(BATCHES, steps=None) as session:
        step = session.compile(count)
        for number, batch in enumerate(session.batches()):
            if number < 7:
                session.after(step(batch))
    assert session.result.step == 7


def test_a_turn_whose_second_batch_is_not_there_ends_the_run_before_it():
    with opened(BATCHES[:5], steps=None) as session:
        step, batches = session.compile(count), session.batches()
        for batch in batches:
            second = next(batches)
            step(batch)
            session.after(step(second))
    assert (session.result.step, float(session.result.state["made"])) == (2, 4.0)


def test_the_wait_for_one_more_batch_of_a_turn_counts_as_input():
    class Dataset:
        def __iter__(self):
            yield BATCHES[0]
            asked.wait(60)
            for _ in range(6_000):  # until the loop has come to wait
                if (phase := session._spec.phases.current.phase) == "input":
                    break
                threading.Event().wait(0.01)
            seen.append(phase)
            yield BATCHES[1]

    asked, seen = threading.Event(), []
    session = opened(Dataset(), steps=1)
    with session:
        step, batches = session.compile(count), session.batches()
        for batch in batches:
            step(batch)
            asked.set()
            session.after(step(next(batches)))
    assert seen[0] == "input"


def test_a_step_behind_the_last_is_refused_and_the_result_stays():
    with opened(BATCHES, steps=3) as session:
        step = session.compile(count)
        for batch in session.batches():
            session.after(step(batch))
        with pytest.raises(BatchError, match="got 3 that are all done"):
            step(BATCHES[0])
        with pytest.raises(BatchError, match="got 3 that are all done"):
            session.after({})
    assert float(session.result.state["made"]) == 3


def test_a_step_behind_the_end_of_the_input_is_refused():
    with opened(BATCHES, steps=None) as session:
        step = session.compile(count)
        for batch in session.batches():
            session.after(step(batch))
        with pytest.raises(BatchError, match="got 8 that are all done"):
            step(BATCHES[0])


def test_a_step_on_a_copy_of_a_batch_goes_on_behind_that_batch(tmp_path):
    class Cut(Exception):
        pass

    seen, begun = [], []

    def step_fn(state, batch):
        return state, {"x": batch["x"].mean()}

    def train(cut_at=None):
        with replicas(2).session(
            step_fn,
            BATCHES,
            init_fn=lambda key: jnp.zeros(()),
            steps=6,
            checkpoint_dir=tmp_path,
            checkpoint_every=1,
            display=False,
        ) as session:
            begun.append(session.steps_done)
            for batch in session.batches():
                copy = {name: leaf * 1.0 for name, leaf in batch.value.items()}
                session.step(copy)
                seen.append(float(np.mean(copy["x"])))
                if session.steps_done == cut_at:
                    raise Cut

    with suppress(Cut):
        train(3)
    train()
    means = [batch["x"].mean() for batch in BATCHES[:6]]
    np.testing.assert_allclose(seen[3:], means[begun[1] :], atol=1e-6)
    assert begun[1] > 0


def test_a_session_in_another_thread_is_refused():
    found = []

    def train():
        try:
            list(session.steps())
        except ArgumentError as failure:
            found.append(str(failure))

    with opened() as session:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(60)
    assert "in the thread that opened it" in found[0]


def test_an_open_session_is_not_opened_again():
    with (
        opened() as session,
        pytest.raises(ArgumentError, match="must be closed to be opened"),
        session,
    ):
        pass
    assert session.result.step == 0


def test_a_session_that_has_ended_takes_no_step():
    with opened(BATCHES, steps=3) as session:
        step = session.compile(count)
    with pytest.raises(ArgumentError, match="must be open"):
        step(BATCHES[0])


def test_a_session_may_be_opened_again_when_it_has_ended(tmp_path):
    session = opened(BATCHES, checkpoint_dir=tmp_path)
    for last in (2, 6):
        with session:
            step = session.compile(count)
            for batch in session.batches():
                session.after(step(batch))
                if session.steps_done == last:
                    break
    assert float(session.result.state["made"]) == 6


def test_a_loop_that_has_forgotten_after_does_not_go_on_for_ever(monkeypatch):
    monkeypatch.setattr("replicator.training.session.MOST_BATCHES_OF_AN_UPDATE", 9)

    def train():
        with opened(BATCHES) as session:
            step = session.compile(count)
            for batch in session.batches():
                step(batch)

    with pytest.raises(ArgumentError, match=r"session\.after.*for each update"):
        train()


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"made": jnp.zeros(7)}, r"`made` is float32\[7\]"),
        ({"made": jnp.zeros((), int)}, r"`made` is int"),
        ({}, "`made` is missing"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_a_state_of_another_form_is_refused(tmp_path, state, found):
    with opened(checkpoint_dir=tmp_path) as session:
        session.after({}, state={"made": np.ones((), np.float32)})
        with pytest.raises(StateError, match=found):
            session.after({}, state=state)
    assert saved_in(tmp_path) == (1, 1.0, 0)
