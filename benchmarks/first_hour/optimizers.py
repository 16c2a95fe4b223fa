"""Mistakes with optimizers: a forgotten wrap, a second one, states that do not fit."""

from benchmarks.first_hour.mistake import mistake

WRAPS = (
    mistake(
        "an optimizer that is not wrapped",
        """
optimizer = optax.sgd(0.1)
def init_fn(key):
    return {"w": jnp.zeros(3), "opt": optimizer.init(jnp.zeros(3))}
def step_fn(state, batch):
    grads = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    updates, opt = optimizer.update(grads, state["opt"], state["w"])
    return {"w": state["w"] + updates, "opt": opt}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`w`",
        "in step_fn",
        remedy="`rep.wrap_optimizer`",
        report="brainpy/BrainPy#627",
        quiet=True,
    ),
    mistake(
        "a descent by hand that is not reduced",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return state | {"params": moved}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`params/b`",
        "in <lambda>",
        remedy="`rep.wrap_optimizer`",
        quiet=True,
    ),
    mistake(
        "a wrapped init and a plain update",
        """
tx = optax.sgd(0.1)
optimizer = rep.wrap_optimizer(tx)
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "OptimizerState",
        "tx.update(grads",
        remedy="`rep.wrap_optimizer(tx)`",
        quiet=True,
    ),
    mistake(
        "a plain init and a wrapped update",
        """
def init_fn(key):
    params = init_params(key)
    return {"params": params, "opt": optax.sgd(0.1).init(params)}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`state`",
        "optimizer.update(grads",
        remedy="init",
    ),
    mistake(
        "an optimizer that is wrapped twice",
        """
twice = rep.wrap_optimizer(rep.wrap_optimizer(optax.sgd(0.1)))
def init_fn(key):
    return {"w": jnp.zeros(3), "opt": twice.init(jnp.zeros(3))}
def step_fn(state, batch):
    grads = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    updates, opt = twice.update(grads, state["opt"], state["w"])
    return {"w": state["w"] + updates, "opt": opt}, {}
print(np.round(rep.run(step_fn, dataset, init_fn=init_fn).state["w"], 5))
""",
        right="""
def init_fn(key):
    return {"w": jnp.zeros(3), "opt": optimizer.init(jnp.zeros(3))}
def step_fn(state, batch):
    grads = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    updates, opt = optimizer.update(grads, state["opt"], state["w"])
    return {"w": state["w"] + updates, "opt": opt}, {}
print(np.round(rep.run(step_fn, dataset, init_fn=init_fn).state["w"], 5))
""",
        quiet=True,
    ),
    mistake(
        "an optimizer that was not made",
        "rep.wrap_optimizer(optax.sgd)",
        "`tx`",
        remedy="optax",
    ),
    mistake(
        "a learning rate in the place of an optimizer",
        "rep.wrap_optimizer(0.1)",
        "`tx`",
        "0.1",
        remedy="optax",
    ),
    mistake(
        "no gradient for a leaf",
        """
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    return update(state, {"w": grads["w"]})
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "key sets is b",
        "apply_updates(state",
        remedy="`jax.tree.structure(tree)`",
    ),
    mistake(
        "the loss in the place of gradients",
        """
def step_fn(state, batch):
    grads, loss = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, loss)
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`grads`",
        remedy="`jax.grad`",
    ),
    mistake(
        "an update without parameters",
        """
optimizer = rep.wrap_optimizer(optax.adamw(0.1))
def step_fn(state, batch):
    grads = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    updates, opt = optimizer.update(grads, state["opt"])
    return {"w": state["w"] + updates, "opt": opt}, {}
def init_fn(key):
    return {"w": jnp.zeros(3), "opt": optimizer.init(jnp.zeros(3))}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "params",
        "optimizer.update(grads",
        remedy="update",
    ),
    mistake(
        "two optimizers of one name",
        """
one, other = rep.wrap_optimizer(optax.sgd(0.1)), rep.wrap_optimizer(optax.adam(0.1))
def init_fn(key):
    w = jnp.zeros(3)
    return {"w": w, "one": one.init(w), "other": other.init(w)}
def step_fn(state, batch):
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`name`",
        remedy="`rep.wrap_optimizer(tx, name=...)`",
    ),
    mistake(
        "an optimizer in a closure",
        """
optimizer = rep.wrap_optimizer(optax.adam(0.1))
opt_state = optimizer.init(init_params(jax.random.key(0)))
def init_fn(key):
    return {"params": init_params(key)}
def step_fn(state, batch):
    grads = jax.grad(loss_fn)(state["params"], batch)
    updates, _ = optimizer.update(grads, opt_state, state["params"])
    return {"params": optax.apply_updates(state["params"], updates)}, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "optimizer",
        remedy="state",
        quiet=True,
    ),
)
