import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.errors import ArgumentError, NonFiniteError
from replicator.hooks import StateCallback, every
from replicator.options import BestSoFar, EvaluateEvery, Follow
from tests.fakes import RecordingWriter
from tests.steps import regression_batch, replicas, trainer


def squares(state, batch):
    found = batch["x"] @ state["params"]["w1"].sum(1) - batch["y"]
    return {"loss": found**2}


def run(rep, hook, *, steps):
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    return rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=steps,
        hooks=[hook],
        display=False,
    )


def test_a_run_is_evaluated_when_due_and_at_its_end():
    rep, writer = replicas(2), RecordingWriter()
    data = [regression_batch(10, seed=1)]
    hook = EvaluateEvery(
        lambda state: rep.evaluate(squares, data, state=state),
        every(n_steps=2),
        writer=writer,
    )
    result = run(rep, hook, steps=5)

    assert writer.steps == [2, 4, 5]
    assert writer.calls[-2:] == ["flush", "close"]
    final = rep.evaluate(squares, data, state=result.state)
    assert writer.rows[-1] == (5, {"eval/examples": 10, "eval/loss": final["loss"]})
    assert hook.metrics == final


def test_the_last_step_is_evaluated_once():
    rep, writer = replicas(1), RecordingWriter()
    hook = EvaluateEvery(lambda state: {"one": 1.0}, every(n_steps=2), writer=writer)
    run(rep, hook, steps=4)

    assert writer.steps == [2, 4]


def test_evaluating_changes_nothing_of_the_run():
    rep, data = replicas(2), [regression_batch(10, seed=1)]
    hook = EvaluateEvery(
        lambda state: rep.evaluate(squares, data, state=state), every(n_steps=1)
    )
    seen = run(rep, hook, steps=3).state["params"]
    plain = run(rep, EvaluateEvery(lambda state: {}, every(n_steps=9)), steps=3)

    for name, leaf in plain.state["params"].items():
        np.testing.assert_array_equal(leaf, seen[name])


def test_the_best_is_followed_until_patience_ends():
    rep, found = replicas(1), iter([3.0, 1.0, 2.0, jnp.nan])
    hook = EvaluateEvery(
        lambda state: {"loss": next(found)},
        every(n_steps=1),
        follow=Follow(metric="loss", patience=2),
    )
    run(rep, hook, steps=4)

    assert hook.best == BestSoFar(step=2, value=1.0, waited=2)
    assert hook.should_stop


def test_the_best_of_an_earlier_part_counts():
    hook = EvaluateEvery(
        lambda state: {"loss": 1.0},
        every(n_steps=1),
        follow=Follow(metric="loss"),
        best=BestSoFar(step=7, value=0.5),
    )
    run(replicas(1), hook, steps=1)

    assert hook.best == BestSoFar(step=7, value=0.5, waited=1)


def test_a_number_that_is_not_there_cannot_be_followed():
    hook = EvaluateEvery(
        lambda state: {"loss": 1.0, "top": {"one": 0.5}},
        every(n_steps=1),
        follow=Follow(metric="accuracy"),
    )
    message = (
        "`follow` must name a number of the evaluation, got 'accuracy'. "
        "Use one of loss, top/one."
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        run(replicas(1), hook, steps=1)


EACH = every(n_steps=1)


def run_evaluated(eval_fn, *, follow=None, batches=None):
    """Run with an evaluation that is wrong; return the steps that were made."""
    rep, steps = replicas(2), []
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    with pytest.raises((ArgumentError, NonFiniteError, KeyError)) as failure:
        rep.run(
            step_fn,
            [regression_batch()],
            init_fn=init_fn,
            steps=4,
            hooks=[StateCallback(lambda event: steps.append(event.step), EACH)],
            eval_fn=eval_fn,
            eval_dataset=batches or [regression_batch(10, seed=1)],
            eval_every=2,
            follow=follow,
            display=False,
        )
    return steps, failure.value


def test_a_number_that_cannot_be_followed_is_refused_before_the_first_step():
    steps, failure = run_evaluated(squares, follow=Follow(metric="accuracy"))
    assert "got 'accuracy'. Use one of examples, loss" in str(failure)
    assert steps == []


def test_an_evaluation_that_fails_does_so_before_the_first_step():
    steps, failure = run_evaluated(lambda state, batch: {"loss": batch["nothing"]})
    assert isinstance(failure, KeyError)
    assert steps == []


def test_an_evaluation_is_tried_on_one_batch_alone():
    bad = regression_batch(10, seed=1)
    bad["x"][0, 0] = np.nan
    steps, failure = run_evaluated(squares, batches=[regression_batch(10), bad])
    assert isinstance(failure, NonFiniteError)
    assert steps == [1]  # the evaluation comes before the hook
