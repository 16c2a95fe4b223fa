"""Batches change their shapes within a few that are stated; one compile for each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import InputOptions, strategies
from replicator.errors import ArgumentError, BatchError
from replicator.inputs import open_input
from replicator.monitoring.events import read_events
from tests.helpers import replicated_layout
from tests.steps import assert_equal_bits, lenient, replicas

LENGTHS = [4, 8, 4, 4, 6, 8, 6, 4]
SHAPES = [{"x": (length,), "mask": (length,)} for length in (4, 6, 8)]


def bucket(length, seed, examples=8):
    drawn = np.random.default_rng(seed).normal(size=(examples, length))
    return {"x": drawn.astype(np.float32), "mask": np.ones((examples, length), "f4")}


def buckets(last=8):
    sizes = [*[8] * (len(LENGTHS) - 1), last]
    return [bucket(*each) for each in zip(LENGTHS, range(len(LENGTHS)), sizes)]  # noqa: B905


def train(folder, *, steps=8, rep=None, dataset=None, **options):
    rep = rep or replicas(2)
    optimizer = rep.wrap_optimizer(lenient(optax.adam(0.1)))

    def init_fn(key):
        return {"w": jnp.ones(()), "opt": optimizer.init(jnp.ones(()))}

    def step_fn(state, batch):
        def loss_fn(w):
            return ((w * batch["x"] * batch["mask"]).mean(1) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        updates, opt = optimizer.update(grads, state["opt"], state["w"])
        return {"w": state["w"] + updates, "opt": opt}, {"loss": loss}

    return rep.run(
        step_fn,
        dataset or buckets(),
        init_fn=init_fn,
        steps=steps,
        directory=folder / "records",
        checkpoint_dir=folder / "checkpoints",
        inputs=InputOptions(shapes=SHAPES),
        display=False,
        **options,
    )


def test_each_form_is_compiled_once_and_told(tmp_path):
    train(tmp_path)
    told = [event["kind"] for event in read_events(tmp_path / "records")]
    assert (told.count("compiled"), told.count("recompiled")) == (1, 2)


def test_the_place_is_kept_whatever_form_comes_next(tmp_path):
    whole = train(tmp_path / "whole")
    for steps in (1, 4, 5, len(LENGTHS)):
        cut = train(tmp_path / "cut", steps=steps)
    assert_equal_bits(cut.state, whole.state)


@pytest.mark.parametrize("rep", [{"n": 1}, {"n": 8, "strategy": strategies.fsdp()}])
def test_the_answer_is_the_same_on_any_number_of_devices(tmp_path, rep):
    found = train(tmp_path / "found", rep=replicas(rep.pop("n"), **rep))
    whole = train(tmp_path / "whole")
    np.testing.assert_allclose(found.state["w"], whole.state["w"], rtol=1e-5)


def test_microbatches_are_cut_from_each_form(tmp_path):
    found = train(tmp_path / "found", accumulate=2)
    whole = train(tmp_path / "whole")
    np.testing.assert_allclose(found.state["w"], whole.state["w"], rtol=1e-5)


def read(dataset, **options):
    with open_input(
        dataset, replicated_layout(2), options=InputOptions(**options)
    ) as x:
        return list(x)


def test_the_last_batch_may_be_short_in_any_form():
    batches = read(buckets(last=5), shapes=SHAPES, epochs=1)
    assert [batch.examples for batch in batches] == [*[8] * 7, 5]
    assert [batch.value["x"].shape[1] for batch in batches] == LENGTHS


@pytest.mark.parametrize("at", [0, 1])
def test_a_form_that_was_not_stated_is_refused(at):
    dataset = [bucket(4, 0), bucket(4, 1)]
    dataset[at] = bucket(5, 2)
    message = rf"one of the 3 forms .* got `mask` float32\[\*,5\], .* \(batch {at}\)"
    with pytest.raises(BatchError, match=message):
        read(dataset, shapes=SHAPES, epochs=1)


def test_a_mixture_of_two_forms_is_refused():
    mixed = bucket(4, 0) | {"mask": np.ones((8, 6), np.float32)}
    with pytest.raises(BatchError, match="one of the 3 forms"):
        read([bucket(4, 1), mixed], shapes=SHAPES, epochs=1)


@pytest.mark.parametrize("dtype", [np.int32, np.float16])
def test_dtypes_stay_those_of_the_first_batch(dtype):
    other = {name: leaf.astype(dtype) for name, leaf in bucket(6, 0).items()}
    with pytest.raises(BatchError, match="one of the 3 forms"):
        read([bucket(4, 1), other], shapes=SHAPES, epochs=1)


@pytest.mark.parametrize(
    "shapes", [3, [3], [{"x": 4}], [{"x": (4.5,)}], [{"x": (4,)}, {"y": (4,)}], [{}]]
)
def test_what_states_no_forms_is_refused(shapes):
    with pytest.raises(ArgumentError, match="`shapes` must be a list of dicts"):
        InputOptions(shapes=shapes)


def test_calls_of_several_steps_are_refused():
    with pytest.raises(ArgumentError, match="`steps_per_call` must be 1 with `shapes`"):
        InputOptions(shapes=SHAPES, steps_per_call=2)


def test_memory_is_not_fitted_to_the_first_of_several_forms(tmp_path):
    options = {"auto_microbatch": True, "memory_limit_bytes": 1 << 30}
    with pytest.raises(ArgumentError, match="left out with `auto_microbatch=True`"):
        train(tmp_path, **options)


def test_forms_where_batches_are_joined_are_refused():
    shapes = InputOptions(shapes=SHAPES)
    with pytest.raises(ArgumentError, match="left out where examples are cut anew"):
        replicas(2).evaluate(lambda s, b: {}, buckets(), state={}, inputs=shapes)
