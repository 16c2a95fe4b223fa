"""Mistakes around a step: donated states, transformations, checkpoints, pmap."""

from benchmarks.first_hour.mistake import mistake

LOOPS = (
    mistake(
        "a state that was used before",
        """
state, step = rep.init(init_fn), rep.compile(step_fn)
new, metrics = step(state, batch)
step(state, batch)
""",
        "`state`",
        remedy="Write `state, metrics = step(state, batch)`",
        report="jax-ml/jax#9237",
    ),
    mistake(
        "a state that is evaluated after it was donated",
        """
state, step = rep.init(init_fn), rep.compile(step_fn)
new, metrics = step(state, batch)
rep.evaluate(eval_fn, dataset, state=state["params"])
""",
        "`state`",
        remedy="Write `state, metrics = step(state, batch)`",
        report="jax-ml/jax#7144",
    ),
    mistake(
        "one array twice in a state",
        """
def init_fn(key):
    params = init_params(key)
    return {"params": params, "opt": optimizer.init(params), "average": params}
result = rep.run(step_fn2 := lambda s, b: (s | step_fn(s, b)[0], {}), dataset,
                 init_fn=init_fn)
print(np.round(result.state["params"]["w"], 5))
""",
        right="""
result = rep.run(step_fn, dataset, init_fn=init_fn)
print(np.round(result.state["params"]["w"], 5))
""",
        report="liesel-devs/liesel#272",
    ),
    mistake(
        "`jit` around a compiled step",
        """
step = jax.jit(rep.compile(step_fn))
step(rep.init(init_fn), batch)
""",
        "`step`",
        "jit",
        remedy="Call it directly",
    ),
    mistake(
        "`init` under `jit`",
        "jax.jit(lambda: rep.init(init_fn))()",
        "`rep.init`",
        remedy="Call it directly",
    ),
    mistake(
        "`grad` through a compiled step",
        """
step, state = rep.compile(step_fn), rep.init(init_fn)
jax.grad(lambda s: step(s, batch)[1]["loss"], allow_int=True)(state)
""",
        "`step`",
        "grad",
        remedy="Call it directly",
    ),
    mistake(
        "`jit` switched off to see values",
        """
with jax.disable_jit():
    rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`jax.disable_jit`",
        remedy="`debug=True`",
    ),
    mistake(
        "a run in a step",
        """
def step_fn(state, batch):
    rep.run(step_fn, [batch], init_fn=init_fn)
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`rep.run`",
        remedy="Call it directly",
    ),
    mistake(
        "`pmap` in a step",
        """
def step_fn(state, batch):
    return state, {"x": jax.pmap(lambda x: x.mean())(batch["x"])}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "jax.pmap",
        remedy="`jax.vmap`",
    ),
    mistake(
        "a value of a step that is kept outside",
        """
seen = []
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    seen.append(loss)
    return update(state, grads, sum(seen))
step, state = rep.compile(step_fn), rep.init(init_fn)
state, _ = step(state, batch)
step(state, {name: leaf[:16] for name, leaf in batch.items()})
""",
        "`step_fn`",
        "left outside",
        remedy="Return it",
        report="world-modelz/dreamax#14",
    ),
    mistake(
        "two runs in one directory",
        """
with tempfile.TemporaryDirectory() as folder:
    rep.run(step_fn, dataset, init_fn=init_fn, checkpoint_dir=folder)
    rep.run(step_fn, dataset * 2, init_fn=lambda key: {"w": jnp.zeros(5)},
            checkpoint_dir=folder)
""",
        "`user/w`",
        remedy="directory",
        quiet=True,
    ),
    mistake(
        "a second run that has nothing left to do",
        """
with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):
        result = rep.run(step_fn, dataset, init_fn=init_fn, checkpoint_dir=folder)
print(result.step, np.round(result.metrics["loss"], 4))
""",
        right="""
result = rep.run(step_fn, dataset, init_fn=init_fn)
print(result.step, np.round(result.metrics["loss"], 4))
""",
        quiet=True,
    ),
    mistake(
        "a loss that becomes NaN",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, jax.tree.map(lambda g: g * 1e30, grads), loss)
rep.run(step_fn, dataset * 4, init_fn=init_fn)
""",
        "`gradient_norm`",
        "step 1",
        remedy="Look at the batch and the learning rate",
        quiet=True,
    ),
    mistake(
        "`pmap` of ours over too many rows",
        """
double = replicator.compat.pmap(lambda x: 2 * x)
double(np.zeros((16, 3)))
""",
        "`<lambda>`",
        "16",
        remedy="`jax.vmap` inside",
        report="jax-ml/jax#2949",
    ),
    mistake(
        "`pmap` of ours over arguments of different lengths",
        """
multiply = replicator.compat.pmap(lambda a, b: a * b)
multiply(np.zeros((8, 3)), np.zeros((4, 3)))
""",
        "`b`",
        "4",
        remedy="axis",
        report="jax-ml/jax#1382",
    ),
    mistake(
        "a law that a step breaks",
        """
def step_fn(state, batch):
    own = jnp.where(replicator.replica_id() == 0, 2.0, 1.0)
    grads = jax.grad(lambda p: own * loss_fn(p, batch))(state["params"])
    return update(state, grads)
testing.assert_replica_invariant(step_fn, init_fn, batch, replicas=(1, 2),
                                 accumulate=(1,), at_steps=(0, 1))
""",
        "gradient",
        "and on 2",
        remedy="mean",
        quiet=True,
    ),
    mistake(
        "a test of one number of replicas that is no list",
        "testing.assert_replica_invariant(step_fn, init_fn, batch, replicas=8)",
        "`replicas`",
        "8",
        remedy="`replicas=(8,)`",
    ),
    mistake(
        "an inspection without a batch",
        "rep.inspect(step_fn, init_fn)",
        "`batch`",
        remedy="Pass",
    ),
    mistake(
        "devices that are asked for too late",
        """
jax.devices()
replicator.fake_devices(16)
""",
        "`fake_devices`",
        "16",
        remedy="before the first array",
    ),
    mistake(
        "no fake device",
        "replicator.fake_devices(0)",
        "`count`",
        "0",
        remedy="Use 8",
    ),
)
