"""Mistakes in what `run` and `Replicator` are given."""

from benchmarks.first_hour.mistake import mistake

ARGUMENTS = (
    mistake(
        "run without a first state",
        "rep.run(step_fn, dataset)",
        "`init_fn`",
        "`step_fn`",
        remedy="def init_fn(key):",
    ),
    mistake(
        "two first states",
        "rep.run(step_fn, dataset, init_fn=init_fn, init_state={'w': np.ones(3)})",
        "`init_fn`",
        "`init_state`",
        remedy="Pass `init_fn`",
    ),
    mistake(
        "a step that was called",
        """
state = init_fn(jax.random.key(0))
rep.run(step_fn(state, batch), dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "tuple",
        remedy="Pass the function itself",
    ),
    mistake(
        "a first state in the place of its function",
        "rep.run(step_fn, dataset, init_fn=init_fn(jax.random.key(0)))",
        "`init_fn`",
        "dict",
        remedy="Pass the function itself",
    ),
    mistake(
        "an init_fn without a key",
        """
def init_fn():
    return {"params": init_params(jax.random.key(0))}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`init_fn`",
        "(key)",
        remedy="Write `def init_fn(key)`",
    ),
    mistake(
        "an init_fn without return",
        """
def init_fn(key):
    params = init_params(key)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`init_fn`",
        "None",
        remedy="`return`",
    ),
    mistake(
        "a name in the state",
        """
def init_fn(key):
    return {"params": init_params(key), "name": "mlp"}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`init_fn`",
        "`name`",
        remedy="Keep it out of the state",
    ),
    mistake(
        "a function in the state",
        """
def init_fn(key):
    return {"params": init_params(key), "apply": loss_fn}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`init_fn`",
        "`apply`",
        remedy="Keep it out of the state",
    ),
    mistake(
        "a step of the state alone",
        """
def step_fn(state):
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "(state, batch)",
        remedy="Write `def step_fn(state, batch)`",
    ),
    mistake(
        "a misspelt option",
        "rep.run(step_fn, dataset, init_fn=init_fn, step=3)",
        "`step`",
        remedy="`steps`",
    ),
    mistake(
        "an option of another framework",
        "rep.run(step_fn, dataset, init_fn=init_fn, batch_size=64)",
        "`batch_size`",
        remedy="`dataset`",
    ),
    mistake(
        "no dataset",
        "rep.run(step_fn, init_fn=init_fn)",
        "dataset",
        remedy="`run(step_fn, dataset",
    ),
    mistake(
        "a dataset that is None",
        "rep.run(step_fn, None, init_fn=init_fn)",
        "`dataset`",
        remedy="Pass the batches",
    ),
    mistake(
        "steps as text",
        "rep.run(step_fn, dataset, init_fn=init_fn, steps='1000')",
        "`steps`",
        "'1000'",
        remedy="Pass an `int`",
    ),
    mistake(
        "steps as a float",
        "rep.run(step_fn, dataset, init_fn=init_fn, steps=1e3)",
        "`steps`",
        "1000.0",
        remedy="Pass an `int`",
    ),
    mistake(
        "negative steps, as for ever",
        "rep.run(step_fn, dataset, init_fn=init_fn, steps=-1)",
        "`steps`",
        "-1",
        remedy="`steps=None`",
    ),
    mistake(
        "no microbatch",
        "rep.run(step_fn, dataset, init_fn=init_fn, accumulate=0)",
        "`accumulate`",
        "0",
        remedy="Use 1",
    ),
    mistake(
        "microbatches as text",
        "rep.compile(step_fn, accumulate='4')",
        "`accumulate`",
        "'4'",
        remedy="Use 4",
    ),
    mistake(
        "a seed that is a key",
        "rep.run(step_fn, dataset, init_fn=init_fn, seed=jax.random.key(0))",
        "`seed`",
        remedy="Use 0",
    ),
    mistake(
        "a seed that is text",
        "rep.run(step_fn, dataset, init_fn=init_fn, seed='a')",
        "`seed`",
        "'a'",
        remedy="Use 0",
    ),
    mistake(
        "more replicas than devices",
        "replicator.Replicator(num_replicas=16)",
        "`num_replicas`",
        "16",
        remedy="`replicator.fake_devices(16)`",
    ),
    mistake(
        "a platform in the place of devices",
        "replicator.Replicator(devices='gpu')",
        "`devices`",
        "'gpu'",
        remedy="`jax.devices('gpu')`",
    ),
    mistake(
        "a number in the place of devices",
        "replicator.Replicator(devices=4)",
        "`devices`",
        "4",
        remedy="`jax.devices()[:4]`",
    ),
    mistake(
        "a strategy by its name",
        "replicator.Replicator(strategy='fsdp')",
        "`strategy`",
        "'fsdp'",
        remedy="`strategies.fsdp()`",
    ),
    mistake(
        "a strategy that was not called",
        """
rep = replicator.Replicator(strategy=strategies.fsdp)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`strategy`",
        "fsdp",
        remedy="Call it",
    ),
    mistake(
        "a reduction that is none",
        "replicator.Replicator(reduction='mean')",
        "`reduction`",
        "'mean'",
        remedy="'fast'",
    ),
    mistake(
        "a hook that is not in a list",
        "rep.run(step_fn, dataset, init_fn=init_fn, hooks=print)",
        "`hooks`",
        remedy="list",
    ),
    mistake(
        "a function as a hook",
        "rep.run(step_fn, dataset, init_fn=init_fn, hooks=[lambda step: print(step)])",
        "`hooks`",
        remedy="`Callback(",
    ),
    mistake(
        "input options as a dict",
        "rep.run(step_fn, dataset, init_fn=init_fn, inputs={'epochs': 2})",
        "`inputs`",
        "epochs",
        remedy="InputOptions(",
    ),
    mistake(
        "no epoch",
        "rep.run(step_fn, dataset, init_fn=init_fn, inputs=InputOptions(epochs=0))",
        "`epochs`",
        "0",
        remedy="Use 1",
    ),
    mistake(
        "epochs as an option of the run",
        "rep.run(step_fn, dataset, init_fn=init_fn, epochs=2)",
        "`epochs`",
        remedy="`inputs`",
    ),
    mistake(
        "steps among the input options",
        "rep.run(step_fn, dataset, init_fn=init_fn, inputs=InputOptions(steps=2))",
        "`steps`",
        "2",
        remedy="Pass `steps=2`",
    ),
    mistake(
        "an evaluation without data",
        "rep.run(step_fn, dataset, init_fn=init_fn, eval_fn=eval_fn, eval_every=1)",
        "`eval_dataset`",
        remedy="Pass it",
    ),
    mistake(
        "an evaluation every no step",
        """
rep.run(step_fn, dataset, init_fn=init_fn,
        eval_fn=eval_fn, eval_dataset=dataset, eval_every=0)
""",
        "`eval_every`",
        "0",
        remedy="Use 1",
    ),
    mistake(
        "a rule for checkpoints without a directory",
        "rep.run(step_fn, dataset, init_fn=init_fn, retention=options.Retention())",
        "`checkpoint_dir`",
        "`retention`",
        remedy="Pass it",
    ),
    mistake(
        "a trace without a directory",
        "rep.run(step_fn, dataset, init_fn=init_fn, profile=range(1, 3))",
        "`directory`",
        remedy="Pass it",
    ),
    mistake(
        "an action on NaN that is none",
        "rep.run(step_fn, dataset, init_fn=init_fn, on_nonfinite='stop')",
        "`on_nonfinite`",
        "'stop'",
        remedy="'raise'",
    ),
    mistake(
        "a rollback without checkpoints",
        "rep.run(step_fn, dataset, init_fn=init_fn, on_nonfinite='rollback')",
        "`checkpoint_dir`",
        remedy="Pass it",
    ),
    mistake(
        "a session that is not opened",
        """
session = rep.session(step_fn, dataset, init_fn=init_fn)
for batch in session.batches():
    session.step(batch)
""",
        "`session`",
        remedy="with rep.session(...) as session",
    ),
    mistake(
        "the result of a session inside of it",
        """
with rep.session(step_fn, dataset, init_fn=init_fn) as session:
    for batch in session.batches():
        session.step(batch)
    print(session.result.metrics["loss"] < 100)
""",
        "True",
        right='print(rep.run(step_fn, dataset, init_fn=init_fn).metrics["loss"] < 100)',
    ),
    mistake(
        "a compiled step in a run",
        "rep.run(rep.compile(step_fn), dataset, init_fn=init_fn)",
        "`step_fn`",
        remedy="Pass the function itself",
    ),
    mistake(
        "a compiled step without a state",
        "rep.compile(step_fn)(batch)",
        "batch",
        remedy="(state, batch",
    ),
    mistake(
        "a state that was not made on the devices",
        """
state = init_fn(jax.random.key(0))
state, metrics = rep.compile(step_fn)(state, batch)
print(np.round(metrics["loss"], 4))
""",
        right="""
state = rep.put(init_fn(jax.random.key(0)))
print(np.round(rep.compile(step_fn)(state, batch)[1]["loss"], 4))
""",
    ),
    mistake(
        "a step that takes keywords",
        """
def step_fn(*, state, batch):
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "(state, batch)",
        remedy="Write `def step_fn(state, batch)`",
    ),
    mistake(
        "an async step",
        """
async def step_fn(state, batch):
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "async def",
        remedy="Make it a `def`",
    ),
    mistake(
        "a key that the step was not given",
        """
def step_fn(state, batch, key):
    return state, {"x": jax.random.normal(key)}
rep.compile(step_fn)(rep.init(init_fn), batch)
""",
        "`key`",
        remedy="`step(state, batch, key)`",
    ),
)
