"""What a step takes over is there, and stands alone: no state crashes the process."""

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.base.mesh import replicated
from replicator.engine.step.donation import SharedBufferWarning
from tests.steps import regression_batch, replicas

# In a process of its own: where such a buffer is donated, Python ends by a signal, and
# the last line says in which case.
PROGRAM = """
import json, warnings
import replicator
replicator.fake_devices({devices})
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
warnings.simplefilter("error")
rep = replicator.Replicator(compilation_cache=False)
everywhere = NamedSharding(rep.mesh, PartitionSpec())
cut = NamedSharding(rep.mesh, PartitionSpec("replica"))
batch = {{"x": np.ones((8, 2), np.float32)}}

def halved(state, batch, key=None):
    half = lambda x: x / 2 if jnp.issubdtype(x.dtype, jnp.floating) else x * 2
    return jax.tree.map(half, state), {{}}

for name, turns in {shared}.items():
    print(name, end=": ", flush=True)
    here = dict(globals(), step=rep.compile(halved))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for here["turn"] in range(4):
            exec(turns, here)
            jax.block_until_ready(here["state"])
    print(json.dumps([str(each.message) for each in told]), flush=True)
"""
SHARED = {
    "from the first call on": """
        if turn == 0:
            p = jnp.ones(8)
            state = {"w": p, "target": jax.device_put(p, everywhere)}
        state, _ = step(state, batch)
    """,
    "on one device of several": """
        if turn == 0:
            p = jax.device_put(jnp.ones(8), jax.devices()[-1])
            state = {k: jax.device_put(p, everywhere) for k in ("w", "target")}
        state, _ = step(state, batch)
    """,
    "in the middle of a loop": """
        if turn == 0:
            state = {"w": jnp.ones(8), "target": jnp.ones(8)}
        if turn > 1:
            shards = [shard.data for shard in state["w"].addressable_shards]
            state["target"] = jax.make_array_from_single_device_arrays(
                (8,), everywhere, shards
            )
        state, _ = step(state, batch)
    """,
    "with the key": """
        if turn == 0:
            step = rep.compile(lambda state, batch, key: halved(state, batch))
            state = {"key": jax.random.key_data(jax.random.key(0))}
        state = {"key": state["key"].astype("uint32")}
        state, _ = step(state, batch, jax.random.wrap_key_data(state["key"]))
    """,
    "with the batch": """
        if turn == 0:
            rows = jax.jit(lambda: jnp.ones((jax.device_count(), 2)),
                           out_shardings=cut)()
            shards = [shard.data for shard in rows.addressable_shards]
            again = jax.make_array_from_single_device_arrays(rows.shape, cut, shards)
            state = {"last": replicator.PerReplica(again)}
            batch = {"x": rows}
        state, _ = step(state, batch)
        assert float(batch["x"].sum()) == rows.size
    """,
}


@pytest.fixture(scope="module", params=[1, 4], ids="{} devices".format)
def ended(request):
    """Return how the program ended that tries every case on some devices."""
    shared = {name: textwrap.dedent(turns) for name, turns in SHARED.items()}
    program = PROGRAM.format(devices=request.param, shared=shared)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("case", SHARED)
def test_memory_shared_with_the_state_is_copied_and_told_once(case, ended):
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr[-2000:]}"
    lines = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    [told] = json.loads(lines[case])
    assert told.count("shares its memory with") == 1


def doubled(state, batch):
    return jax.tree.map(lambda leaf: 2 * leaf, state), {}


def test_the_warning_names_both_leaves():
    rep, w = replicas(2), jnp.ones(3)
    state = {"w": w, "target": jax.device_put(w, replicated(rep.mesh))}
    with pytest.warns(SharedBufferWarning) as told:
        state, _ = rep.compile(doubled)(state, regression_batch())
    message = "`state/w` shares its memory with `state/target`"
    assert str(told[0].message).startswith(message)
    assert told[0].filename == __file__
    np.testing.assert_array_equal(state["w"], state["target"])


def test_arrays_of_numpy_share_nothing_that_is_donated():
    host = np.ones(3, np.float32)
    state, _ = replicas(2).compile(doubled)({"a": host, "b": host}, regression_batch())
    np.testing.assert_array_equal(state["b"], 2 * host)
    np.testing.assert_array_equal(host, 1)


def test_empty_arrays_share_nothing():
    state = {"a": jnp.zeros((0, 3)), "b": jnp.zeros((0, 3)), "c": jnp.ones(3)}
    state, _ = replicas(2).compile(doubled)(state, regression_batch())
    assert state["a"].shape == (0, 3)


def test_a_leaf_that_went_to_another_place_is_taken():
    step, state = replicas(2).compile(doubled), {"a": jnp.ones(3), "b": jnp.zeros(3)}
    for _ in range(3):
        state, _ = step({"a": state["b"], "b": state["a"]}, regression_batch())
    np.testing.assert_array_equal(state["a"], np.zeros(3))
    np.testing.assert_array_equal(state["b"], np.full(3, 8.0))


def test_an_array_may_be_a_leaf_and_an_input():
    rep = replicas(4)
    step = rep.compile(
        lambda state, batch, key: ({"key": jax.random.fold_in(state["key"], 1)}, {})
    )
    state, rows = {"key": jax.random.key(3)}, jnp.ones((8, 2))
    for _ in range(3):
        state, _ = step(state, {"x": rows}, state["key"])
    expected = jax.random.key(3)
    for _ in range(3):
        expected = jax.random.fold_in(expected, 1)
    assert state["key"] == expected


def test_a_leaf_put_twice_into_a_returned_state_is_taken():
    step, state = replicas(2).compile(doubled), {"a": jnp.ones(3), "b": jnp.zeros(3)}
    state, _ = step(state, regression_batch())
    state, _ = step({**state, "b": state["a"]}, regression_batch())
    np.testing.assert_array_equal(state["b"], np.full(3, 4.0))


def test_a_step_keeps_no_state_alive():
    step = replicas(2).compile(doubled)
    state, _ = step({"a": jnp.ones(31)}, regression_batch())
    del state
    assert not [array for array in jax.live_arrays() if array.shape == (31,)]
