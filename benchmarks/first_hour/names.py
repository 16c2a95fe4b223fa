"""Mistakes in names: of leaves, of axes, of reductions."""

from benchmarks.first_hour.mistake import mistake

NAMES = (
    mistake(
        "a leaf of the batch by another name",
        """
def step_fn(state, batch):
    return state, {"x": batch["inputs"].mean()}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "'inputs'",
        "`x` float32[4,3]",
        'batch["inputs"]',
        remedy="Use one of these",
    ),
    mistake(
        "a leaf of the state by another name",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["parms"], batch)
    return update(state, grads, loss)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "'parms'",
        "`params`",
        'state["parms"]',
        remedy="Use one of these",
    ),
    mistake(
        "a step whose arguments are swapped",
        """
def step_fn(batch, state):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, loss)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "'params'",
        "`params`",
        remedy="Use one of these",
    ),
    mistake(
        "a tuple that is read by names",
        "rep.run(step_fn, [(batch['x'], batch['y'])], init_fn=init_fn)",
        "`tuple`",
        "float32[4,3]",
        remedy="Use one of these",
    ),
    mistake(
        "a state that is read as an object",
        """
def step_fn(state, batch):
    return state, {"loss": loss_fn(state.params, batch)}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "'params'",
        "state.params",
        remedy="Use one of these",
    ),
    mistake(
        "a metric of an evaluation that is misspelt",
        """
def eval_fn(params, batch):
    return {"loss": batch["label"]}
rep.evaluate(eval_fn, dataset, state=init_params(jax.random.key(0)))
""",
        "'label'",
        "`y`",
        remedy="Use one of these",
    ),
    mistake(
        "a name that Python does not know",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return update(state, grads, loss)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "'params'",
        "in step_fn",
        remedy="Use one of these",
    ),
    mistake(
        "an axis by the name of another program",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, lax.pmean(grads, "batch"), loss)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "batch",
        'lax.pmean(grads, "batch")',
        remedy="named 'replica'",
    ),
    mistake(
        "an axis by another name, in a collective of ours",
        """
def step_fn(state, batch):
    return state, {"x": replicator.all_reduce(batch["x"].mean(), axis_name="i")}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "'i'",
        remedy="'replica'",
    ),
    mistake(
        "a reduction of a collective that is none",
        """
def step_fn(state, batch):
    return state, {"x": replicator.all_reduce(batch["x"].mean(), op="avg")}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`op`",
        "'avg'",
        remedy="'mean'",
    ),
)
