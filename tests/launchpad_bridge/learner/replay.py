"""A linear step on a replay table; its priorities say which row is which."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
import replicator.launchpad_bridge as lp

CPU = lp.Resources(env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"})
ROWS, WIDTH = 64, 3
TIMEOUT_S = 240.0
optimizer = replicator.wrap_optimizer(optax.sgd(0.05, momentum=0.9))


def init_fn(key):
    params = {"w": jax.random.normal(key, (WIDTH,))}
    return {"params": params, "opt": optimizer.init(params)}


def step_fn(state, batch):
    rows, weights = batch["trajectories"], 1.0 / (ROWS * batch["probability"])

    def loss_fn(params):
        errors = rows["x"] @ params["w"] - rows["reward"]
        return jnp.mean(weights * errors**2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "priority": replicator.Concat(rows["id"] + 0.5)}
    return {"params": params, "opt": opt}, metrics


class Noted(lp.ReplayTable):
    """A table that notes which rows get which priorities."""

    def __init__(self, capacity):
        super().__init__(capacity, limiter=lp.RateLimiter(min_size=capacity))
        self._ids = {}
        self._updates = []

    def take(self, count, **options):
        taken = super().take(count, **options)
        ids = taken.trajectories["id"].tolist()
        self._ids.update(zip(taken.keys.tolist(), ids, strict=True))
        return taken

    def update_priorities(self, keys, values):
        super().update_priorities(keys, values)
        self._updates += zip(keys.tolist(), values.tolist(), strict=True)

    def told(self):
        """Return ids of rows, and the priorities that they got, in order."""
        pairs = [(self._ids[key], value) for key, value in self._updates]
        return np.array(pairs).T


def filled(versions=(0,)):
    """Return a table with all rows, each with its number as `id`; of these versions."""
    table, rng = Noted(ROWS), np.random.default_rng(1)
    rows = {
        "id": np.arange(ROWS, dtype=np.float32),
        "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "reward": rng.normal(size=ROWS).astype(np.float32),
    }
    size = ROWS // len(versions)
    for place, version in enumerate(versions):
        part = slice(place * size, (place + 1) * size)
        some = {name: leaf[part] for name, leaf in rows.items()}
        table.insert(some, actor="by hand", version=version)
    return table


def program_of(
    table=None, *, step_fn=step_fn, steps=4, restart=None, versions=(0,), **options
):
    """Return a program of a learner and its table, a node of its own by default."""
    program = lp.Program("replay")
    if table is None:
        table = program.add_node(lp.CourierNode(filled, versions), label="table")
    options = {"replicas": 1, "priorities": "priority", "display": False, **options}
    node = lp.ReplicatedLearnerNode(
        step_fn, init_fn, steps=steps, batch_size=8, table=table, **options
    )
    with program.group("learner", resources=CPU, restart=restart):
        program.add_node(node)
    return program


def learnt(launcher="threads", **options):
    """Return a learner's result, and the keys and values that its table got."""
    program = program_of(**options)
    with lp.launch(program, launcher) as run:
        table = program.groups["table"][0].create_handle().dereference()
        run.wait(TIMEOUT_S, labels=["learner"])
        return run.results_of("learner")[0], table.told()
