"""Several evaluation sets by name: their numbers are told apart everywhere."""

import json

import jax.numpy as jnp
import pytest

from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError
from replicator.training.options import Follow, Retention
from tests.steps import replicas

SETS = {
    "val": [{"x": jnp.full((2,), 2.0)}],
    "test": [{"x": jnp.full((3,), 4.0)}, {"x": jnp.full((2,), 4.0)}],
}


def run(folder, steps=4, sets=SETS, **options):
    options = {"follow": Follow("val/distance"), "eval_every": 2} | options
    return replicas(2).run(
        lambda state, batch: ({"steps": state["steps"] + 1}, {}),
        [{"x": jnp.zeros(2)}],
        init_fn=lambda key: {"steps": jnp.zeros(())},
        steps=steps,
        eval_fn=lambda state, batch: {"distance": abs(batch["x"] - state["steps"])},
        eval_dataset=sets,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=1,
        directory=folder,
        display=False,
        **options,
    )


def test_the_result_has_the_metrics_of_each_set(tmp_path):
    result = run(tmp_path)
    assert result.evaluation == {
        "val": {"distance": 2.0, "examples": 2},
        "test": {"distance": 0.0, "examples": 5},
    }
    assert run(tmp_path).evaluation == result.evaluation  # of a run that had ended


def test_follow_and_retention_take_a_number_of_one_set(tmp_path):
    best = Retention(keep_last=1, keep_best=1, metric="eval/val/distance")
    result = run(tmp_path, retention=best)
    assert (result.best.step, result.best.value) == (2, 0.0)
    store = CheckpointStore(tmp_path / "checkpoints", retention=best)
    assert (store.best, store.steps()) == (2, (2, 4))


def test_records_name_the_set(tmp_path):
    run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "eval/val/distance" in row]
    told = [(row["eval/val/distance"], row["eval/test/distance"]) for row in found]
    assert told == [(0.0, 2.0), (2.0, 0.0)]


@pytest.mark.slow
def test_sets_are_evaluated_in_the_same_order_by_all_processes(tmp_path):
    read = []

    def noted(name):
        def input_fn(context):
            read.append(name)
            yield from SETS[name]

        return input_fn

    for names in (("test", "val"), ("val", "test")):
        run(tmp_path / names[0], sets={name: noted(name) for name in names})
    assert read[: len(read) // 2] == read[len(read) // 2 :]


def test_a_run_that_goes_on_keeps_the_best_of_a_set(tmp_path):
    run(tmp_path, steps=2)
    assert run(tmp_path, steps=6).best.step == 2


def test_a_run_that_follows_another_number_has_its_best(tmp_path):
    run(tmp_path, steps=2)
    assert run(tmp_path, steps=4, follow=Follow("test/distance")).best.step == 4


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({}, r"by a string without `/`, got \[\]"),
        ({"a/b": SETS["val"]}, r"got \['a/b'\]. Write"),
        ({1: SETS["val"]}, r"got \[1\]. Write"),
        ({"x": jnp.zeros(2)}, r"`eval_dataset\['x'\]` must yield batches"),
        (
            {"val": iter(SETS["val"])},
            r"`eval_dataset\['val'\]` must be one that can be",
        ),
    ],
)
def test_what_names_no_dataset_is_refused(tmp_path, sets, message):
    with pytest.raises(ArgumentError, match=message):
        run(tmp_path, sets=sets)


def test_a_number_that_is_of_no_set_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(
        ArgumentError, match="Use one of test/distance, test/examples, val"
    ):
        run(tmp_path, follow=Follow("distance"))
