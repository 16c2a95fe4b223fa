"""Mistakes with arrays that are traced: Python and NumPy in a step."""

from benchmarks.first_hour.mistake import mistake

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
        remedy="Differentiate by floats",
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
        remedy="Expected the input",
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
        "nan",
        remedy="Look at the batch",
        report="google-deepmind/optax#1185",
        quiet=True,
    ),
)
