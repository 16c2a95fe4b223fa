"""Programs of several players: GANs, actors and critics, students and teachers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.truth import masks, optimizers
from benchmarks.truth.games import Game, game
from benchmarks.truth.program import Program
from benchmarks.truth.tasks import FEATURES, ROWS, drop, vectors, weights

_softplus = jax.nn.softplus


def _normal(keys, width, dtype):
    return jax.vmap(lambda key: jax.random.normal(key, (width,), dtype))(keys)


def _made(params, batch, world):
    z = _normal(world.keys, 3, batch["x"].dtype)
    hidden = jnp.tanh(z @ params["generator"]["w1"])
    return hidden @ params["generator"]["w2"]


def _made_normed(params, batch, world):
    z = _normal(world.keys, 3, batch["x"].dtype)
    hidden, _ = world.norm(z @ params["generator"]["w1"], world.weight)
    return jax.nn.gelu(hidden) @ params["generator"]["w2"]


def _judged(params, x):
    return jnp.tanh(x @ params["critic"]["w1"]) @ params["critic"]["w2"]


def _judged_spectrally(params, x, world):
    w1, u = params["critic"]["w1"], world.state["read"]["u"]
    v = lax.stop_gradient(_unit(w1 @ u))
    return jnp.tanh(x @ (w1 / (v @ w1 @ u))) @ params["critic"]["w2"]


def _unit(x):
    return x * lax.rsqrt(x @ x + 1e-12)


def _power_iteration(read, params):
    w1 = params["critic"]["w1"]
    return {"u": lax.stop_gradient(_unit(w1.T @ _unit(w1 @ read["u"])))}


_PLAYERS = {
    "critic": weights(30, w1=(FEATURES, 6), w2=(6,)),
    "generator": weights(31, w1=(3, 6), w2=(6, FEATURES)),
}
_BOTH = {"critic": optimizers.adam, "generator": optimizers.adam}


def _average(old, params):
    return jax.tree.map(lambda o, n: 0.9 * o + 0.1 * n, old, params["generator"])


def _copy_generator(params):
    return jax.tree.map(lambda leaf: leaf + 0, params["generator"])


_SATURATED = Game(
    players=_PLAYERS,
    tx=_BOTH,
    batch=vectors,
    losses={
        "critic": lambda p, b, w: (
            _softplus(-_judged(p, b["x"])) + _softplus(_judged(p, _made(p, b, w)))
        ),
        "generator": lambda p, b, w: _softplus(-_judged(p, _made(p, b, w))),
    },
)
_HINGE = dataclasses.replace(
    _SATURATED,
    before=_power_iteration,
    start={"u": np.full(6, 6**-0.5)},
    follow=_average,
    followers=_copy_generator,
    losses={
        "critic": lambda p, b, w: (
            jax.nn.relu(1.2 - _judged_spectrally(p, b["x"], w))
            + jax.nn.relu(1.2 + _judged_spectrally(p, _made(p, b, w), w))
        ),
        "generator": lambda p, b, w: -_judged_spectrally(p, _made(p, b, w), w),
    },
)
_NORMED = dataclasses.replace(
    _SATURATED,
    meets=True,
    losses={
        "critic": lambda p, b, w: (
            _softplus(-_judged(p, b["x"]))
            + _softplus(_judged(p, _made_normed(p, b, w)))
        ),
        "generator": lambda p, b, w: _softplus(-_judged(p, _made_normed(p, b, w))),
    },
)


def _penalised(p, b, w):
    """Wasserstein, with the gradient's norm between real and made near 1."""
    made = _made(p, b, w)
    mix = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 9)))(w.keys)
    between = made + mix.astype(made.dtype)[:, None] * (b["x"] - made)
    slope = jax.vmap(jax.grad(lambda x: _judged(p, x)))(between)
    norm = jnp.sqrt(jnp.square(slope).sum(-1) + 1e-6)
    return _judged(p, made) - _judged(p, b["x"]) + (norm - 1) ** 2


_WASSERSTEIN = dataclasses.replace(
    _SATURATED,
    tx={"critic": optimizers.clipped_adam, "generator": optimizers.rmsprop},
    losses={
        "critic": _penalised,
        "generator": lambda p, b, w: -_judged(p, _made(p, b, w)),
    },
)


def _transitions(rng):
    batch = vectors(rng)
    return {
        "x": batch["x"],
        "next": rng.normal(size=(ROWS, FEATURES)),
        "action": rng.normal(size=(ROWS, 2)),
        "chosen": batch["label"],
        "reward": batch["y"],
    }


def _value(q, x, action):
    return jnp.tanh(jnp.concatenate([x, action], -1) @ q["w1"]) @ q["w2"]


def _acted(p, x, keys):
    mean, spread = jnp.split(jnp.tanh(x @ p["actor"]["w"]), 2, axis=-1)
    noise = _normal(keys, 2, x.dtype)
    action = mean + jnp.exp(spread - 1) * noise
    return action, (-0.5 * noise**2 - spread).sum(-1)


def _sac_critic(p, b, w):
    action, log_p = _acted(p, b["next"], w.keys)
    target = w.state["follows"]
    alpha = jnp.exp(p["temperature"]["log"])
    soft = _value(target, b["next"], action) - alpha * log_p
    wanted = lax.stop_gradient(b["reward"] + 0.9 * soft)
    return (_value(p["critic"], b["x"], b["action"]) - wanted) ** 2


def _sac_actor(p, b, w):
    action, log_p = _acted(p, b["x"], w.keys)
    return jnp.exp(p["temperature"]["log"]) * log_p - _value(
        p["critic"], b["x"], action
    )


def _sac_temperature(p, b, w):
    _, log_p = _acted(p, b["x"], w.keys)
    return -p["temperature"]["log"] * lax.stop_gradient(log_p - 2.0)


def _slow_critic(old, params):
    return jax.tree.map(lambda o, n: o + 0.05 * (n - o), old, params["critic"])


_SAC = Game(
    players={
        "actor": weights(32, w=(FEATURES, 4)),
        "critic": weights(33, w1=(FEATURES + 2, 6), w2=(6,)),
        "temperature": {"log": np.asarray(-1.0)},
    },
    tx={
        "actor": optimizers.adam,
        "critic": optimizers.clipped_adam,
        "temperature": optimizers.sgd,
    },
    batch=_transitions,
    losses={
        "actor": _sac_actor,
        "critic": _sac_critic,
        "temperature": _sac_temperature,
    },
    follow=_slow_critic,
    followers=lambda params: jax.tree.map(lambda leaf: leaf + 0, params["critic"]),
)


def _dqn(p, b, w):
    """Double Q-learning with a target that is copied every second update."""

    def values(net, x):
        return jnp.tanh(x @ net["w1"]) @ net["w2"]

    best = values(p["q"], b["next"]).argmax(-1)[:, None]
    later = jnp.take_along_axis(
        values(w.state["follows"]["q"], b["next"]), best, axis=-1
    )[:, 0]
    now = jnp.take_along_axis(values(p["q"], b["x"]), b["chosen"][:, None], axis=-1)
    wanted = lax.stop_gradient(b["reward"] + 0.9 * later)
    return optax.huber_loss(now[:, 0], wanted)


def _copied(old, params):
    count = old["count"] + 1
    held = jax.tree.map(
        lambda o, n: jnp.where(count % 2 == 0, n, o), old["q"], params["q"]
    )
    return {"count": count, "q": held}


_DQN = Game(
    players={"q": weights(34, w1=(FEATURES, 6), w2=(6, 3))},
    tx={"q": optimizers.rmsprop},
    batch=_transitions,
    losses={"q": _dqn},
    keyed=False,
    follow=_copied,
    followers=lambda params: {
        "count": jnp.zeros((), jnp.int32),
        "q": jax.tree.map(lambda leaf: leaf + 0, params["q"]),
    },
)


def _byol(p, b, w):
    """Predict what a slow copy makes of another view; both are normalised globally."""

    def project(net, x):
        y, _ = w.norm(x @ net["w1"], w.weight)
        y = jax.nn.gelu(y) @ net["w2"]
        return y * lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + 1e-3)

    views = [
        drop(b["x"], jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(w.keys))
        for i in (1, 2)
    ]
    told = project(p["online"], views[0]) @ p["online"]["w3"]
    wanted = lax.stop_gradient(project(w.state["follows"], views[1]))
    return jnp.square(told - wanted).sum(-1)


_BYOL = Game(
    players={"online": weights(35, w1=(FEATURES, 4), w2=(4, 4), w3=(4, 4))},
    tx={"online": optimizers.adamw_schedule},
    batch=vectors,
    losses={"online": _byol},
    meets=True,
    follow=lambda old, params: jax.tree.map(
        lambda o, n: 0.9 * o + 0.1 * n, old, params["online"]
    ),
    followers=lambda params: jax.tree.map(lambda leaf: leaf + 0, params["online"]),
)


def _distilled(p, b, w):
    told = drop(jnp.tanh(b["x"] @ p["student"]["w1"]), w.keys) @ p["student"]["w2"]
    teacher = w.state["follows"]
    wanted = lax.stop_gradient(jnp.tanh(b["x"] @ teacher["w1"]) @ teacher["w2"])
    return (told - wanted) ** 2 + (told - b["y"]) ** 2


_TEACHER = Game(
    players={"student": weights(36, w1=(FEATURES, 6), w2=(6,))},
    tx={"student": optimizers.adam},
    batch=vectors,
    losses={"student": _distilled},
    follow=lambda old, params: jax.tree.map(
        lambda o, n: 0.9 * o + 0.1 * n, old, params["student"]
    ),
    followers=lambda params: jax.tree.map(lambda leaf: leaf + 0, params["student"]),
)


def _constrained(p, b, w):
    told = b["x"] @ p["primal"]["w"]
    return (told - b["y"]) ** 2 + p["dual"]["multiplier"] * (told - 0.1)


_LAGRANGIAN = Game(
    players={
        "primal": weights(37, w=(FEATURES,)),
        "dual": {"multiplier": np.asarray(0.5)},
    },
    tx={"primal": optimizers.momentum, "dual": optimizers.sgd},
    batch=vectors,
    losses={
        "primal": _constrained,
        "dual": lambda p, b, w: (
            -p["dual"]["multiplier"]
            * lax.stop_gradient(b["x"] @ p["primal"]["w"] - 0.1)
        ),
    },
    keyed=False,
)


def _uneven(rules: Game, counting, mask) -> Game:
    return dataclasses.replace(rules, counting=counting, mask=mask)


PROGRAMS: list[Program] = [
    game("gan-mean", _SATURATED),
    game("gan-padding-weight", _uneven(_SATURATED, "weight", masks.padded)),
    game("gan-padding-count", _uneven(_SATURATED, "count", masks.padded)),
    game("gan-spectral-ema-mean", _HINGE),
    game("gan-spectral-ema-count", _uneven(_HINGE, "count", masks.scattered)),
    game("gan-norm-mean", _NORMED),
    game("gan-norm-count", _uneven(_NORMED, "count", masks.scattered)),
    game("gan-norm-padding-count", _uneven(_NORMED, "count", masks.padded)),
    game("gan-wasserstein-penalty-mean", _WASSERSTEIN),
    game("gan-wasserstein-weight", _uneven(_WASSERSTEIN, "weight", masks.scattered)),
    game("sac-polyak-mean", _SAC),
    game("sac-polyak-count", _uneven(_SAC, "count", masks.padded)),
    game("dqn-periodic-mean", _DQN),
    game("dqn-importances-weight", _uneven(_DQN, "weight", masks.importances)),
    game("byol-norm-target-mean", _BYOL),
    game("byol-norm-target-count", _uneven(_BYOL, "count", masks.empty_replica)),
    game("teacher-dropout-count", _uneven(_TEACHER, "count", masks.empty_microbatch)),
    game("lagrangian-weight", _uneven(_LAGRANGIAN, "weight", masks.scattered)),
]
