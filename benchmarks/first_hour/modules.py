"""Mistakes with modules of flax NNX and of flax linen."""

from benchmarks.first_hour.mistake import mistake

_WORKS = "model = with_params(model, optax.apply_updates(params_of(model), updates))"

MODULES = (
    mistake(
        "a module and its optimizer in a closure",
        """
model = Net(nnx.Rngs(0))
tx = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
def step_fn(state, batch):
    loss, grads = nnx.value_and_grad(net_loss)(model, batch)
    tx.update(model, grads)
    return state, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "(model, batch)",
        remedy=_WORKS,
        report="google/flax#4695",
    ),
    mistake(
        "a module in a closure that counts",
        """
class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))
counter = Counter()
def step_fn(state, batch):
    counter.count[...] += 1
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`step_fn`",
        "counter.count",
        remedy=_WORKS,
        report="google/flax#3997",
    ),
    mistake(
        "dropout under plain `jax.grad`",
        """
def init_fn(key):
    return {"model": Net(nnx.Rngs(key), rate=0.5)}
def step_fn(state, batch):
    grads = jax.grad(net_loss)(state["model"], batch)
    return state, {}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "jax.grad(net_loss)",
        remedy="`replicator.nnx.value_and_grad`",
        report="google/flax#5050",
    ),
    mistake(
        "an optimizer of flax in the state",
        """
def init_fn(key):
    model = Net(nnx.Rngs(key))
    return {"model": model, "tx": nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)}
def step_fn(state, batch):
    loss, grads = nnx.value_and_grad(net_loss)(state["model"], batch)
    state["tx"].update(state["model"], grads)
    return state, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`model/",
        "step_fn",
        remedy="`rep.wrap_optimizer`",
        quiet=True,
    ),
    mistake(
        "parameters in the place of a module",
        """
def step_fn(state, batch):
    (loss, model), grads = value_and_grad(net_loss)(params_of(state["model"]), batch)
    return state, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_net)
""",
        "`model`",
        "`dict`",
        remedy="Pass the one that the state holds",
    ),
    mistake(
        "an array in the place of a module",
        "params_of(jnp.zeros(3))",
        "`model`",
        remedy="Pass the one that the state holds",
    ),
    mistake(
        "a class in the place of a module",
        "params_of(Net)",
        "`model`",
        remedy="Pass the one that the state holds",
    ),
    mistake(
        "a state of flax in the place of a module",
        """
def init_fn(key):
    state = nnx.state(Net(nnx.Rngs(key)))
    return {"model": state, "opt": optimizer.init(params_of(state))}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`model`",
        "`State`",
        remedy="Pass the one that the state holds",
    ),
    mistake(
        "a module of linen in the place of one of NNX",
        """
import flax.linen as nn
params_of(nn.Dense(3))
""",
        "`model`",
        "`Dense`",
        remedy="Pass the one that the state holds",
    ),
    mistake(
        "parameters of another model",
        "with_params(Net(nnx.Rngs(0)), {'kernel': jnp.zeros((3, 4))})",
        "`params`",
        "`first/bias` is missing",
        remedy="Pass the result of `optax.apply_updates`",
    ),
    mistake(
        "a model that the step does not return",
        """
def step_fn(state, batch):
    (loss, model), grads = value_and_grad(net_loss)(state["model"], batch)
    params = params_of(state["model"])
    updates, opt = optimizer.update(grads, state["opt"], params)
    with_params(model, optax.apply_updates(params, updates))
    return {"model": state["model"], "opt": opt}, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_net)
""",
        "`model/",
        remedy="`optax.apply_updates",
        quiet=True,
    ),
    mistake(
        "the model in the place of its parameters, for the optimizer",
        """
def init_fn(key):
    model = Net(nnx.Rngs(key))
    return {"model": model, "opt": adam.init(model)}
def step_fn(state, batch):
    (loss, model), grads = value_and_grad(net_loss)(state["model"], batch)
    updates, opt = adam.update(grads, state["opt"], params_of(model))
    model = with_params(model, optax.apply_updates(params_of(model), updates))
    return {"model": model, "opt": opt}, {"loss": loss}
adam = rep.wrap_optimizer(optax.adam(0.1))
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "adam.update(grads",
        remedy="structure",
    ),
    mistake(
        "a loss that forgets its model",
        """
model = Net(nnx.Rngs(0))
def forgetful(_, batch):
    return net_loss(model, batch)
def step_fn(state, batch):
    (loss, moved), grads = value_and_grad(forgetful)(state["model"], batch)
    updates, opt = optimizer.update(grads, state["opt"], params_of(moved))
    moved = with_params(moved, optax.apply_updates(params_of(moved), updates))
    return {"model": moved, "opt": opt}, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_net)
""",
        "`loss_fn`",
        remedy="model",
        quiet=True,
    ),
    mistake(
        "a batch norm of flax",
        """
class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
    def __call__(self, x):
        return self.norm(x).sum(-1)
def init_fn(key):
    return {"model": Normed(nnx.Rngs(key))}
def step_fn(state, batch):
    (loss, model), grads = value_and_grad(net_loss)(state["model"], batch)
    return {"model": model}, {"loss": loss}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "`model/norm/mean/value`",
        remedy="`replicator.all_reduce`",
        quiet=True,
    ),
)
