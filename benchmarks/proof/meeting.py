"""Losses under accumulation: in some of them the examples of a microbatch meet.

Each takes parameters `w` [3, 2] and a batch of `x` [n, 3], `y` [n, 3] (a second view,
or a target), `kind` [n] (two kinds in turn) and `mask` [n]. Those of `MEET` are other
losses with other microbatches, and a collective makes them so: a warning is due. Those
of `APART` are the same at any accumulation.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import replicator
from replicator import all_gather, all_reduce
from replicator.nnx import BatchNorm

AXIS = "replica"
Loss = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]


def batch(examples: int) -> dict[str, np.ndarray]:
    """Return examples of which each microbatch of eight has equally many."""
    rng = np.random.default_rng(5)
    return {
        "x": rng.normal(size=(examples, 3)).astype(np.float32),
        "y": rng.normal(size=(examples, 3)).astype(np.float32),
        "kind": (np.arange(examples) % 2).astype(np.int32),
        "mask": (np.arange(examples) % 4 > 0).astype(np.float32),
    }


def weights() -> jax.Array:
    """Return parameters."""
    return jnp.asarray(np.random.default_rng(6).normal(size=(3, 2)), jnp.float32)


def _mean(value):
    return all_reduce(value, "mean")


def _rows(z):
    return all_gather(z, tiled=True)


def _views(w, b):
    """Return the unit vectors of two views."""
    return tuple(
        z / jnp.linalg.norm(z, axis=1, keepdims=True)
        for z in (jnp.tanh(b["x"] @ w), jnp.tanh(b["y"] @ w))
    )


def _contrast(logits, first):
    places = first + jnp.arange(len(logits))
    return -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), places].mean()


def _clip(w, b) -> jax.Array:
    one, other = _views(w, b)
    logits = (one @ _rows(other).T, other @ _rows(one).T)
    first, second = (_contrast(each / 0.5, _place(len(one))) for each in logits)
    return first + second


def _place(n):
    # Under a strategy that partitions there is one replica, and no number of it.
    return replicator.num_replicas() > 1 and lax.axis_index(AXIS) * n


def _simclr(w, b):
    one, other = _views(w, b)
    scores = one @ _rows(other).T
    own = (one * other).sum(1)
    return (jax.nn.logsumexp(scores / 0.5, axis=1) - own / 0.5).mean()


def _supcon(w, b):
    z, _ = _views(w, b)
    alike = (b["kind"][:, None] == _rows(b["kind"])[None]).astype(z.dtype)
    scores = jax.nn.log_softmax(z @ _rows(z).T)
    return -((alike * scores).sum(1) / alike.sum(1)).mean()


def _centred(z):
    z = z - _mean(z.mean(0))[None]
    return z, _mean((z**2).mean(0))


def _barlow(w, b):
    (one, v1), (two, v2) = _centred(b["x"] @ w), _centred(b["y"] @ w)
    cross = _mean(one.T @ two / len(one)) / jnp.sqrt(v1[:, None] * v2[None])
    return ((cross - jnp.eye(2)) ** 2).sum()


def _vicreg(w, b):
    one, other = b["x"] @ w, b["y"] @ w
    _, variance = _centred(one)
    hinge = jax.nn.relu(2 - jnp.sqrt(variance + 1e-4)).mean()
    return ((one - other) ** 2).mean() + hinge


def _mmd(w, b):
    apart = lax.pmean((jnp.tanh(b["x"] @ w) - jnp.tanh(b["y"])[:, :2]).mean(0), AXIS)
    return (apart**2).sum()


def _triplet(w, b):
    z, _ = _views(w, b)
    far = ((z[:, None] - _rows(z)[None]) ** 2).sum(-1)
    same = b["kind"][:, None] == _rows(b["kind"])[None]
    hard = jnp.where(same, far, 0.0).max(1) - jnp.where(same, 9.0, far).min(1)
    return jax.nn.softplus(hard).mean()


def _dino(w, b):
    teacher = lax.stop_gradient(b["y"] @ w)
    sharp = jax.nn.softmax((teacher - _mean(teacher.mean(0))[None]) / 0.2)
    return -(sharp * jax.nn.log_softmax(b["x"] @ w)).sum(1).mean()


def _balance(w, b):
    gates = jax.nn.softmax(b["x"] @ w)
    chosen = jax.nn.one_hot(gates.argmax(1), 2)
    return 2 * (_mean(chosen.mean(0)) * _mean(gates.mean(0))).sum() + gates[:, 0].mean()


def _advantages(w, b):
    gain = b["y"][:, 0]
    apart = gain - _mean(gain.mean())
    whitened = apart / jnp.sqrt(_mean((apart**2).mean()))
    return -(jax.nn.log_softmax(b["x"] @ w)[:, 0] * whitened).mean()


def _sam(w, b):
    grad = _mean(jax.grad(_plain)(w, b))
    return _plain(w + 0.5 * lax.stop_gradient(grad / jnp.linalg.norm(grad)), b)


def _penalty(w, b):
    slope = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ w).sum()))(b["x"])
    norm = _mean(jnp.linalg.norm(slope, axis=1).mean())
    return _plain(w, b) + (norm - 1.0) ** 2


def _rare(w, b):
    kinds = (b["x"][:, 0] > 0).astype(jnp.int32)
    counts = lax.psum(jax.nn.one_hot(kinds, 2).sum(0), AXIS)
    return (_losses(w, b) / (1.0 + counts)[kinds]).sum()


def _rare_by_product(w, b):
    kinds = jax.nn.one_hot((b["x"][:, 0] > 0).astype(jnp.int32), 2)
    return (_losses(w, b) / (kinds @ (1.0 + all_reduce(kinds.sum(0), "sum")))).sum()


MEET: dict[str, Loss] = {
    "clip": _clip,
    "simclr": _simclr,
    "supervised contrast": _supcon,
    "barlow twins": _barlow,
    "vicreg": _vicreg,
    "mean discrepancy": _mmd,
    "hardest triplets": _triplet,
    "dino, centred": _dino,
    "experts' balance": _balance,
    "whitened advantages": _advantages,
    "sharpness-aware": _sam,
    "gradient penalty of the mean": _penalty,
    "kinds weighted by how many there are": _rare,
    "the same, by a product": _rare_by_product,
}


def _losses(w, b):
    return ((jnp.tanh(b["x"] @ w) - b["y"][:, :2]) ** 2).sum(1)


def _plain(w, b):
    return _losses(w, b).mean()


def _counted(w, b):
    return (_losses(w, b) * b["mask"]).sum() / all_reduce(b["mask"].sum(), "mean")


def _counted_by_row(w, b):
    count = jnp.maximum(lax.psum(b["mask"].sum(), AXIS), 1.0) / lax.psum(1, AXIS)
    return _losses(w, b) @ (b["mask"] / count)


def _weighted(w, b):
    return all_reduce(_plain(w, b), weight=b["mask"].sum())


def _two_terms(w, b):
    count = all_reduce(b["mask"].sum(), "mean")
    hidden = jnp.tanh(b["x"] @ w)
    policy = -(jax.nn.log_softmax(hidden)[:, 0] * b["mask"]).sum() / count
    return policy + 0.5 * ((hidden.sum(1) - b["y"][:, 0]) ** 2).mean()


def _normed_by_flax(w, b):
    norm = nnx.BatchNorm(2, axis_name=AXIS, rngs=nnx.Rngs(0))
    return (jnp.tanh(norm(b["x"] @ w)) ** 2).mean()


def _normed(w, b):
    norm = BatchNorm(2, rngs=nnx.Rngs(0))
    return (jnp.tanh(norm(b["x"] @ w)) ** 2).mean()


def _by_kind(w, b):
    shares = jnp.asarray([0.25, 0.75])[b["kind"]]
    total = (_losses(w, b) * b["mask"] / shares).sum()
    return total / all_reduce(b["mask"].sum(), "mean")


def _scaled(w, b):
    scale = lax.stop_gradient(_mean(b["mask"].mean()))
    return scale * _plain(w, b)


def _reported(w, b):
    spread = _mean((_losses(w, b) - _mean(_plain(w, b))) ** 2)
    return _plain(w, b) + 0.0 * lax.stop_gradient(spread.sum())


def _scanned(w, b):
    def add(total, row):
        each = _losses(w, jax.tree.map(lambda leaf: leaf[None], row))
        return total + (each * row["mask"]).sum(), None

    total, _ = lax.scan(add, 0.0, b)
    return total / all_reduce(b["mask"].sum(), "mean")


APART: dict[str, Loss] = {
    "a mean": _plain,
    "a mean over replicas": lambda w, b: lax.pmean(_plain(w, b), AXIS),
    "a sum over a count of all": _counted,
    "rows over a count of all": _counted_by_row,
    "a weighted mean": _weighted,
    "two terms, one counted": _two_terms,
    "a mean and a penalty of the mean": lambda w, b: (
        _plain(w, b) + 0.1 * _mean(jnp.abs(b["x"] @ w).mean())
    ),
    "a scan over a count of all": _scanned,
    "rows weighted by their kind": _by_kind,
    "a mean, scaled by data": _scaled,
    "a spread that is reported": _reported,
    "recomputed, over a count of all": jax.checkpoint(_counted),
}
# Their own law says what they do under accumulation.
NORMS: dict[str, Loss] = {"a norm of flax": _normed_by_flax, "our norm": _normed}
