"""Mistakes inside of a step: names, results, Python where arrays are traced."""

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
        remedy="Use `state`",
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
        "a reduction that is none",
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

RESULTS = (
    mistake(
        "a step without metrics",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    return update(state, grads)[0]
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "dict",
        remedy="Return an empty dict if there are no metrics",
    ),
    mistake(
        "a step without return",
        """
def step_fn(state, batch):
    update(state, jax.grad(loss_fn)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "None",
        remedy="Return",
    ),
    mistake(
        "metrics before the state",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    state, metrics = update(state, grads)
    return metrics, state
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "`opt",
        remedy="Return every leaf",
    ),
    mistake(
        "a state without its optimizer",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    state, metrics = update(state, grads)
    return {"params": state["params"]}, metrics
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`opt",
        "is missing",
        remedy="Return every leaf",
    ),
    mistake(
        "a leaf that is new",
        """
def step_fn(state, batch):
    return state | {"loss": loss_fn(state["params"], batch)}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`loss` is new",
        remedy="Return every leaf",
    ),
    mistake(
        "updates in the place of parameters",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    params, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": params, "opt": opt}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`params`",
        "step_fn",
        remedy="`optax.apply_updates",
        report="google-deepmind/optax#1745",
        quiet=True,
    ),
    mistake(
        "parameters that are not returned",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    optax.apply_updates(state["params"], updates)
    return {"params": state["params"], "opt": opt}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`params",
        remedy="`optax.apply_updates",
        report="jax-ml/jax#2097",
        quiet=True,
    ),
    mistake(
        "the old state",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    new_state, metrics = update(state, grads, loss)
    return state, metrics
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "state",
        remedy="Return",
        report="Lightning-AI/pytorch-lightning#20215",
        quiet=True,
    ),
    mistake(
        "an optimizer's state that is not returned",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    new, metrics = update(state, grads)
    return new | {"opt": state["opt"]}, metrics
adam = rep.wrap_optimizer(optax.adam(0.1))
optimizer = adam
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`opt",
        remedy="Return",
        quiet=True,
    ),
    mistake(
        "a leaf of another type",
        """
def step_fn(state, batch):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state["params"])
    return state | {"params": half}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`params/b`",
        "bfloat16",
        remedy="Return every leaf as it came",
    ),
    mistake(
        "a leaf of another shape",
        """
def step_fn(state, batch):
    return state | {"params": jax.tree.map(jnp.atleast_2d, state["params"])}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`params/b`",
        "float32[1,1]",
        remedy="Return every leaf as it came",
    ),
    mistake(
        "text among the metrics",
        """
def step_fn(state, batch):
    return state, {"phase": "train"}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "`phase`",
        remedy="Leave it out",
    ),
    mistake(
        "a metric for each example",
        """
def step_fn(state, batch):
    return state, {"predictions": batch["x"] @ state["params"]["w"]}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`predictions`",
        remedy="Concat",
        quiet=True,
    ),
    mistake(
        "a random key among the metrics",
        """
def step_fn(state, batch, key):
    return state, {"key": key}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`key`",
        remedy="`jax.random.key_data",
    ),
    mistake(
        "metrics that are a number",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads)[0], loss
print(np.round(rep.run(step_fn, dataset, init_fn=init_fn).metrics, 4))
""",
        right="""
result = rep.run(step_fn, dataset, init_fn=init_fn)
print(np.round(result.metrics["loss"], 4))
""",
    ),
    mistake(
        "an evaluation that takes a mean itself",
        """
def eval_fn(params, batch):
    return {"loss": loss_fn(params, batch)}
rep.evaluate(eval_fn, dataset, state=init_params(jax.random.key(0)))
""",
        "`loss`",
        remedy="one row per example",
        quiet=True,
    ),
    mistake(
        "an evaluation that returns a number",
        """
def eval_fn(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2
rep.evaluate(eval_fn, dataset, state=init_params(jax.random.key(0)))
""",
        "`eval_fn`",
        remedy="dict",
    ),
    mistake(
        "a prediction that is a mean",
        """
def predict_fn(params, batch):
    return (batch["x"] @ params["w"]).mean()
rep.predict(predict_fn, dataset, init_params(jax.random.key(0)))
""",
        "`predict_fn`",
        remedy="first axis",
    ),
)

TRACED = (
    mistake(
        "a number of Python in a step",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, float(loss))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "float(loss)",
        remedy="`debug=True`",
    ),
    mistake(
        "`item` in a step",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, loss.item())
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "loss.item()",
        remedy="`debug=True`",
    ),
    mistake(
        "a branch of Python on a loss",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    if loss > 10:
        return state, {"loss": loss}
    return update(state, grads, loss)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "if loss > 10",
        remedy="`debug=True`",
        report="jax-ml/jax#16430",
    ),
    mistake(
        "NumPy on a traced array",
        """
def step_fn(state, batch):
    loss = np.asarray(loss_fn(state["params"], batch))
    return state, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "np.asarray(loss_fn",
        remedy="`debug=True`",
        report="keras-team/keras-core#718",
    ),
    mistake(
        "a mask by indices",
        """
def step_fn(state, batch):
    kept = batch["x"][batch["y"] > 0]
    return state, {"x": kept.mean()}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        'batch["x"][batch["y"] > 0]',
        remedy="`debug=True`",
    ),
    mistake(
        "a length that is traced",
        """
def step_fn(state, batch):
    count = (batch["y"] > 0).sum()
    return state, {"x": jnp.arange(count).sum()}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "jnp.arange(count)",
        remedy="`debug=True`",
    ),
    mistake(
        "a write into an array",
        """
def step_fn(state, batch):
    batch["x"][0] = 0
    return state, {"x": batch["x"].mean()}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        'batch["x"][0] = 0',
        remedy=".at[",
    ),
    mistake(
        "a batch that the step writes to",
        """
def step_fn(state, batch):
    batch["x"] = batch["x"] - 1.0
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, loss)
print(np.round(rep.run(step_fn, dataset, init_fn=init_fn).metrics["loss"], 4))
""",
        right="""
moved = [batch | {"x": batch["x"] - 1.0}] * 3
print(np.round(rep.run(step_fn, moved, init_fn=init_fn).metrics["loss"], 4))
""",
        quiet=True,
    ),
    mistake(
        "a training flag that is traced",
        """
def step_fn(state, batch):
    training = jnp.asarray(True)
    rate = 0.5 if training else 0.0
    return state, {"rate": rate}
print(rep.run(step_fn, dataset, init_fn=init_fn).metrics["rate"])
""",
        "0.5 if training",
        remedy="`debug=True`",
        report="google/flax#4085",
    ),
    mistake(
        "a shape that does not fit",
        """
def step_fn(state, batch):
    return state, {"x": (batch["x"].T @ state["params"]["w"]).mean()}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        'batch["x"].T @',
        remedy="to have the same shape",
    ),
    mistake(
        "a loss for each example",
        """
def loss_fn(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2
rep.run(step_fn, dataset, init_fn=init_fn)
def step_fn(state, batch):
    return update(state, jax.grad(loss_fn)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "jax.grad(loss_fn)",
        remedy="scalar-output",
    ),
    mistake(
        "a gradient by integers",
        """
def step_fn(state, batch):
    grads = jax.grad(lambda n: (n * batch["x"]).mean())(state["n"])
    return state, {"grads": grads}
rep.run(step_fn, dataset, init_fn=lambda key: {"n": jnp.ones((3,), jnp.int32)})
""",
        "jax.grad(",
        remedy="float",
    ),
    mistake(
        "labels that are floats",
        """
def step_fn(state, batch):
    logits = batch["x"] * state["params"]["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return state, {"loss": losses.mean()}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "integer_labels(logits",
        remedy="expected",
        report="google-deepmind/optax#1335",
    ),
    mistake(
        "labels beyond the classes",
        """
labels = np.arange(32, dtype=np.int32)
def step_fn(state, batch):
    logits = batch["x"] * state["params"]["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return state, {"loss": losses.mean()}
rep.run(step_fn, [batch | {"label": labels}], init_fn=init_fn)
""",
        "`loss`",
        "NaN",
        remedy="replicator replay",
        report="google-deepmind/optax#1185",
        quiet=True,
    ),
)
