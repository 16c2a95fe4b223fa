"""Mistakes in sums and means: reduced twice, or not; over a part of the examples."""

from benchmarks.first_hour.mistake import mistake

_SHOW = (
    "result = rep.run(step_fn, dataset, init_fn=init_fn)\n"
    'print(np.round(result.state["params"]["w"], 5))'
)

SUMS = (
    mistake(
        "gradients that are reduced twice, by means",
        f"""
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    return update(state, lax.pmean(grads, "replica"))
{_SHOW}
""",
        right=_SHOW,
        quiet=True,
    ),
    mistake(
        "gradients that are summed, then reduced",
        f"""
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    return update(state, lax.psum(grads, "replica"))
{_SHOW}
""",
        "`grads`",
        "`psum`",
        remedy="`lax.pmean(grads, 'replica')`",
        quiet=True,
    ),
    mistake(
        "gradients that are summed by hand",
        """
def step_fn(state, batch):
    grads = lax.psum(jax.grad(loss_fn)(state["params"], batch), "replica")
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return state | {"params": moved}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`grads`",
        "`psum`",
        remedy="`lax.pmean(grads, 'replica')`",
        quiet=True,
    ),
    mistake(
        "a loss that is reduced in the function that is differentiated",
        f"""
def mean_loss(params, batch):
    return lax.pmean(loss_fn(params, batch), "replica")
def step_fn(state, batch):
    return update(state, jax.grad(mean_loss)(state["params"], batch))
{_SHOW}
""",
        right=_SHOW,
        quiet=True,
    ),
    mistake(
        "a loss that is summed in the function that is differentiated",
        """
def total_loss(params, batch):
    return lax.psum(loss_fn(params, batch), "replica")
def step_fn(state, batch):
    return update(state, jax.grad(total_loss)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "summed over replicas",
        "in loss_fn",
        remedy="Return the mean",
        quiet=True,
    ),
    mistake(
        "a loss that is a sum over examples",
        """
def total(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).sum()
def step_fn(state, batch):
    return update(state, jax.grad(total)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "sum",
        "in total",
        remedy="mean",
        report="trueagi-io/FabricPC#70",
        quiet=True,
    ),
    mistake(
        "a loss that is divided by the global batch",
        """
def share(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).sum() / 32
def step_fn(state, batch):
    return update(state, jax.grad(share)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "not divided by their number",
        "in share",
        remedy="Take the mean",
        report="OpenNMT/OpenNMT-tf#988",
        quiet=True,
    ),
    mistake(
        "a loss that is divided by the number of replicas",
        """
def share(params, batch):
    return loss_fn(params, batch) / replicator.num_replicas()
def step_fn(state, batch):
    return update(state, jax.grad(share)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "replicas",
        "in loss_fn",
        remedy="Return the mean",
        report="pytorch/xla#451",
        quiet=True,
    ),
    mistake(
        "a mean over tokens, of which replicas have different numbers",
        """
count = np.arange(32) % 4 < np.arange(32) // 8 + 1
def masked(params, batch):
    losses = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    return (losses * batch["real"]).sum() / batch["real"].sum()
def step_fn(state, batch):
    return update(state, jax.grad(masked)(state["params"], batch))
data = [batch | {"real": count.astype(np.float32)}]
rep.run(step_fn, data, init_fn=init_fn)
""",
        "`real`",
        "in masked",
        remedy="`LocalSum(total, count)`",
        report="google/flax#2417",
        quiet=True,
    ),
    mistake(
        "predictions of one column, and labels of none",
        """
def crossed(params, batch):
    predicted = batch["x"] @ params["w"][:, None] + params["b"]
    return ((predicted - batch["y"]) ** 2).mean()
def step_fn(state, batch):
    return update(state, jax.grad(crossed)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "float32[4,1] and float32[1,4]",
        "in crossed",
        remedy="[:, 0]",
        report="pytorch/pytorch#16045",
        quiet=True,
    ),
    mistake(
        "labels of one column, and predictions of none",
        """
labels = batch["y"][:, None]
def crossed(params, batch):
    predicted = batch["x"] @ params["w"] + params["b"]
    return optax.l2_loss(predicted, batch["y"]).mean()
def step_fn(state, batch):
    return update(state, jax.grad(crossed)(state["params"], batch))
rep.run(step_fn, [batch | {"y": labels}], init_fn=init_fn)
""",
        "(4,) and (4, 1)",
        "l2_loss(predicted",
        remedy="Shape mismatch",
        report="tensorflow/tensorflow#37770",
        quiet=True,
    ),
    mistake(
        "a norm over this replica's examples",
        """
def normed(params, batch):
    x = (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)
    return loss_fn(params, batch | {"x": x})
def step_fn(state, batch):
    return update(state, jax.grad(normed)(state["params"], batch))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "normed",
        remedy="`replicator.all_reduce`",
        report="google/flax#2417",
        quiet=True,
    ),
    mistake(
        "running statistics that are not reduced",
        """
def init_fn(key):
    return {"params": init_params(key), "mean": jnp.zeros(3)}
def step_fn(state, batch):
    mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
    return state | {"mean": mean}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`mean`",
        "in step_fn",
        remedy="all_reduce",
        quiet=True,
    ),
    mistake(
        "a loss of one replica that is shown for all",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, loss)
print(np.round(rep.run(step_fn, [batch], init_fn=init_fn).metrics["loss"], 4))
""",
        right="""
params = jax.device_get(rep.init(init_fn))["params"]
print(np.round(loss_fn(params, batch), 4))
""",
        quiet=True,
    ),
    mistake(
        "an accuracy that is a count",
        """
def step_fn(state, batch):
    right = (batch["x"] @ state["params"]["w"] > 0) == (batch["y"] > 0)
    return state, {"right": right.sum()}
rep.run(step_fn, [batch], init_fn=init_fn)
""",
        "`right`",
        remedy="`replicator.Sum",
        quiet=True,
    ),
    mistake(
        "clipping before the reduction",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    norm = optax.global_norm(grads)
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    return update(state, grads)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`grads`",
        "in step_fn",
        remedy="optax.clip_by_global_norm",
        quiet=True,
    ),
    mistake(
        "the sign of a gradient before the reduction",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    return update(state, jax.tree.map(jnp.sign, grads))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`grads`",
        "in step_fn",
        remedy="wrap_optimizer",
        quiet=True,
    ),
    mistake(
        "a step that runs only where the loss is large",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    new, metrics = update(state, grads, loss)
    keep = lambda old, new: jnp.where(loss > 1.0, new, old)
    return jax.tree.map(keep, state, new), metrics
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`params/b`",
        "in <lambda>",
        remedy="all_reduce",
        quiet=True,
    ),
    mistake(
        "a collective that some replicas skip",
        """
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return lax.cond(loss > 1.0, lambda: update(state, grads, loss),
                    lambda: (state, {"loss": loss}))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`psum`",
        "branch",
        remedy="`replicator.all_reduce` first",
    ),
    mistake(
        "a schedule that counts microbatches",
        """
schedule = optax.linear_schedule(0.1, 0.0, 12)
optimizer = rep.wrap_optimizer(optax.sgd(schedule))
def init_fn(key):
    params = init_params(key)
    return {"params": params, "opt": optimizer.init(params), "n": 0}
def step_fn(state, batch):
    return state | {"n": state["n"] + 1}, {"n": state["n"] + 1}
print(rep.run(step_fn, dataset, init_fn=init_fn, accumulate=4).metrics["n"])
""",
        right="print(float(len(dataset)))",
        report="huggingface/diffusers#4387",
        quiet=True,
    ),
    mistake(
        "a learning rate for each replica, as a schedule of another framework has it",
        """
optimizer = rep.wrap_optimizer(optax.sgd(optax.linear_schedule(0.1, 0.0, 3)))
def init_fn(key):
    return {"w": jnp.zeros(()), "opt": optimizer.init(jnp.zeros(()))}
def step_fn(state, batch):
    updates, opt = optimizer.update(jnp.ones(()), state["opt"], state["w"])
    return {"w": state["w"] + updates, "opt": opt}, {"rate": -updates}
print(np.round(rep.run(step_fn, dataset, init_fn=init_fn).metrics["rate"], 4))
""",
        right="print(np.round(0.1 / 3, 4))",
        report="huggingface/diffusers#3954",
        quiet=True,
    ),
)
