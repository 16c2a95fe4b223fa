"""Mistakes in what a step returns."""

from benchmarks.first_hour.mistake import mistake

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
        "`params/b` is missing",
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
        "`params/b`",
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
        "`params/b`",
        remedy="Return",
        report="Lightning-AI/pytorch-lightning#20215",
        quiet=True,
    ),
    mistake(
        "an optimizer's state that is not returned",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    updates, opt = adam.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": state["opt"]}, {}
adam = rep.wrap_optimizer(optax.adam(0.1))
def init_fn(key):
    return {"params": init_params(key), "opt": adam.init(init_params(key))}
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
