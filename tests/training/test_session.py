"""A loop of one's own has what `run` has: it goes on, and says what broke."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import InputOptions, Replicator
from replicator.checkpoint import CheckpointStore
from replicator.errors import (
    ArgumentError,
    CheckpointInUseError,
    NonFiniteError,
    Preempted,
)
from replicator.hooks import Callback, Hook, StateCallback, every
from tests.steps import assert_equal_bits, regression_batch, replicas, trainer

ROOT = Path(__file__).parents[2]
BATCHES = [regression_batch(seed=seed) for seed in range(4)]


def parts(n=2, **options):
    rep = replicas(n, **options)
    return rep, *trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))


class Cut(Exception):
    """What cuts a loop short."""


def by_session(rep, step_fn, dataset, *, cut_at=None, **options):
    with rep.session(step_fn, dataset, display=False, **options) as session:
        for batch in session.batches():
            session.step(batch)
            if session.steps_done == cut_at:
                raise Cut
    return session.result


def in_turn(rep, *, directory=None, cut_at=None, steps=7):
    """Train two halves of a state by two steps in turn, with noise from the key."""

    def init_fn(key):
        return {"a": jax.random.normal(key, (4,)), "b": jnp.ones(4)}

    def move(ours, theirs):
        def step_fn(state, batch, key):
            target = batch["x"].mean(0) + state[theirs]
            gradient = replicator.all_reduce(state[ours] - target, "mean")
            noise = jax.random.normal(key, (4,))
            after = state | {ours: state[ours] - 0.1 * (gradient + noise)}
            return after, {f"norm/{ours}": (gradient**2).sum()}

        return step_fn

    with rep.session(
        dataset=BATCHES,
        init_fn=init_fn,
        steps=steps,
        checkpoint_dir=directory,
        checkpoint_every=2,
        display=False,
    ) as session:
        move_a, move_b = (session.compile(move(*w)) for w in ("ab", "ba"))
        batches = session.batches()
        for batch in batches:
            first = move_a(batch, session.key)
            session.after(first | move_b(next(batches), session.key))
            if session.steps_done == cut_at:
                raise Cut
    return session.result


def test_run_is_a_session_and_a_for():
    rep, init_fn, step_fn = parts()
    run = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=6, display=False)
    own = by_session(rep, step_fn, BATCHES, init_fn=init_fn, steps=6)
    assert_equal_bits(own.state, run.state)
    assert (own.step, own.metrics, own.examples) == (6, run.metrics, run.examples)


def test_an_own_loop_that_was_cut_goes_on_to_the_bits_of_run(tmp_path):
    rep, init_fn, step_fn = parts()
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "steps": 7}
    with pytest.raises(Cut):
        by_session(rep, step_fn, BATCHES, init_fn=init_fn, cut_at=5, **saved)
    own = by_session(rep, step_fn, BATCHES, init_fn=init_fn, **saved)
    run = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=7, display=False)
    assert_equal_bits(own.state, run.state)
    assert own.examples < 16 * 7


def test_run_goes_on_from_what_a_session_saved(tmp_path):
    rep, init_fn, step_fn = parts()
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "steps": 7}
    with pytest.raises(Cut):
        by_session(rep, step_fn, BATCHES, init_fn=init_fn, cut_at=5, **saved)
    run = rep.run(step_fn, BATCHES, init_fn=init_fn, display=False, **saved)
    assert run.examples < 16 * 7


def test_two_steps_in_turn_go_on_bit_for_bit(tmp_path):
    rep = replicas(2)
    with pytest.raises(Cut):
        in_turn(rep, directory=tmp_path, cut_at=5)
    assert_equal_bits(in_turn(rep, directory=tmp_path).state, in_turn(rep).state)


def test_the_key_of_a_step_is_the_one_that_run_gives():
    rep = replicas(2)

    def init_fn(key):
        return {"seen": jnp.zeros(())}

    def step_fn(state, batch, key):
        return {"seen": jax.random.uniform(key)}, {"seen": jax.random.uniform(key)}

    run = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=3, seed=5, display=False)
    with rep.session(
        dataset=BATCHES, init_fn=init_fn, steps=3, seed=5, display=False
    ) as session:
        train = session.compile(step_fn)
        for batch in session.batches():
            session.after(train(batch, session.key))
    assert_equal_bits(session.result.state, run.state)


def test_a_learner_is_fed_by_actors_through_a_queue(tmp_path):
    rep, init_fn, step_fn = parts()
    fed = queue.Queue()
    for batch in BATCHES:
        fed.put(batch)
    with rep.session(
        step_fn, init_fn=init_fn, steps=4, directory=tmp_path, display=False
    ) as session:
        for _ in session.steps():
            session.step(fed.get(timeout=60))
    run = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=4, display=False)
    assert_equal_bits(session.result.state, run.state)
    assert session.result.examples == run.examples


def test_own_steps_without_a_dataset_go_on_from_their_state(tmp_path):
    rep, init_fn, step_fn = parts()

    def learn(steps):
        with rep.session(
            init_fn=init_fn, steps=steps, checkpoint_dir=tmp_path, display=False
        ) as session:
            train, begun = session.compile(step_fn), session.steps_done
            for step in session.steps():
                session.after(train(BATCHES[(step - 1) % 4]), examples=16)
        return begun, session.result

    assert learn(2)[0] == 0
    begun, went_on = learn(5)
    whole = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=5, display=False)
    assert begun == 2
    assert went_on.examples == 48
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        went_on.state,
        whole.state,
    )


def test_a_step_of_plain_jax_is_saved_and_watched_too(tmp_path):
    step = jax.jit(lambda state: (state + 1, {"level": state.sum()}))
    with replicas(2).session(
        init_fn=lambda key: jnp.zeros(3),
        steps=4,
        checkpoint_dir=tmp_path,
        display=False,
    ) as session:
        for _ in session.steps():
            state, metrics = step(session.state)
            session.after(metrics, state=state)
    with CheckpointStore(tmp_path) as store:
        np.testing.assert_array_equal(store.restore().arrays["user"], np.full(3, 4.0))


def test_hooks_evaluation_and_records_are_those_of_run(tmp_path):
    rep, init_fn, step_fn = parts()
    found = {}
    for name in ("run", "session"):
        seen = found[name] = []
        hooks = [
            Callback(lambda e, seen=seen: seen.append(("m", e.step)), every(n_steps=2)),
            StateCallback(
                lambda e, seen=seen: seen.append(("s", sorted(e.state), e.step)),
                every(n_steps=3),
            ),
        ]
        call = rep.run if name == "run" else lambda *a, **o: by_session(rep, *a, **o)
        options = {} if name == "session" else {"display": False}
        result = call(
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=6,
            directory=tmp_path / name,
            write_every=2,
            hooks=hooks,
            eval_fn=lambda state, batch: {"x": batch["x"][:, 0]},
            eval_dataset=BATCHES,
            eval_every=3,
            **options,
        )
        seen.append(result.evaluation)
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        seen.append([json.loads(row)["step"] for row in rows])
        events = (tmp_path / name / "events.jsonl").read_text().splitlines()
        seen.append([json.loads(event)["kind"] for event in events])
    assert found["session"] == found["run"]


def test_a_loop_that_ends_early_is_saved_where_it_ended(tmp_path):
    rep, init_fn, step_fn = parts()
    with rep.session(
        step_fn,
        BATCHES,
        init_fn=init_fn,
        steps=9,
        checkpoint_dir=tmp_path,
        display=False,
    ) as session:
        for batch in session.batches():
            session.step(batch)
            if session.steps_done == 4:
                break
    with CheckpointStore(tmp_path) as store:
        assert store.restore().step == 4
    assert session.result.step == 4


def test_an_own_step_with_nan_ends_the_session_by_name():
    def train():
        with replicas(2).session(
            init_fn=lambda key: jnp.ones(2), steps=4, display=False
        ) as session:
            for step in session.steps():
                level = np.float32(np.nan if step == 2 else 1.0)
                session.after({"level": level})

    with pytest.raises(NonFiniteError, match=r"`level`.*step 2"):
        train()


def test_a_step_that_the_run_goes_back_from_has_returned_its_metrics(tmp_path):
    rep, init_fn, step_fn = parts()
    batches = [regression_batch(seed=seed) for seed in range(4)]
    batches[2]["x"][0, 0] = np.nan
    with rep.session(
        step_fn,
        batches,
        init_fn=init_fn,
        steps=3,
        inputs=InputOptions(allow_nan=True),
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path,
        checkpoint_every=1,
        display=False,
    ) as session:
        found = [session.step(batch)["loss"] for batch in session.batches()]
    assert [bool(np.isfinite(loss)) for loss in found].count(False) == 1


def test_a_run_that_goes_back_goes_on_in_the_same_loop(tmp_path):
    rep, init_fn, step_fn = parts()
    bad = [*BATCHES[:2], BATCHES[2] | {"y": np.full(16, 1e30, np.float32)}, BATCHES[3]]
    own = by_session(
        rep,
        step_fn,
        bad,
        init_fn=init_fn,
        steps=3,
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path / "own",
        checkpoint_every=1,
    )
    run = rep.run(
        step_fn,
        bad,
        init_fn=init_fn,
        steps=3,
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path / "run",
        checkpoint_every=1,
        display=False,
    )
    assert_equal_bits(own.state, run.state)


def test_a_dataset_that_ends_in_the_midst_of_a_turn_is_refused():
    rep, init_fn, step_fn = parts()

    def train():
        with rep.session(
            dataset=BATCHES[:3], init_fn=init_fn, steps=None, display=False
        ) as session:
            move, batches = session.compile(step_fn), session.batches()
            for batch in batches:
                move(batch)
                session.after(move(next(batches)))

    with pytest.raises(ArgumentError, match="until step 2 is done"):
        train()


def test_a_signal_while_a_turn_waits_for_one_more_batch_lets_it_end(tmp_path):
    rep, init_fn, step_fn = parts()
    cut = threading.Event()

    def dataset():
        for number in itertools.count():
            if number == 5:  # the second of the third turn
                os.kill(os.getpid(), signal.SIGTERM)
                cut.wait(0.5)
            yield BATCHES[number % 4]

    def train(steps, batches_of):
        with rep.session(
            dataset=batches_of(),
            init_fn=init_fn,
            steps=steps,
            checkpoint_dir=tmp_path / str(steps),
            inputs=InputOptions(prefetch=1),
            display=False,
        ) as session:
            move, batches = session.compile(step_fn), session.batches()
            for batch in batches:
                move(batch)
                session.after(move(next(batches)))
        return session.result.state

    with pytest.raises(Preempted):
        train(9, dataset)
    with CheckpointStore(tmp_path / "9") as store:
        stopped = store.restore()
    whole = train(stopped.step, lambda: itertools.cycle(BATCHES))
    for path, leaf in jax.tree.leaves_with_path(stopped.arrays["user"]["params"]):
        np.testing.assert_array_equal(leaf, whole["params"][path[-1].key])


def test_what_a_loop_raises_is_in_the_journal(tmp_path):
    rep, init_fn, step_fn = parts()
    with pytest.raises(Cut):
        by_session(
            rep,
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=5,
            cut_at=2,
            directory=tmp_path,
        )
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["error"]) == ("ended", "Cut")


def test_off_the_main_thread_no_signal_handler_is_installed(tmp_path):
    rep, init_fn, step_fn = parts()
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR2)]
    seen = []

    class Look(Hook):
        def on_state(self, event):
            seen.append([signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR2)])

    thread = threading.Thread(
        target=lambda: by_session(
            rep,
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=2,
            directory=tmp_path,
            checkpoint_dir=tmp_path / "checkpoints",
            hooks=[Look()],
        )
    )
    thread.start()
    thread.join(60)
    assert seen == [before, before]


def test_two_sessions_in_two_threads_keep_to_themselves(tmp_path):
    devices, results, both = jax.devices(), {}, threading.Barrier(2)

    class Meet(Hook):
        def on_state(self, event):
            both.wait(60)  # both are in the middle of their loops

    def train(name, first):
        own = devices[first : first + 2]
        rep = Replicator(devices=own, compilation_cache=False)
        init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
        results[name] = by_session(
            rep,
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=4,
            seed=first,
            directory=tmp_path / name,
            checkpoint_dir=tmp_path / name / "checkpoints",
            profile=range(2, 4),
            hooks=[Meet()],
        )

    threads = [
        threading.Thread(target=train, args=each) for each in (("a", 0), ("b", 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    rep, init_fn, step_fn = parts()
    alone = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=4, display=False)
    assert_equal_bits(results["a"].state, alone.state)
    for name in "ab":
        events = (tmp_path / name / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(event)["kind"] for event in events]
        assert (kinds.count("started"), kinds.count("ended")) == (1, 1)
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_second_session_on_one_directory_is_refused(tmp_path):
    rep, init_fn, step_fn = parts()
    options = {"init_fn": init_fn, "steps": 2, "checkpoint_dir": tmp_path}
    with (
        rep.session(step_fn, BATCHES, display=False, **options) as session,
        pytest.raises(CheckpointInUseError),
    ):
        by_session(rep, step_fn, BATCHES, **options)
    assert session.result.step == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda session: session.step(BATCHES[0]),
        lambda session: next(session.batches()),
        lambda session: session.result,
    ],
)
def test_what_a_session_lacks_is_refused(use):
    rep = replicas(1)
    with (
        rep.session(init_fn=lambda key: jnp.ones(1), steps=0, display=False) as session,
        pytest.raises(ArgumentError),
    ):
        use(session)


def test_a_session_must_be_open():
    session = replicas(1).session(init_fn=lambda key: jnp.ones(1), steps=1)
    with pytest.raises(ArgumentError, match="must be open"):
        _ = session.state


@pytest.mark.parametrize(
    "option",
    [
        {"debug": True},
        {"steps_per_call": 2},
        {"auto_microbatch": True},
        {"on_nonfinite": "skip"},
    ],
)
def test_what_needs_the_sessions_own_step_is_refused(option):
    with pytest.raises(ArgumentError, match=next(iter(option))):
        replicas(1).session(init_fn=lambda key: jnp.ones(1), steps=2, **option)


@pytest.mark.slow
def test_the_script_of_the_docs_killed_and_started_again_has_the_bits_of_run(tmp_path):
    code = (ROOT / "docs" / "train_own_loop.py").read_text()
    by_run = code[: code.index("with rep.session(")] + (
        "state = rep.run(step_fn, batches, init_fn=init_fn, steps=4000).state\n"
        "bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]\n"
        "print(4000, hashlib.sha256(b''.join(bits)).hexdigest()[:16])\n"
    )
    scripts = {"own.py": code, "by_run.py": by_run}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    command = [sys.executable, "-u", "own.py"]
    with subprocess.Popen(command, **options) as killed:
        while not list((tmp_path / "runs/own/checkpoints").glob("[0-9]*")):
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
        assert killed.stdout.read().count("4000 ") == 0
    went_on = subprocess.run(
        command, timeout=300, check=True, stderr=subprocess.PIPE, **options
    )
    whole = subprocess.run(
        [sys.executable, "by_run.py"], timeout=300, check=True, **options
    )
    assert "goes on after step" in went_on.stderr
    assert went_on.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


def test_a_bad_number_found_after_an_early_end_takes_its_checkpoints_along(tmp_path):
    rep, init_fn, step_fn = parts()
    bad = [BATCHES[0], BATCHES[1] | {"y": np.full(16, 1e30, np.float32)}]
    options = {
        "init_fn": init_fn,
        "steps": 9,
        "on_nonfinite": "rollback",
        "checkpoint_dir": tmp_path,
        "display": False,
    }

    def train():
        with rep.session(step_fn, bad, **options) as session:
            session.step(next(session.batches()))
            session.step(next(session.batches()))

    with pytest.raises(NonFiniteError, match=r"loop ends.*step 2\. Look at its batch"):
        train()
    with CheckpointStore(tmp_path) as store:
        assert store.restore() is None


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_what_a_loop_knows_stands_beside_the_metrics_of_its_steps(steps_per_call):
    rep, init_fn, step_fn = parts()
    seen = []
    watch = Callback(lambda event: seen.append(event.metrics), every(n_steps=1))
    with rep.session(
        step_fn,
        BATCHES,
        init_fn=init_fn,
        steps=4,
        steps_per_call=steps_per_call,
        hooks=[watch],
        display=False,
    ) as session:
        for batch in session.batches():
            known = {"loss": -1, "games": {"won": session.steps_done}}
            session.step(batch, metrics=known)
    assert [each["games"]["won"] for each in seen] == (
        [0, 1, 2, 3] if steps_per_call == 1 else [0, 0, 2, 2]
    )
    assert session.result.metrics["games"] == {"won": 4 - steps_per_call}
    assert all(each["loss"] > 0 for each in seen), "the step's own count"


def test_numbers_beside_metrics_without_names_are_refused():
    rep, init_fn, step_fn = parts()
    lone = lambda state, batch: (step_fn(state, batch)[0], jnp.ones(()))  # noqa: E731
    with (
        pytest.raises(ArgumentError, match="must return a dict of metrics"),
        rep.session(lone, BATCHES, init_fn=init_fn, steps=1, display=False) as session,
    ):
        session.step(BATCHES[0], metrics={"won": 1})
