"""Pipelines over islands of this process: gradients and updates of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import LocalSum, controller
from replicator.engine.analysis.shared_noise import SharedRandomKeyWarning
from replicator.errors import OpFailedError
from tests.steps import lenient

RNG = np.random.default_rng(0)
TIED = {"3/table": "0/table"}


def weights(*shape):
    return RNG.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))


def embed(params, tokens):
    return params["table"][tokens]


def dense(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def head(params, x):
    return dense(params, x) @ params["table"].T


def loss(logits, targets):
    nats = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), targets["y"][:, None], axis=1
    )[:, 0]
    return LocalSum((nats * targets["mask"]).sum(), count=targets["mask"].sum())


STAGES = [embed, dense, dense, head]
PARAMS = [
    {"table": weights(11, 8)},
    {"w": weights(8, 8), "b": weights(8)},
    {"w": weights(8, 8), "b": weights(8)},
    {"w": weights(8, 8), "b": weights(8), "table": None},
]
X = RNG.integers(0, 11, 24)
TARGETS = {
    "y": RNG.integers(0, 11, 24),
    # Microbatches count for unlike numbers of examples.
    "mask": np.array([1] * 10 + [0, 1] * 7, np.float32),
}


@pytest.fixture(scope="module")
def pw():
    with controller.local(islands=2, devices=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def slices(pw):
    return [pw.slice(1, island=f"island{n % 2}") for n in range(4)]


def whole(params):
    """Return the loss of one device, which has the tied table once."""
    x = X
    tied = [*params[:3], {**params[3], "table": params[0]["table"]}]
    for stage, own in zip(STAGES, tied, strict=True):
        x = stage(own, x)
    total = loss(x, TARGETS)
    return total.value / total.count


@pytest.fixture(scope="module")
def wanted():
    return jax.jit(jax.value_and_grad(whole))(PARAMS)


def check(tree, wanted):
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def two_backwards_late(stages, slices, microbatches):
    """Return a schedule of one's own: the first backwards wait for one more forward."""
    orders = controller.one_f_one_b(stages, slices, microbatches)
    for ops in orders:
        at = next(n for n, op in enumerate(ops) if op.kind == "backward")
        if at + 1 < len(ops) and ops[at + 1].kind == "forward":
            ops[at], ops[at + 1] = ops[at + 1], ops[at]
    return orders


CASES = [
    ("one_f_one_b", 4, 6),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("gpipe", 4, 6),
            ("gpipe", 1, 1),
            ("one_f_one_b", 4, 1),
            ("one_f_one_b", 4, 2),
            ("interleaved", 2, 6),
            ("interleaved", 2, 3),
            (two_backwards_late, 4, 4),
        ]
    ],
]


@pytest.mark.parametrize(("schedule", "count", "microbatches"), CASES)
def test_gradients_equal_one_device(pw, slices, wanted, schedule, count, microbatches):
    pipe = pw.pipeline(
        STAGES, loss, slices[:count], microbatches, schedule, shared=TIED
    )
    found = pipe(pipe.init(PARAMS), X, TARGETS)
    check((found.loss, found.gradients), wanted)


@pytest.mark.slow
def test_updates_equal_one_device(pw, slices):
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    tx = lenient(optax.apply_if_finite(clipped, 3))
    pipe = pw.pipeline(STAGES, loss, slices, 3, optimizer=tx, shared=TIED)
    state = pipe.init(PARAMS)
    params, optimizer = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, optimizer):
        updates, optimizer = tx.update(jax.grad(whole)(params), optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    for _ in range(3):
        state = pipe(state, X, TARGETS).state
        params, optimizer = step(params, optimizer)
    check(state, (params, optimizer))


def noisy(params, x, key):
    keys = replicator.example_keys(key, len(x))
    return x * params["w"][None] * jax.vmap(jax.random.normal)(keys)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [noisy, jax.checkpoint(noisy)])
def test_example_keys_are_those_of_the_global_batch(pw, slices, stage):
    params = [{"w": weights(3)}, {"w": weights(3)}]
    x, key = weights(12, 3), jax.random.key(3)

    def mean(y, targets):
        return jnp.square(y).mean()

    def of_batch(params):
        return mean(noisy(params[1], noisy(params[0], x, key), key), None)

    pipe = pw.pipeline([stage, stage], mean, slices[:2], 4)
    found = pipe(pipe.init(params), x, key=key)
    check((found.loss, found.gradients), jax.value_and_grad(of_batch)(params))


def test_a_key_of_a_stage_s_own_number_warns_of_shared_noise(pw, slices):
    def dropped(params, x):
        return x * params["w"][None] * jax.random.normal(jax.random.key(1), x.shape)

    pipe = pw.pipeline([dropped], lambda y, _: y.mean(), slices[:1], 2)
    state = pipe.init([{"w": np.ones(3, np.float32)}])
    with pytest.warns(SharedRandomKeyWarning, match="every microbatch draws the same"):
        pipe.dataflow(state, weights(4, 3))


def test_weights_are_not_kept_for_each_microbatch(pw, slices):
    def square(params, x):
        return x @ params["w"]

    pipe = pw.pipeline([square] * 2, lambda y, _: y.sum(), slices[:2], 3)
    params = [{"w": weights(8, 8)}, {"w": weights(8, 8)}]
    flow = pipe.dataflow(pipe.init(params), weights(6, 8))
    forwards = [line for line in f"{flow}".splitlines() if "= forward0(" in line]
    # The token and the activation; the weights and the input are there.
    assert [line.count("float32[") for line in forwards] == [1, 1, 1]


def test_bytes_that_move_are_counted(pw, slices):
    def scale(params, x):
        return x * params["w"][None]

    pipe = pw.pipeline([scale] * 2, lambda y, _: y.sum(), slices[:2], 3)
    flow = pipe.dataflow(pipe.init([{"w": weights(8)}] * 2), weights(6, 8))
    # Activations and their gradients, and the count of the loss.
    assert flow.moved_bytes == 2 * 6 * 8 * 4 + 4


def test_forward_returns_the_last_stage(pw, slices):
    def double(params, x):
        return x * params["w"][None]

    pipe = pw.pipeline([double] * 2, lambda y, _: y.sum(), slices[:2], 3)
    two = [{"w": np.full(1, 2, np.float32)}] * 2
    x = weights(6, 8)
    np.testing.assert_array_equal(pipe.forward(pipe.init(two), x), 4 * x)


def test_forward_passes_a_key_and_the_places_of_examples(pw, slices):
    def numbered(params, x, key):
        keys = replicator.example_keys(key, len(x))
        return x * params["w"][None] + jax.vmap(jax.random.uniform)(keys)[:, None]

    pipe = pw.pipeline([numbered], lambda y, _: y.sum(), slices[:1], 2)
    state = pipe.init([{"w": np.ones(1, np.float32)}])
    x, key = np.zeros((4, 1), np.float32), jax.random.key(3)
    wanted = numbered({"w": np.ones(1, np.float32)}, x, key)
    np.testing.assert_array_equal(pipe.forward(state, x, key=key), wanted)


def test_an_error_of_a_stage_names_it(pw, slices):
    def fail(x):
        raise ValueError("no such luck")

    def failing(params, x):
        x = x * params["w"][None]
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    pipe = pw.pipeline([failing], lambda y, _: y.sum(), slices[:1], 1)
    state = pipe.init([{"w": np.ones(2, np.float32)}])
    with pytest.raises(OpFailedError, match=r"`forward0` on island0 .*no such luck"):
        pipe.forward(state, np.ones((2, 2), np.float32)).result()


def test_a_schedule_is_drawn(pw, slices):
    pipe = pw.pipeline(STAGES, loss, slices, 3, shared=TIED)
    assert pipe.to_svg().count('class="span"') == 2 * 4 * 3
