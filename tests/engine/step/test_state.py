"""State is born on every device, from a seed that alone decides it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replicator
from replicator import PerReplica, strategies
from replicator.engine.step.state import as_arrays, first_run, run_keys
from replicator.errors import ArgumentError
from tests.helpers import replicated_layout
from tests.steps import assert_equal_bits, regression_batch, replicas


def init_both(key):
    params = {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)}
    return {"params": params, "own": PerReplica(jnp.arange(3.0))}


def test_it_is_whole_on_every_device():
    state = replicas(8).init(init_both)
    for leaf in jax.tree.leaves(state["params"]):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.devices()) == 8


def test_declared_leaves_are_born_cut_over_replicas():
    own = replicas(8).init(init_both)["own"].value
    assert own.shape == (8, 3)
    assert [shard.data.shape for shard in own.addressable_shards] == [(1, 3)] * 8


@pytest.mark.parametrize("n", [1, 2])
def test_it_does_not_depend_on_the_number_of_replicas(n):
    eight = replicas(8).init(init_both, seed=3)["params"]
    assert_equal_bits(replicas(n).init(init_both, seed=3)["params"], eight)


def test_it_depends_on_the_seed():
    one, other = (replicas(2).init(init_both, seed=s)["params"]["w"] for s in (0, 1))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**40 + 3, np.uint32(2**32 - 1)])
def test_its_keys_are_those_of_jax(seed):
    wanted = jax.random.key_data(jax.random.split(jax.random.key(seed)))
    assert_equal_bits([jax.random.key_data(key) for key in run_keys(seed)], [*wanted])


def test_its_keys_are_of_the_kind_that_is_asked_for_by_now():
    run_keys(0)
    with jax.default_prng_impl("rbg"):
        kinds = [str(jax.random.key_impl(key)) for key in run_keys(0)]
    assert kinds == ["rbg", "rbg"]


def test_keys_of_another_seed_compile_nothing(caplog):
    run_keys(0)
    with jax.log_compiles():
        run_keys(1)
    assert not caplog.records


def test_a_seed_of_more_than_64_bits_is_refused():
    with pytest.raises(ArgumentError, match="`seed` must be a whole number of 64 bits"):
        run_keys(2**63)


def test_python_numbers_become_arrays():
    state = replicas(2).init(lambda key: {"n": 3, "x": 0.5})
    assert state["n"].dtype == jnp.int32
    assert float(state["x"]) == 0.5


def test_an_nnx_module_is_born_whole():
    model = replicas(8).init(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))
    assert isinstance(model, nnx.Linear)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(model))


def test_init_runs_compiled_and_once():
    calls = []

    def init_fn(key):
        calls.append(isinstance(key, jax.core.Tracer))
        return {"w": jnp.zeros(3)}

    replicas(8).init(init_fn)
    assert all(calls)


def test_a_run_and_an_own_loop_start_alike():
    run = first_run(init_both, replicated_layout(2), seed=5).born()
    assert_equal_bits(run.user, replicas(2).init(init_both, seed=5))
    assert int(run.step) == 0


def key_recorder(state, batch, key):
    count = state["count"]
    drawn = state["drawn"].at[count].set(jax.random.key_data(key))
    return {"count": count + 1, "drawn": drawn}, {}


def init_recorder(key):
    return {"count": jnp.zeros((), jnp.int32), "drawn": jnp.zeros((4, 2), jnp.uint32)}


def recorded(n=2, **arguments):
    """Return the key of each of the four steps of a run."""
    result = replicas(n).run(
        key_recorder,
        [regression_batch()],
        init_fn=init_recorder,
        steps=4,
        seed=9,
        display=False,
        **arguments,
    )
    return np.asarray(result.state["drawn"])


def test_the_key_of_a_step_is_folded_from_the_runs_key_and_its_number():
    run = first_run(init_recorder, replicated_layout(1), seed=9).born()
    expected = [jax.random.fold_in(jax.device_get(run.key), step) for step in range(4)]
    np.testing.assert_array_equal(
        recorded(), [jax.random.key_data(key) for key in expected]
    )


@pytest.mark.parametrize(
    "arguments", [{"n": 1}, {"n": 8}, {"steps_per_call": 2}, {"debug": True}]
)
def test_keys_do_not_depend_on_how_a_run_is_executed(arguments):
    np.testing.assert_array_equal(recorded(**arguments), recorded())


def test_an_array_of_numpy_stays_on_the_host_until_it_is_put_where_it_lies():
    found = as_arrays({"w": np.ones(3), "n": 1, "of jax": jnp.ones(2)})
    assert type(found["w"]) is np.ndarray
    assert found["w"].dtype == jnp.asarray(np.ones(3)).dtype
    assert isinstance(found["n"], jax.Array)


@pytest.mark.parametrize("strategy", [None, strategies.fsdp()], ids=["all", "fsdp"])
@pytest.mark.parametrize(
    "ask", [lambda key: replicator.replica_id(), replicator.replica_key]
)
def test_asking_in_init_fn_which_replica_this_is_names_put(ask, strategy):
    rep = replicas(2, strategy=strategy)
    with pytest.raises(ArgumentError, match=r"in a step, got .* `init_fn`.*`rep.put"):
        rep.init(lambda key: {"own": ask(key)})
    with pytest.raises(ArgumentError, match=r"`rep\.put"):
        rep.inspect(lambda state, _: (state, {}), lambda key: {"own": ask(key)}, {})


def test_replicas_get_states_of_their_own_by_put(key):
    def game(key):
        return jax.random.normal(key, (3,))

    rep = replicas(4)
    own = replicator.PerReplica(jax.vmap(game)(jax.random.split(key, 4)))
    state = rep.put(rep.init(lambda key: {"games": jnp.zeros(())}) | {"own": own})
    assert len({row.tobytes() for row in jax.device_get(state["own"].value)}) == 4
