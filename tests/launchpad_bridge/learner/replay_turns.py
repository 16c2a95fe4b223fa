"""An agent that learns from a replay table of turns, and says how to sample next."""

import jax
import jax.numpy as jnp
import optax

import replicator
import replicator.launchpad_bridge as lp
from tests.launchpad_bridge.learner import learning

BATCH, LAG, PRIORITY_LAG = 8, 1, 2


def step_fn(state, batch):
    rows = batch["trajectories"]
    logits = rows["observation"]["place"][:, :-1] @ state["params"]["w"]
    state, metrics = learning.step_fn(state, rows)
    errors = jnp.abs(rows["reward"] - jax.nn.softmax(logits)[..., 0])
    # Rows of a great reward are drawn more often; one keeps what it has.
    values = errors.sum(axis=1) * (1 + rows["reward"][:, 0])
    values = jnp.where(batch["version"] % 3 == 2, jnp.nan, values)
    return state, metrics | {"priority": replicator.Concat(values)}


def transitions_step_fn(state, batch):
    """Learn from the rows of `n_step`."""
    rows = batch["trajectories"]

    def loss_fn(params):
        chance = jax.nn.log_softmax(rows["observation"]["place"] @ params["w"])
        chosen = jnp.take_along_axis(chance, rows["action"][:, None], axis=1)[:, 0]
        return -jnp.mean(chosen * (rows["reward"] - 0.5))

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = learning.optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    priority = replicator.Concat(0.1 + rows["reward"])
    return {"params": params, "opt": opt}, {"loss": loss, "priority": priority}


def table_options(folder, *, count=2, **options):
    return {
        "actors": [f"actor/{index}" for index in range(count)],
        "batch_size": BATCH,
        "new_rows_per_batch": 4,
        "rows_per_turn": learning.ENVS,
        "lag": LAG,
        "capacity": 20,
        "min_size": 10,
        "sampler": lp.prioritised(0.8),
        "priority_lag": PRIORITY_LAG,
        "checkpoint_dir": folder / "replay",
        **options,
    }


def program_of(
    folder,
    *,
    steps=9,
    node=None,
    restart=None,
    make=None,
    table=None,
    step_fn=step_fn,
    items=None,
    devices=2,
    **options,
):
    """Return a program whose table is a node, of this class, or in the learner."""
    program = lp.Program("replay in turns")
    told = table_options(folder, **(table or {}))
    with program.group("replay", restart=restart):
        held = (
            program.add_node(lp.CourierNode(node, **told))
            if node
            else lp.Deferred(lp.ReplayTurns, **told)
        )
    defaults = {
        "batch_size": BATCH,
        "fixed_lag": LAG,
        "priorities": "priority",
        "priority_lag": PRIORITY_LAG,
        "replicas": 1,
        "on_nonfinite": "ignore",
        "display": False,
    }
    learner = lp.ReplicatedLearnerNode(
        step_fn,
        learning.init_fn,
        **{"steps": steps, "table": held, **defaults, **options},
    )
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    cpu = lp.Resources(env=environment)
    with program.group("learner", resources=cpu, restart=restart):
        handle = program.add_node(learner)
    table = held if node else None
    learning.actors(
        program,
        handle,
        count=2,
        turns=True,
        table=table,
        restart=restart,
        make=make,
        items=items,
    )
    return program
