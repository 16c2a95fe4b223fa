"""Errors leave the library with the user's frames alone."""

import os
import pickle
import traceback

import jax
import jax.numpy as jnp
import pytest

from replicator import errors
from replicator.base import tracebacks
from replicator.base.tracebacks import full_traceback, short_traceback
from tests.steps import regression_batch, replicas, trainer


def misspelt(state, batch):
    return state, {"x": batch["imgae"].mean()}


def start(key):
    return {"w": jnp.ones(3)}


def names(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def failed(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any)
        call()
    return caught.value


def run(step_fn=misspelt, **options):
    options = {"init_fn": start, "display": False} | options
    return replicas(2).run(step_fn, [regression_batch()], **options)


def test_a_run_shows_the_users_frames_and_the_users_last():
    assert names(failed(run)) == ["failed", "run", "misspelt"]


@pytest.mark.parametrize(
    "call",
    [
        lambda rep: rep.compile(misspelt)(rep.init(start), regression_batch()),
        lambda rep: rep.inspect(misspelt, start, regression_batch()),
        lambda rep: rep.evaluate(misspelt, [regression_batch()], state=start(0)),
        lambda rep: rep.predict(misspelt, [regression_batch()], start(0)),
        lambda rep: rep.init(lambda key: misspelt({}, {})),
    ],
)
def test_so_does_every_call(call):
    found = names(failed(lambda: call(replicas(2))))
    assert found == ["failed", "<lambda>", "<lambda>", *found[3:-1], "misspelt"]
    assert set(found[3:-1]) <= {"<lambda>"}


def test_so_does_a_session():
    def loop():
        options = {"init_fn": start, "display": False}
        data = [regression_batch()]
        with replicas(2).session(misspelt, data, **options) as session:
            for batch in session.batches():
                session.step(batch)

    assert names(failed(loop)) == ["failed", "loop", "misspelt"]


def test_type_notes_and_object_stay():
    mine = KeyError("mine")
    mine.add_note("a note")

    def step_fn(state, batch):
        raise mine

    found = failed(lambda: run(step_fn))
    assert found is mine
    assert found.__notes__[0] == "a note"


def test_causes_contexts_and_members_are_shortened_too():
    @short_traceback
    def fail():
        try:
            run()
        except KeyError as failure:
            group = ExceptionGroup("both", [failure, failed(run)])
            raise ValueError("other") from group

    kept = failed(fail)
    for error in (kept, kept.__cause__, *kept.__cause__.exceptions):
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        assert not any(map(tracebacks.is_library, files))


def test_all_frames_are_shown_if_asked_for(monkeypatch):
    monkeypatch.setenv("REPLICATOR_TRACEBACK", "full")
    found = names(failed(run))
    assert {"make_run_spec", "session_by"}.isdisjoint(found)
    assert "dispatch" in found


def test_frames_of_jax_are_kept_if_jax_is_asked_for_them():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        trace = failed(run).__traceback__
    finally:
        jax.config.update("jax_traceback_filtering", before)
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    assert any(f"{os.sep}jax{os.sep}" in file for file in files)
    assert not any("/replicator/training/" in file for file in files)


def test_the_text_of_all_frames_is_kept_for_records():
    assert "dispatch" in full_traceback(failed(run))
    assert "dispatch" in full_traceback(pickle.loads(pickle.dumps(failed(run))))


def test_an_error_of_the_users_own_is_not_touched():
    def fail():
        raise ValueError("mine")

    assert "fail" in full_traceback(failed(fail))


def test_a_misspelt_option_comes_with_the_right_one():
    found = failed(lambda: run(step=3))
    assert isinstance(found, TypeError)
    assert found.__notes__ == ["Use `steps` in the place of `step`."]


def test_a_missing_argument_comes_with_all():
    found = failed(lambda: replicas(2).run(misspelt))
    assert found.__notes__[0].startswith("Call it as `run(step_fn, dataset, ...)`.")


def test_a_traced_value_comes_with_two_lines():
    def step_fn(state, batch):
        return state, {"x": float(batch["x"].mean())}

    found = failed(lambda: run(step_fn))
    assert str(found).count("\n") == 1
    assert "debug=True" in found.__notes__[-1]


def test_another_kind_of_traceback_is_refused(monkeypatch):
    monkeypatch.setenv("REPLICATOR_TRACEBACK", "all")
    with pytest.raises(errors.ArgumentError, match="must be 'full' or 'short'"):
        replicas(2)


def test_a_good_run_gives_what_it_gave():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(__import__("optax").sgd(0.1)))
    options = {"init_fn": init_fn, "display": False}
    assert rep.run(step_fn, [regression_batch()] * 2, **options).step == 2
