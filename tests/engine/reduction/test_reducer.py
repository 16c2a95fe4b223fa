import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import strategies
from replicator.errors import ArgumentError
from replicator.strategies import Rule
from replicator.testing import assert_replica_invariant
from tests.engine.reduction.problems import (
    batch_of,
    gap,
    init_params,
    losses_of,
    owed_of,
    problem,
    replicator_with,
)

INT8 = {"compress": "int8"}
BY_HOSTS = {"synchronise": "hierarchical"}


def trained(rep, steps=3, *, accumulate=1, batch=None, **options):
    init_fn, step_fn = problem(rep, **options)
    step = rep.compile(step_fn, accumulate=accumulate)
    state = rep.init(init_fn)
    for _ in range(steps):
        state, metrics = step(state, batch_of() if batch is None else batch)
    return state, metrics


@pytest.mark.parametrize(
    ("form", "hosts"),
    [
        ("int8", None),
        pytest.param("bf16", 2, marks=pytest.mark.slow),
        pytest.param("power_sgd(2)", None, marks=pytest.mark.slow),
        pytest.param("power_sgd(2)", 4, marks=pytest.mark.slow),
    ],
)
def test_what_was_sent_and_is_owed_are_the_gradients(form, hosts):
    way = BY_HOSTS if hosts else {}
    rep = replicator_with({"compress": form, **way}, devices_per_host=hosts)
    state, _ = trained(rep, 20)
    assert gap(state) < 1e-5
    assert any(np.any(each) for each in owed_of(state["opt"]).values())


@pytest.mark.slow
@pytest.mark.parametrize("weighted", ["count", "weight"])
def test_replicas_of_different_weight_owe_shares_of_the_update(weighted):
    state, _ = trained(replicator_with(INT8), weighted=weighted)
    assert gap(state) < 1e-5


@pytest.mark.slow
def test_microbatches_are_sent_once_an_update():
    rep = replicator_with(INT8)
    init_fn, step_fn = problem(rep, truth=False)
    sent = [
        rep.inspect(rep.compile(step_fn, accumulate=k), init_fn, batch_of()).counts()[
            "all-to-all replica"
        ]
        for k in (1, 4)
    ]
    assert sent[0] == sent[1] == 3


@pytest.mark.slow
def test_microbatches_add_up_to_the_gradients():
    rep = replicator_with(INT8)
    optimizer = rep.wrap_optimizer(optax.sgd(1.0))

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        grads = jax.grad(lambda p: losses_of(p, batch).mean())(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {}

    first = rep.init(init_fn)
    params = jax.device_get(first["params"])
    state, _ = rep.compile(step_fn, accumulate=4)(first, batch_of())
    true = jax.grad(lambda p: losses_of(p, batch_of()).mean())(params)
    for name, owed in owed_of(state["opt"]).items():
        sent = params[name] - state["params"][name]
        np.testing.assert_allclose(sent + owed, true[name], atol=3e-7)


@pytest.mark.slow
def test_a_loop_of_ones_own_is_sent_once_an_update():
    rep = replicator_with(INT8)
    init_fn, step_fn = problem(rep, accumulate=2)
    step, state = rep.compile(step_fn), rep.init(init_fn)
    for seed in range(4):
        state, _ = step(state, batch_of(seed=seed))
        if seed in (0, 2):
            before = owed_of(state["opt"])
    state["truth"] = jax.tree.map(lambda leaf: leaf / 2, state["truth"])
    assert gap(state) < 1e-5
    assert np.any(before["up"] != owed_of(state["opt"])["up"])


@pytest.mark.parametrize(
    "form", ["int8", pytest.param("power_sgd(2)", marks=pytest.mark.slow)]
)
def test_a_skipped_update_leaves_what_is_owed(form):
    rep = replicator_with({"compress": form})
    init_fn, step_fn = problem(rep, skip_nonfinite=True)
    step = rep.compile(step_fn)
    state, _ = step(rep.init(init_fn), batch_of())
    before = jax.device_get(state["opt"].synchroniser)
    bad = batch_of()
    bad["x"][3, 2] = np.nan
    state, _ = step(state, bad)
    assert int(state["opt"].skipped) == 1
    for kept, leaf in zip(
        jax.tree.leaves(before), jax.tree.leaves(state["opt"].synchroniser), strict=True
    ):
        np.testing.assert_array_equal(kept, leaf)


@pytest.mark.slow
def test_a_run_that_skips_leaves_what_is_owed():
    rep = replicator_with(INT8)
    init_fn, step_fn = problem(rep)
    bad = batch_of()
    bad["x"][3, 2] = np.nan
    options = {"init_fn": init_fn, "on_nonfinite": "skip", "display": False}
    inputs = replicator.InputOptions(allow_nan=True)
    one = rep.run(step_fn, [batch_of()], steps=1, **options)
    two = rep.run(step_fn, [batch_of(), bad], steps=2, inputs=inputs, **options)
    for kept, leaf in zip(
        jax.tree.leaves(one.state["opt"]),
        jax.tree.leaves(two.state["opt"]),
        strict=True,
    ):
        np.testing.assert_array_equal(kept, leaf)


@pytest.mark.slow
def test_what_is_owed_has_no_loss_scale():
    rep = replicator_with(INT8)
    scale = replicator.DynamicLossScale(initial=1024.0, growth_interval=2)
    tx = optax.chain(optax.trace(1.0), optax.scale(0.0))
    optimizer = rep.wrap_optimizer(tx, loss_scale=scale)

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        def loss_fn(params):
            loss = losses_of(params, batch).mean()
            return replicator.scale_loss(loss, state["opt"])

        grads = jax.grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    params = jax.device_get(state["params"])
    for _ in range(5):
        state, _ = step(state, batch_of())
    assert float(state["opt"].scale.value) > 1024
    true = jax.grad(lambda p: losses_of(p, batch_of()).mean())(params)
    for name, owed in owed_of(state["opt"]).items():
        got = state["opt"].inner[0].trace[name] + owed
        np.testing.assert_allclose(got, 5 * true[name], atol=2e-6)


@pytest.mark.slow
def test_each_optimizer_has_its_own_rules():
    rep = replicator_with(Rule(pattern="one/*", compress="int8"))
    one, two = (
        rep.wrap_optimizer(optax.sgd(0.1), name=name) for name in ("one", "two")
    )

    def init_fn(key):
        params = {"one": init_params(key), "two": init_params(key)}
        return params | {"a": one.init(params["one"]), "b": two.init(params["two"])}

    def step_fn(state, batch):
        after = dict(state)
        for name, tx, opt in (("one", one, "a"), ("two", two, "b")):
            grads = jax.grad(lambda p: losses_of(p, batch).mean())(state[name])
            updates, after[opt] = tx.update(grads, state[opt], state[name])
            after[name] = optax.apply_updates(state[name], updates)
        return after, {}

    state, _ = rep.compile(step_fn)(rep.init(init_fn), batch_of())
    assert set(state["a"].synchroniser.owed.value) == {"one/up", "one/bias", "one/down"}
    assert state["b"].synchroniser.owed is None
    assert np.any(state["one"]["up"] != state["two"]["up"])


@pytest.mark.slow
def test_what_is_owed_outlives_a_restore_on_other_replicas(tmp_path):
    options = {"display": False, "checkpoint_dir": tmp_path, "checkpoint_every": 3}
    rules = [
        Rule(pattern="params/up", compress="power_sgd(2)"),
        Rule(pattern="*", compress="int8"),
    ]
    rep = replicator_with(*rules)
    init_fn, step_fn = problem(rep)
    before = rep.run(step_fn, [batch_of()], steps=3, init_fn=init_fn, **options).state
    rep = replicator_with(*rules, n=2)
    init_fn, step_fn = problem(rep)
    session = rep.session(step_fn, [batch_of()], steps=9, init_fn=init_fn, **options)
    with session:
        after = session.state
        for name, owed in owed_of(before["opt"]).items():
            np.testing.assert_allclose(owed, owed_of(after["opt"])[name], atol=1e-8)
        warm = [
            each["opt"].synchroniser.factors["params/up"] for each in (before, after)
        ]
        np.testing.assert_array_equal(*warm)
    result = rep.run(step_fn, [batch_of()], steps=9, init_fn=init_fn, **options)
    assert gap(result.state) < 1e-5


@pytest.mark.slow
def test_several_updates_a_call_are_those_of_single_calls():
    rep = replicator_with(INT8)
    init_fn, step_fn = problem(rep)
    one, _ = trained(rep, 4)
    step = rep.compile(step_fn, steps_per_call=4)
    batches = jax.tree.map(lambda leaf: np.stack([leaf] * 4), batch_of())
    four, _ = step(rep.init(init_fn), batches)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_sums_by_hosts_obey_law_1():
    rep = replicator_with(BY_HOSTS, devices_per_host=2)
    plain, _ = trained(replicator.Replicator(1), weighted="count", truth=False)
    hosts, _ = trained(rep, weighted="count", truth=False, accumulate=2)
    for a, b in zip(
        jax.tree.leaves(plain["params"]), jax.tree.leaves(hosts["params"]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_inspection_shows_hosts_and_narrow_numbers():
    rep = replicator_with({**INT8, **BY_HOSTS}, devices_per_host=2)
    init_fn, step_fn = problem(rep)
    found = rep.inspect(step_fn, init_fn, batch_of())
    kinds = {each.kind: each for each in found.collectives}
    assert kinds["all-to-all"].devices == 4
    assert kinds["all-to-all"].arrays[0].startswith("s8[")


def test_without_rules_the_state_is_as_before():
    opt = replicator.Replicator().wrap_optimizer(optax.sgd(1.0)).init(jnp.ones(2))
    assert opt.synchroniser is None


@pytest.mark.slow
def test_the_mean_loss_that_an_optimizer_takes_goes_whole():
    rep = replicator_with(INT8)
    optimizer = rep.wrap_optimizer(optax.polyak_sgd())

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        fn = jax.value_and_grad(lambda p: losses_of(p, batch).mean())
        loss, grads = fn(state["params"])
        updates, opt = optimizer.update(
            grads, state["opt"], state["params"], value=loss
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    losses = [float(step(state, batch_of())[1]["loss"])]
    assert np.isfinite(losses).all()


def test_exact_rules_are_debugged_on_one_replica():
    rep = replicator_with(BY_HOSTS, devices_per_host=2)
    init_fn, step_fn = problem(rep)
    _, metrics = rep.compile(step_fn, debug=True)(rep.init(init_fn), batch_of())
    assert np.isfinite(metrics["loss"])


def test_gradients_of_another_tree_are_refused():
    tx = replicator_with(INT8).wrap_optimizer(optax.sgd(1.0))
    state = tx.init({"w": jnp.ones(2)})
    with pytest.raises(
        ArgumentError, match=r"`grads` must have the paths .* `params/v`"
    ):
        tx.update({"v": jnp.ones(2)}, state)


def test_strategies_name_the_rules_in_records():
    found = replicator_with(INT8).layout.describe()
    assert found["engine"] == "replicates"
    assert found["rules"][0]["compress"] == "int8"


def test_a_plain_wrapper_under_rules_is_refused():
    rep = replicator_with(INT8)
    init_fn, step_fn = problem(replicator)
    with pytest.raises(ArgumentError, match="got `params` wrapped with no rules"):
        rep.inspect(step_fn, init_fn, batch_of())


def test_a_wrapper_of_another_strategy_is_refused():
    init_fn, step_fn = problem(replicator_with({"compress": "bf16"}))
    with pytest.raises(ArgumentError, match="got `params` wrapped with other rules"):
        replicator_with(INT8).inspect(step_fn, init_fn, batch_of())
    with pytest.raises(ArgumentError, match="got `params` wrapped with other rules"):
        replicator.Replicator().inspect(step_fn, init_fn, batch_of())


def test_a_rule_without_a_parameter_is_refused():
    rep = replicator_with(Rule(pattern="no/such/*", compress="int8"))
    init_fn, step_fn = problem(rep)
    message = r"`rules` must each match .* got 'no/such/\*', .* none of: params/bias"
    with pytest.raises(ArgumentError, match=message):
        rep.inspect(step_fn, init_fn, batch_of())


def test_rules_without_an_optimizer_are_refused():
    def step_fn(state, batch):
        return state, {"mean": replicator.all_reduce(batch["x"].mean())}

    with pytest.raises(ArgumentError, match="none of: a state without a wrapped"):
        replicator_with(INT8).inspect(step_fn, {"w": np.ones(2)}, batch_of())


def test_ordered_sums_take_no_rules():
    with pytest.raises(ArgumentError, match="`reduction` must be 'fast' with rules"):
        replicator_with(INT8, reduction="ordered")


def test_integers_take_no_form():
    rep = replicator_with(INT8)
    with pytest.raises(ArgumentError, match=r"`compress` must be for real .* int32"):
        rep.wrap_optimizer(optax.sgd(1.0)).init({"n": jnp.zeros(3, jnp.int32)})


def test_hosts_must_divide_the_devices():
    with pytest.raises(ArgumentError, match="`devices_per_host` must divide the 8"):
        replicator_with(BY_HOSTS, devices_per_host=3)


def test_a_state_of_another_optimizer_is_refused():
    rep = replicator_with(INT8)
    mine = rep.wrap_optimizer(optax.sgd(1.0))
    other = replicator.wrap_optimizer(optax.sgd(1.0))
    with pytest.raises(ArgumentError, match="`state` must be made by `init` of this"):
        mine.update({"w": jnp.ones(2)}, other.init({"w": jnp.ones(2)}))


@pytest.mark.slow
def test_one_replica_sends_nothing_and_owes_nothing():
    state, _ = trained(replicator_with(INT8, n=1))
    assert not any(np.any(each) for each in owed_of(state["opt"]).values())
    assert gap(state) < 1e-6


@pytest.mark.slow
def test_exact_rules_give_the_same_answer_on_any_number_of_replicas():
    strategy = strategies.data_parallel(
        [Rule(pattern="*", synchronise="hierarchical")], devices_per_host=2
    )
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1), strategy=strategy)

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        fn = jax.value_and_grad(lambda p: losses_of(p, batch).mean())
        loss, grads = fn(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    assert_replica_invariant(step_fn, init_fn, batch_of(), strategy=strategy)
