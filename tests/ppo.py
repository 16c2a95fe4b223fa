"""PPO as PureJaxRL writes it: rollouts, then epochs of minibatches in `lax.scan`.

C. Lu et al., "Discovered Policy Optimisation", 2022 (github.com/luchris429/purejaxrl).
Minibatches are of times, so that a cut of the environments over replicas leaves them
the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicator
from tests.steps import lenient, normals

ENVS, TIMES, EPOCHS, MINIBATCHES = 16, 8, 2, 4
SEEN, HIDDEN, ACTIONS = 4, 16, 2


def alone(value):
    """Return what all replicas share, of one that there is."""
    return value


def push(cart, action, key):
    """Move a cart with a pole; begin anew where it fell. One environment."""
    place, speed, angle, turn = cart
    force = 20.0 * action - 10.0
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    whole = (force + 0.05 * turn**2 * sin) / 1.1
    turned = (9.8 * sin - cos * whole) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pushed = whole - 0.05 * turned * cos / 1.1
    moved = jnp.stack([place + 0.02 * speed, speed + 0.02 * pushed])
    moved = jnp.concatenate([moved, cart[2:] + 0.02 * jnp.stack([turn, turned])])
    fell = (jnp.abs(moved[0]) > 2.4) | (jnp.abs(moved[2]) > 0.1)
    anew = jax.random.uniform(key, (SEEN,), minval=-0.05, maxval=0.05)
    return jnp.where(fell, anew, moved), fell


def init_params(key):
    return {
        "body": normals(SEEN, HIDDEN, seed=1),
        "policy": normals(HIDDEN, ACTIONS, seed=2) / 10,
        "value": normals(HIDDEN, seed=3) / 10,
    }


def net(params, seen):
    hidden = jnp.tanh(seen @ params["body"])
    return jax.nn.log_softmax(hidden @ params["policy"]), hidden @ params["value"]


def rollout(params, carts, keys):
    """Act `TIMES` times; return where the carts are, and transitions [time, env]."""

    def act(carts, time):
        logits, _ = net(params, carts)
        drawn = jax.vmap(jax.random.fold_in, (0, None))(keys, time)
        action = jax.vmap(jax.random.categorical)(drawn, logits)
        moved, fell = jax.vmap(push)(carts, action.astype(jnp.float32), drawn)
        rows = {"seen": carts, "action": action, "fell": fell}
        return moved, rows | {"reward": jnp.ones(len(carts))}

    return lax.scan(act, carts, jnp.arange(TIMES))


def advantages(value, last_value, rows):
    """Return generalised advantages, [time, env]."""

    def back(carry, now):
        after, advantage = carry
        value, reward, fell = now
        goes_on = 0.99 * (1.0 - fell.astype(jnp.float32))
        advantage = reward + goes_on * after - value + 0.95 * goes_on * advantage
        return (value, advantage), advantage

    start = last_value, jnp.zeros_like(last_value)
    now = value, rows["reward"], rows["fell"]
    return lax.scan(back, start, now, reverse=True)[1]


def loss_fn(params, rows, shared):
    logits, value = net(params, rows["seen"])
    chosen = jnp.take_along_axis(logits, rows["action"][..., None], axis=-1)[..., 0]
    centred = rows["advantage"] - shared(rows["advantage"].mean())
    normed = centred * lax.rsqrt(shared((centred**2).mean()) + 1e-6)
    ratio = jnp.exp(chosen - rows["chosen"])
    gain = jnp.minimum(ratio * normed, jnp.clip(ratio, 0.8, 1.2) * normed)
    return jnp.mean(0.5 * (value - rows["target"]) ** 2 - gain)


def learn(train, rows, last_seen, key, *, optimizer, shared):
    """Make `EPOCHS` x `MINIBATCHES` updates; `train` is (params, optimizer state)."""
    logits, value = net(train[0], rows["seen"])
    advantage = advantages(value, net(train[0], last_seen)[1], rows)
    chosen = jnp.take_along_axis(logits, rows["action"][..., None], axis=-1)[..., 0]
    rows |= {"advantage": advantage, "target": advantage + value, "chosen": chosen}

    def update(train, minibatch):
        params, opt = train
        loss, grads = jax.value_and_grad(loss_fn)(params, minibatch, shared)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    def epoch(train, key):
        order = replicator.assume_replicated(jax.random.permutation(key, TIMES))
        order = order.reshape(MINIBATCHES, -1)
        return lax.scan(update, train, jax.tree.map(lambda leaf: leaf[order], rows))

    train, losses = lax.scan(epoch, train, jax.random.split(key, EPOCHS))
    return train, losses[-1, -1]


def ppo(optimizer, shared, *, envs=ENVS, own=alone):
    """Return `init_fn` and `step_fn` of acting and learning in one step.

    Args:
      optimizer: Of optax, or wrapped.
      shared: Returns the mean over replicas.
      envs: Of one replica.
      own: Declares what a replica has of its own.
    """
    init_learner, learner_step = ppo_learner(optimizer, shared)

    def init_fn(key):
        return {**init_learner(key), "carts": own(jnp.zeros((envs, SEEN)))}

    def step_fn(state, batch):
        carts = getattr(state["carts"], "value", state["carts"])
        keys = jax.random.wrap_key_data(batch["key"])
        carts, rows = rollout(state["params"], carts, keys)
        rows = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), rows)
        after, metrics = learner_step(state, rows | {"end": carts})
        return {**after, "carts": own(carts)}, metrics

    return init_fn, step_fn


def ppo_learner(optimizer, shared):
    """Return `init_fn` and `step_fn` of learning from trajectories [env, time]."""

    def init_fn(key):
        params, updates = init_params(key), jnp.int32(0)
        return {"params": params, "opt": optimizer.init(params), "updates": updates}

    def step_fn(state, rows):
        end, key = rows["end"], jax.random.fold_in(jax.random.key(1), state["updates"])
        rows = {name: rows[name].swapaxes(0, 1) for name in rows if name != "end"}
        train = state["params"], state["opt"]
        train, loss = learn(train, rows, end, key, optimizer=optimizer, shared=shared)
        updates = state["updates"] + 1
        return {"params": train[0], "opt": train[1], "updates": updates}, {"loss": loss}

    return init_fn, step_fn


def played(count, params):
    """Return trajectories [env, time] of so many updates, acted with `params`."""
    found = []
    for each in batches(count):
        keys = jax.random.wrap_key_data(each["key"])
        end, rows = jax.jit(rollout)(params, jnp.zeros((ENVS, SEEN)), keys)
        rows = jax.tree.map(lambda leaf: np.asarray(leaf.swapaxes(0, 1)), rows)
        found.append(rows | {"end": np.asarray(end)})
    return found


def by_hand(make, batches):
    """Return the state and the last metrics of plain jax and optax.

    Args:
      make: `ppo` or `ppo_learner`.
      batches: One of each update.
    """
    init_fn, step_fn = make(plain(), alone)
    state, step = init_fn(None), jax.jit(step_fn)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def plain():
    return lenient(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3)))


def batches(count):
    """Return the data of a key for each environment, of so many updates."""
    keys = [jax.random.split(jax.random.key(n), ENVS) for n in range(count)]
    return [{"key": np.asarray(jax.random.key_data(each))} for each in keys]
