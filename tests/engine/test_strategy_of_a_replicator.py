"""`Replicator(strategy=...)`: runs, checkpoints, evaluations and doors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator import Replicator, strategies, wrap_optimizer
from replicator.engine.evaluation.blocks import BlockRunner
from replicator.engine.metrics.declared import Concat, Sum
from replicator.errors import ArgumentError, BatchError
from tests.steps import adam, mlp, mlp_loss, regression_batch, trainer

FSDP = strategies.fsdp(whole_below_bytes=0)
init_fn, step_fn = trainer(adam())
batch = regression_batch()


def over(strategy, **options):
    return Replicator(strategy=strategy, compilation_cache=False, **options)


def run(strategy, steps, **options):
    options |= {"steps": steps, "init_fn": init_fn, "display": False}
    return over(strategy).run(step_fn, [batch] * 8, **options)


def assert_close(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def alone(steps):
    state = init_fn(None)
    for _ in range(steps):
        state, _ = step_fn(state, batch)
    return state


def test_a_run_gives_the_state_of_one_device_and_records_its_strategy(tmp_path):
    result = run(FSDP, 3, directory=tmp_path)
    told = json.loads((tmp_path / "run.json").read_text())["arguments"]["strategy"]

    assert_close(result.state["params"], alone(3)["params"])
    assert told["name"] == "fsdp"
    assert told["mesh"] == {"replica": 1, "shard": 8, "model": 1}
    read = {name: value for name, value in told.items() if name in FSDP.as_json()}
    assert strategies.from_json(json.dumps(read)) == FSDP


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(tmp_path):
    later = strategies.zero1(whole_below_bytes=0)
    run(FSDP, 2, checkpoint_dir=tmp_path, checkpoint_every=2)
    result = run(later, 4, checkpoint_dir=tmp_path, checkpoint_every=2)

    assert result.step == 4
    assert_close(result.state["params"], alone(4)["params"])


@pytest.mark.slow
def test_a_state_evaluates_and_predicts_as_on_one_device():
    rep = over(FSDP)
    state = rep.put(init_fn(None))
    found = rep.evaluate(
        lambda state, rows: {
            "loss": (mlp(state["params"], rows["x"]) - rows["y"]) ** 2
        },
        [batch],
        state=state,
    )
    rows = rep.predict(
        lambda state, rows: mlp(state["params"], rows["x"]), [batch], state
    )

    expected = init_fn(None)["params"]
    np.testing.assert_allclose(found["loss"], mlp_loss(expected, batch), rtol=1e-5)
    np.testing.assert_allclose(rows, mlp(expected, batch["x"]), rtol=1e-4, atol=1e-6)


def test_a_wrapped_optimizer_accumulates_to_the_same_update():
    rep = over(FSDP)
    wrapped_init, wrapped_step = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    step = rep.compile(wrapped_step, accumulate=2)
    state, _ = step(rep.init(wrapped_init), batch)
    plain_init, plain_step = trainer(optax.sgd(0.1))

    expected, _ = plain_step(plain_init(None), batch)
    assert_close(state["params"], expected["params"])


@pytest.mark.slow
def test_two_steps_of_a_call_are_two_steps():
    rep = over(FSDP)
    step = rep.compile(step_fn, steps_per_call=2)
    twice = jax.tree.map(lambda leaf: np.stack([leaf] * 2), batch)
    state, _ = step(rep.init(init_fn), twice)

    assert_close(state["params"], alone(2)["params"])


def share(strategy, part):
    """Return which share of a part of the state a device holds."""
    big, wide = (
        {"w": np.zeros((256, 128), np.float32), "b": np.zeros(256)},
        optax.adam(1.0),
    )
    state = over(strategy).init(lambda key: {"params": big, "opt": wide.init(big)})
    leaves = jax.tree.leaves(state[part])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf.nbytes for leaf in leaves)


def test_a_device_holds_its_share_of_what_is_cut():
    cut = {"whole_below_bytes": 0}
    eighth = pytest.approx(1 / 8, rel=0.02)

    assert share(strategies.zero1(**cut), "opt") == eighth
    assert share(strategies.zero1(**cut), "params") == 1
    assert share(strategies.fsdp(**cut), "params") == eighth
    assert share(strategies.fsdp(**cut), "opt") == eighth


DOORS = {
    "ordered": (FSDP, {"reduction": "ordered"}, "`reduction` must be 'fast' under"),
    "no strategy": ("fsdp", {}, "`strategy` must be a `Strategy`, got 'fsdp'"),
    "too many": (strategies.fsdp(shards=16), {}, "must fit 8 devices, got fsdp"),
}


def copies(variables, devices):
    return strategies.data_parallel()


DOORS |= {
    "a builder not called": (strategies.fsdp, {}, r"got the function fsdp. Call it: "),
    "a builder in order": (
        lambda variables, devices: FSDP,
        {"reduction": "ordered"},
        "`reduction` must be 'fast' under",
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_cannot_be_is_refused_at_the_door(door):
    strategy, options, message = DOORS[door]
    with pytest.raises(ArgumentError, match=message):
        over(strategy, **options)


def test_a_rule_that_matches_nothing_is_refused_before_anything_is_made(tmp_path):
    rep = over(strategies.tensor_parallel({"weights/*": ("model",)}))
    match = r"'weights/\*', which matches none of"
    with pytest.raises(ArgumentError, match=match):
        rep.init(init_fn)
    with pytest.raises(ArgumentError, match=match):
        rep.run(step_fn, [batch], init_fn=init_fn, steps=1, directory=tmp_path / "new")
    with pytest.raises(ArgumentError, match=match):
        rep.compile(step_fn)(rep.put(init_fn(None)), batch)
    assert not (tmp_path / "new").exists()


def test_a_builder_of_ones_own_gets_the_variables_of_the_first_state():
    seen = []

    def wide_only(variables, devices):
        seen.append((variables, devices))
        wide = [
            v.path for v in variables if not v.is_optimizer and v.shape[-1:] == (8,)
        ]
        rules = [strategies.Rule(pattern=path, stored="shard") for path in wide]
        return strategies.Rules(rules, replica=2, shard=4, whole_below_bytes=0)

    rep = over(wide_only)
    step = rep.compile(step_fn)
    state, _ = step(rep.init(init_fn), batch)

    assert_close(state["params"], alone(1)["params"])
    assert seen == [(strategies.variables_made_by(init_fn), jax.devices())]
    assert dict(rep.mesh.shape) == {"replica": 2, "shard": 4, "model": 1}
    assert rep.layout.describe()["name"] == "rules"


def test_a_builder_gets_the_variables_of_a_state_that_is_put():
    rep = over(lambda variables, devices: FSDP)
    state = rep.put(init_fn(None))
    assert_close(state, init_fn(None))
    assert rep.mesh.shape["shard"] == 8


def test_a_builder_is_asked_once_and_another_model_is_refused():
    seen = []
    rep = over(lambda variables, devices: seen.append(variables) or FSDP)
    rep.init(init_fn)
    rep.init(trainer(optax.sgd(0.1))[0])  # another optimizer of the same model
    match = "got fsdp made for others: .* Make another `Replicator`"

    def wider(key):
        return {"params": {"w1": jnp.zeros((4, 16))}}

    with pytest.raises(ArgumentError, match=match):
        rep.init(wider)
    with pytest.raises(ArgumentError, match=match):
        rep.run(step_fn, [batch], init_fn=wider, steps=1, display=False)
    assert len(seen) == 1


def test_a_strategy_that_a_builder_reads_stays_bound_to_its_variables():
    other = strategies.variables_of({"w": np.zeros(8, np.float32)})
    rep = over(lambda variables, devices: FSDP.made_for(other))
    with pytest.raises(ArgumentError, match=r"fsdp made for others: `\S+ .*` is "):
        rep.init(init_fn)


@pytest.mark.slow
def test_a_builder_is_asked_before_a_step_is_inspected():
    rep = over(lambda variables, devices: FSDP)
    assert any(
        "all-gather" in name for name in rep.inspect(step_fn, init_fn, batch).counts()
    )


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (copies, "one that partitions where it is a function, got data_parallel"),
        (lambda variables, devices: None, "must return a `Strategy`, got None"),
    ],
)
def test_a_builder_that_returns_no_such_strategy_is_refused(builder, message):
    with pytest.raises(ArgumentError, match=message):
        over(builder).init(init_fn)


def test_a_builder_that_has_seen_no_state_has_no_mesh():
    rep = over(lambda variables, devices: FSDP)
    message = "`strategy` must have seen the variables of a state"
    for asks in (
        lambda: rep.mesh,
        lambda: rep.batches([batch]),
        lambda: rep.compile(step_fn)(init_fn(None), batch),
    ):
        with pytest.raises(ArgumentError, match=message):
            asks()


def test_data_parallel_is_the_engine_of_always():
    assert over(strategies.data_parallel()).num_replicas == 8
    assert over(FSDP).num_replicas == 1


def test_a_plain_optimizer_is_asked_to_be_wrapped_under_accumulation():
    rep = over(FSDP)
    with pytest.raises(ArgumentError, match="wrap_optimizer"):
        rep.compile(step_fn, accumulate=2)(rep.init(init_fn), batch)


def test_sums_of_an_own_loop_are_refused_by_name_in_any_state():
    # Wrapped without the replicator, which could have refused it.
    own_init, own_step = trainer(wrap_optimizer(optax.sgd(0.1), accumulate=4))
    rep = over(FSDP)
    match = "`accumulate` must be 1 for an optimizer .* partitions, got 4"
    with pytest.raises(ArgumentError, match=match):
        rep.init(own_init)
    with pytest.raises(ArgumentError, match=match):
        rep.put(own_init(None))
    with pytest.raises(ArgumentError, match=match):
        rep.run(own_step, [batch], init_fn=own_init, steps=1, display=False)


@pytest.mark.parametrize("strategy", [FSDP, lambda variables, devices: FSDP])
def test_a_first_evaluation_counts_each_example_once_in_blocks_of_any_size(strategy):
    found = over(strategy).evaluate(
        lambda state, rows: {
            "mean": rows["x"].sum(-1),
            "rows": Concat(rows["x"][:, 0]),
            "sum": Sum((rows["x"][:, 0] * rows["mask"]).sum()),
        },
        [{"x": batch["x"][:13]}],
        state=init_fn(None),
        block=3,  # 8 devices share 8
    )
    x = batch["x"][:13]
    np.testing.assert_allclose(found["mean"], x.sum(-1).mean(), rtol=1e-5)
    np.testing.assert_array_equal(found["rows"], x[:, 0])
    np.testing.assert_allclose(found["sum"], x[:, 0].sum(), rtol=1e-5)
    assert found["examples"] == 13


def block_flops(rep):
    """Return what a device computes of a block of 64, by the compiler's count."""
    seen = []
    runner = BlockRunner(
        lambda state, rows, real: jnp.tanh(rows @ state["w"]) @ state["w"],
        rep.layout,
        name="fn",
        block=64,
        check=seen.append,
    )
    state = {"w": np.eye(32, dtype=np.float32)}
    data = [np.ones((64, 32), np.float32)]
    runner.run(state, data, lambda block: None, inputs=None)
    program = runner.programs.run.lower(seen[0].state, seen[0].rows)
    return program.compile().cost_analysis()["flops"]


def test_no_device_computes_the_rows_of_another_in_an_evaluation():
    alone = Replicator(1, compilation_cache=False)
    assert block_flops(over(FSDP)) < 1.2 * block_flops(alone) / 8


def test_a_batch_that_devices_cannot_share_is_refused_as_such():
    rep, state = over(FSDP), init_fn(None)
    uneven = jax.tree.map(lambda leaf: leaf[:12], batch)
    with pytest.raises(BatchError, match="must divide evenly over 8 devices, got 12"):
        rep.compile(step_fn)(rep.put(state), uneven)
    with pytest.raises(BatchError, match="must divide evenly over 8 devices, got 12"):
        rep.run(step_fn, [uneven], init_fn=init_fn, steps=1, display=False)
