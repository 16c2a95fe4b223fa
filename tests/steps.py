"""Small steps that several tests lift: an MLP, a conv net with batch norm, a GAN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicator
from replicator import Replicator

FEATURES = 4


def replicas(n, **options):
    """Return a replicator of n fake devices that leaves no compilation cache."""
    return Replicator(num_replicas=n, compilation_cache=False, **options)


def lenient(tx):
    """Let `tx` mix dtypes, as parts of optax do; our own code stays strict."""

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params, **extra)

    tx = optax.with_extra_args_support(tx)
    return optax.GradientTransformationExtraArgs(tx.init, update)


def adam(rate=0.1):
    return lenient(optax.adam(rate))


def run_plainly(steps=4, **options):
    """Make a small run of one replica; return its result."""
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    return rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=steps,
        display=False,
        **options,
    )


def regression_batch(examples=16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(examples, FEATURES)).astype(np.float32),
        "y": rng.normal(size=examples).astype(np.float32),
    }


def normals(*shape, seed):
    """Return normal numbers as a constant: drawing them compiles for a second."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def init_mlp(key, width=8):
    return {
        "w1": normals(FEATURES, width, seed=1) / 2,
        "b1": jnp.zeros((1, width)),
        "w2": normals(width, seed=2) / 3,
    }


def mlp(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def errors(params, batch):
    return (mlp(params, batch["x"]) - batch["y"]) ** 2


def mlp_loss(params, batch):
    return errors(params, batch).mean()


def weighted_loss(params, batch):
    """Return the mean loss weighted by `mask`, and the sum of the weights."""
    weight = batch["mask"].sum()
    total = (errors(params, batch) * batch["mask"]).sum()
    return total / jnp.where(weight == 0, 1.0, weight), weight


def trainer(optimizer, loss_fn=mlp_loss, init_params=init_mlp):
    """Return `init_fn` and `step_fn` of plain training."""

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return apply(optimizer, state, grads), {"loss": loss}

    return init_fn, step_fn


def apply(optimizer, state, grads, **extra):
    updates, opt = optimizer.update(grads, state["opt"], state["params"], **extra)
    return {
        **state,
        "params": optax.apply_updates(state["params"], updates),
        "opt": opt,
    }


def weighted_trainer(optimizer):
    """Train on examples that count as much as `mask` says."""
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        (loss, weight), grads = jax.value_and_grad(weighted_loss, has_aux=True)(
            state["params"], batch
        )
        after = apply(optimizer, state, grads, weight=weight)
        return after, {"loss": replicator.Mean(loss, weight)}

    return init_fn, step_fn


def dropout_trainer(optimizer, *, keys=replicator.example_keys):
    """Drop half of the features of each example, by keys of its own."""
    init_fn, _ = trainer(optimizer)

    def loss_fn(params, batch, key):
        drawn = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (FEATURES,)))
        kept = drawn(keys(key, len(batch["x"])))
        return mlp_loss(
            params, {**batch, "x": batch["x"] * kept.astype(batch["x"].dtype)}
        )

    def step_fn(state, batch, key):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        return apply(optimizer, state, grads), {"loss": loss}

    return init_fn, step_fn


def image_batch(examples=16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(examples, 4, 4, 1)).astype(np.float32),
        "label": rng.integers(0, 3, examples).astype(np.int32),
    }


def init_conv(key):
    return {
        "kernel": normals(3, 3, 1, 4, seed=1) / 3,
        "bias": jnp.zeros((1, 1, 1, 4)),
        "head": normals(4, 3, seed=2) / 2,
    }


def conv(params, image):
    dimensions = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        image, params["kernel"], (1, 1), "SAME", dimension_numbers=dimensions
    )
    return y + params["bias"]


def cross_entropy(params, features, label):
    logits = features.mean((1, 2)) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def conv_loss(params, batch):
    return cross_entropy(
        params, jax.nn.relu(conv(params, batch["image"])), batch["label"]
    )


def norm_trainer(optimizer, mean_over_replicas):
    """Train a conv net with batch norm; `mean_over_replicas` merges its moments."""

    def loss_fn(params, batch):
        y = conv(params, batch["image"])
        mean = mean_over_replicas(y.mean((0, 1, 2), keepdims=True))
        var = mean_over_replicas(((y - mean) ** 2).mean((0, 1, 2), keepdims=True))
        y = jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-3))
        return cross_entropy(params, y, batch["label"]), mean

    def init_fn(key):
        params = init_conv(key)
        running = jnp.zeros((1, 1, 1, 4))
        return {"params": params, "opt": optimizer.init(params), "running": running}

    def step_fn(state, batch):
        (loss, mean), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"], batch
        )
        running = 0.9 * state["running"] + 0.1 * mean
        after = apply(optimizer, {**state, "running": running}, grads)
        return after, {"loss": loss}

    return init_fn, step_fn


def gan_trainer(generator_tx, critic_tx, *, simultaneous=True):
    """Train two models by two optimizers; simultaneous: both gradients come first."""

    def init_fn(key):
        g, c = (normals(FEATURES, FEATURES, seed=seed) / 2 for seed in (1, 2))
        return {
            "generator": {"params": g, "opt": generator_tx.init(g)},
            "critic": {"params": c, "opt": critic_tx.init(c)},
        }

    def critic_loss(critic, generator, batch):
        real, fake = batch["x"] @ critic, jnp.tanh(batch["x"] @ generator) @ critic
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()

    def generator_loss(generator, critic, batch):
        return jax.nn.softplus(-jnp.tanh(batch["x"] @ generator) @ critic).mean()

    def step_fn(state, batch):
        g, c = state["generator"], state["critic"]
        c_loss, c_grads = jax.value_and_grad(critic_loss)(
            c["params"], g["params"], batch
        )
        trained = apply(critic_tx, c, c_grads)
        judge = c if simultaneous else trained
        g_loss, g_grads = jax.value_and_grad(generator_loss)(
            g["params"], judge["params"], batch
        )
        after = {"generator": apply(generator_tx, g, g_grads), "critic": trained}
        return after, {"critic": c_loss, "generator": g_loss}

    return init_fn, step_fn


def params_after(step, state, batch, *, steps=1, key=None):
    """Return the parameters after `steps` updates from one batch, on the host."""
    for _ in range(steps):
        state, _ = step(state, batch) if key is None else step(state, batch, key)
    return jax.device_get(state["params"])


def assert_close(found, expected, *, rtol=1e-6):
    """Compare two trees by the norm of their difference, relative to the second's.

    Leaf by leaf a gradient whose true value is zero could not be compared.
    """
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    apart = np.sqrt(sum(((a - b) ** 2).sum() for a, b in wide))
    norm = np.sqrt(sum((b**2).sum() for _, b in wide))
    assert apart <= rtol * norm


def assert_equal_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
