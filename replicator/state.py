"""State of a run: born under its shardings, never whole in one place first."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from replicator.mesh import replicated
from replicator.per_replica import per_replica_specs, repeat_own
from replicator.protocols import InitFn, Key, PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "key", "user"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """All that one update hands to the next, and all that a checkpoint holds.

    Attributes:
      step: Updates done, an int32 scalar.
      key: Data of the run's random key (`jax.random.key_data`); a step gets
        `fold_in(fold_in(key, step), microbatch)`. A typed key would keep JAX from its
        fast way of calling a compiled program: 300 µs a step.
      user: The state that the user's step sees.
    """

    step: jax.Array
    key: jax.Array
    user: PyTree


def state_shardings(state: PyTree, mesh: Mesh) -> PyTree:
    """Return a prefix tree of shardings: declared leaves cut over replicas."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), per_replica_specs(state)
    )


def init_state(init_fn: InitFn, mesh: Mesh, *, key: Key) -> PyTree:
    """Run `init_fn(key)` once, compiled, with its result born on every device.

    Args:
      init_fn: Returns one replica's state; any pytree of arrays.
      mesh: The replicas.
      key: The key it gets.

    Returns:
      The state; declared `PerReplica` leaves have a leading replica axis.
    """

    def born(key: Key) -> PyTree:
        state = jax.tree.map(jnp.asarray, init_fn(key))
        return repeat_own(state, num_replicas=mesh.size)

    shardings = state_shardings(jax.eval_shape(born, key), mesh)
    return jax.jit(born, out_shardings=shardings)(key)


def init_run(init_fn: InitFn, mesh: Mesh, *, seed: int) -> RunState:
    """Return the state of a run at step 0.

    Args:
      init_fn: Returns one replica's state.
      mesh: The replicas.
      seed: Of the run's random key, from which `init_fn`'s key is split off.

    Returns:
      The run's state on the mesh.
    """
    for_init, for_steps = jax.random.split(jax.random.key(seed))
    return RunState(
        step=jax.device_put(jnp.zeros((), jnp.int32), replicated(mesh)),
        key=jax.device_put(jax.random.key_data(for_steps), replicated(mesh)),
        user=init_state(init_fn, mesh, key=for_init),
    )
