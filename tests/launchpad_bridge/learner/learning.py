"""A small agent for learners: a linear policy for the counter environment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.acting.serial_environments import from_gymnasium_envs
from tests.launchpad_bridge.acting.counter import WIDTH, GoesBack, initial_core, policy

UNROLL, ENVS = 4, 2
optimizer = replicator.wrap_optimizer(optax.sgd(0.05, momentum=0.9))


def make_environment(index):
    return from_gymnasium_envs([GoesBack] * ENVS)


def init_fn(key):
    params = {"w": 0.1 * jax.random.normal(key, (WIDTH, 2))}
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params, rows):
    logits = rows["observation"]["place"][:, :-1] @ params["w"]
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), rows["action"][..., None], axis=-1
    )[..., 0]
    return -jnp.mean(chosen * (rows["reward"] - 0.5))


def step_fn(state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], rows)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss}


def actors(
    program,
    learner,
    *,
    count,
    table=None,
    turns=False,
    restart=None,
    make=None,
    items=None,
    label="actor",
):
    """Add actors called actor/0, actor/1, ..."""
    with program.group(label, restart=restart):
        for index in range(count):
            node = lp.PyClassNode(
                lp.Actor,
                make or make_environment,
                policy,
                initial_core,
                learner,
                index=index,
                unroll_length=UNROLL,
                table=table,
                is_deterministic=turns,
                items=items,
            )
            program.add_node(node)


def turns(count, batch_size, lag=1):
    """Return the table for actors that take turns."""
    return lp.Deferred(
        lp.TrajectoryTurns,
        [f"actor/{index}" for index in range(count)],
        batch_size=batch_size,
        rows_per_turn=ENVS,
        lag=lag,
    )


def rows(count):
    """Return trajectories as an actor would insert them."""
    return {
        "observation": {"place": np.ones((count, UNROLL + 1, WIDTH), np.float32)},
        "action": np.zeros((count, UNROLL), np.int32),
        "reward": np.ones((count, UNROLL), np.float32),
    }
