"""A step that keeps the true sum of its gradients beside what its optimizer got."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from replicator import strategies
from replicator.collectives import all_reduce
from replicator.strategies import Rule

# The sum of all gradients that the optimizer got is its `trace`.
SUMMING = optax.chain(optax.trace(1.0), optax.scale(-1e-3))


def replicator_with(*rules, n=8, devices_per_host=None, **options):
    """Return a replicator of n replicas under rules; words make one for all paths."""
    made = [
        Rule(pattern="*", **each) if isinstance(each, dict) else each for each in rules
    ]
    strategy = strategies.data_parallel(made, devices_per_host=devices_per_host)
    return replicator.Replicator(n, strategy=strategy, **options)


def batch_of(examples=32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, 24)).astype(np.float32)
    mask = (np.arange(examples) % 5 > 0).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :8]), "mask": mask}


def init_params(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (24, 48)) / 5,
        "bias": jnp.zeros(48),
        "down": jax.random.normal(down, (48, 8)) / 7,
    }


def losses_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return ((hidden @ params["down"] - batch["y"]) ** 2).mean(axis=1)


def problem(rep, tx=SUMMING, *, weighted=None, truth=True, **options):
    """Return `init_fn` and `step_fn`; `truth` in the state sums the true gradients.

    Examples are masked if they are `weighted`, by "count" or by "weight".
    """
    optimizer = rep.wrap_optimizer(tx, **options)

    def init_fn(key):
        params = init_params(key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        sums = {"truth": zeros} if truth else {}
        return {"params": params, "opt": optimizer.init(params), **sums}

    def step_fn(state, batch):
        params = state["params"]

        def loss_fn(params):
            losses = losses_of(params, batch) * batch["mask"]
            return replicator.LocalSum(losses.sum(), batch["mask"].sum())

        if weighted:
            loss, grads = replicator.value_and_grad(loss_fn)(params)
            given, count = {"count": loss.weight}, batch["mask"].sum()
            mean = jax.tree.map(lambda g: g / count, grads)
            if weighted == "weight":
                grads, given = mean, {"weight": count}
            true = all_reduce(mean, weight=count) if truth else None
        else:
            loss, grads = jax.value_and_grad(lambda p: losses_of(p, batch).mean())(
                params
            )
            true, given = all_reduce(grads) if truth else None, {}
        updates, opt = optimizer.update(grads, state["opt"], params, **given)
        after = {"params": optax.apply_updates(params, updates), "opt": opt}
        if truth:
            after["truth"] = jax.tree.map(jnp.add, state["truth"], true)
        return after, {"loss": loss}

    return init_fn, step_fn


def owed_of(opt):
    """Return what all replicas owe together, by path below the optimizer's name."""
    owed = opt.synchroniser.owed.value
    return {
        path.partition("/")[2]: np.asarray(leaf).sum(axis=0)
        for path, leaf in owed.items()
    }


def gap(state):
    """Return the norm of the truth less what was got and is owed, over the truth's."""
    got, owed = state["opt"].inner[0].trace, owed_of(state["opt"])
    missing = [
        np.ravel(true - got[name] - owed.get(name, 0))
        for name, true in state["truth"].items()
    ]
    whole = np.concatenate([np.ravel(true) for true in state["truth"].values()])
    return np.linalg.norm(np.concatenate(missing)) / np.linalg.norm(whole)
