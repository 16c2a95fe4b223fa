"""Mistakes with random keys: the same numbers for all replicas or microbatches."""

from benchmarks.first_hour.mistake import mistake

RANDOMNESS = (
    mistake(
        "one dropout mask for all replicas",
        """
def dropped(params, batch, key):
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return loss_fn(params, batch | {"x": batch["x"] * kept})
def step_fn(state, batch, key):
    return update(state, jax.grad(dropped)(state["params"], batch, key))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "replica",
        "in dropped",
        remedy="replicator.replica_key",
        report="young-geng/scalax#6",
        quiet=True,
    ),
    mistake(
        "a key in a closure",
        """
key = jax.random.key(0)
def dropped(params, batch):
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return loss_fn(params, batch | {"x": batch["x"] * kept})
def step_fn(state, batch):
    return update(state, jax.grad(dropped)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "key",
        "in dropped",
        remedy="replicator.replica_key",
        report="jax-ml/jax#170",
        quiet=True,
    ),
    mistake(
        "a key in the state that is never split",
        """
def init_fn(key):
    params = init_params(key)
    return {"params": params, "opt": optimizer.init(params), "key": key}
def step_fn(state, batch):
    kept = jax.random.bernoulli(state["key"], 0.5, batch["x"].shape)
    dropped = batch | {"x": batch["x"] * kept}
    new, metrics = update(state, jax.grad(loss_fn)(state["params"], dropped))
    return new | {"key": state["key"]}, metrics
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "key",
        "in step_fn",
        remedy="replicator.replica_key",
        report="patrick-kidger/equinox#498",
        quiet=True,
    ),
    mistake(
        "one mask for all microbatches",
        """
def step_fn(state, batch, key):
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    dropped = batch | {"x": batch["x"] * kept}
    return update(state, jax.grad(loss_fn)(state["params"], dropped))
one = replicator.Replicator(num_replicas=1)
one.run(step_fn, dataset, init_fn=init_fn, accumulate=4)
""",
        "microbatch",
        "in step_fn",
        remedy="example_keys",
        quiet=True,
    ),
    mistake(
        "random numbers of NumPy in a step",
        """
def step_fn(state, batch):
    noise = np.random.standard_normal(batch["x"].shape).astype(np.float32)
    noisy = batch | {"x": batch["x"] + noise}
    return update(state, jax.grad(loss_fn)(state["params"], noisy))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`np.random`",
        "`step_fn`",
        remedy="`key`",
        quiet=True,
    ),
    mistake(
        "a key for each replica, as pmap took it",
        """
def step_fn(state, batch, key):
    return state, {"x": jax.random.normal(key)}
keys = jax.random.split(jax.random.key(0), 8)
rep.compile(step_fn)(rep.init(init_fn), batch, keys)
""",
        "`key`",
        remedy="Pass one of them",
        report="huggingface/diffusers#1451",
    ),
    mistake(
        "a seed in the place of a key",
        """
def step_fn(state, batch, key):
    return state, {"x": jax.random.normal(key)}
rep.compile(step_fn)(rep.init(init_fn), batch, 0)
""",
        "`key`",
        remedy="`jax.random.key(0)`",
    ),
)
