"""One optimizer's update, cut over stages: equal to that of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.collectives.moments import wider_dtype
from replicator.controller.pipeline.joint_update import JointUpdate
from replicator.controller.pipeline.parameters import homes_of
from replicator.errors import ArgumentError


@pytest.fixture(autouse=True)
def standard_promotion():
    """Let optax, and what is compared with it, promote as its users do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


RNG = np.random.default_rng(0)
PARAMS = [
    {"w": RNG.normal(size=(4, 3)).astype(np.float32), "scale": np.array(2, np.float32)},
    {"w": RNG.normal(size=(3, 3)).astype(np.float32)},
    {"w": RNG.normal(size=(3, 4)).astype(np.float32), "b": np.zeros(4, np.float32)},
]
GRADS = jax.tree.map(lambda leaf: RNG.normal(size=np.shape(leaf)) + leaf, PARAMS)
GRADS = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), GRADS)

OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "two norms": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.normalize_by_update_norm(),
        optax.sgd(0.1, momentum=0.9),
    ),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "muon": optax.contrib.muon(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "several": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


def flat(fn, *trees):
    """Return a function of leaves, which returns leaves."""
    structure = jax.tree.structure(trees)
    return lambda *leaves: jax.tree.leaves(fn(*jax.tree.unflatten(structure, leaves)))


def shapes(tree):
    return [
        jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))
        for leaf in jax.tree.leaves(tree)
    ]


def cut(tx, ops):
    """Return `tx.update` and new parameters, cut into ops, which are noted."""

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(PARAMS)
    of_params, of_state = homes_of(PARAMS, PARAMS), homes_of(state, PARAMS)
    joint = JointUpdate(
        flat(update, GRADS, state, PARAMS),
        shapes((GRADS, state, PARAMS)),
        homes=[*of_params, *of_state, *of_params],
        outputs=[home or 0 for home in (*of_params, *of_state)],
        specs=[None] * (len(of_params) + len(of_state)),
        stages=len(PARAMS),
    )

    def bind(stage, fn, out_specs):
        def run(arrays, packs):
            ops.append((stage, fn.__name__))
            return fn(arrays, packs)

        return run

    binds = [functools.partial(bind, stage) for stage in range(len(PARAMS))]
    ours = jax.jit(lambda *trees: joint(jax.tree.leaves(trees), binds))
    return ours, jax.jit(update), state


FAST = ("clip",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_an_update_cut_over_stages_equals_one_device(name):
    tx = OPTIMIZERS[name]
    ours, whole, state = cut(tx, [])
    params = PARAMS
    for factor in (1.0, 0.01):
        grads = jax.tree.map(
            lambda leaf, by=factor: np.asarray(leaf * np.float32(by)), GRADS
        )
        found = ours(grads, state, params)
        params, state = whole(grads, state, params)
        for one, other in zip(found, jax.tree.leaves((params, state)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
            assert one.dtype == other.dtype


def test_a_gradient_that_is_not_finite_on_one_stage_skips_all():
    ours, _, state = cut(OPTIMIZERS["finite"], [])
    grads = jax.tree.map(np.copy, GRADS)
    grads[1]["w"][0, 0] = np.nan
    found = ours(grads, state, PARAMS)
    for one, other in zip(found, jax.tree.leaves(PARAMS), strict=False):
        np.testing.assert_array_equal(one, other)


def test_stages_exchange_norms_in_one_round():
    ops = []
    ours, _, state = cut(OPTIMIZERS["clip"], ops)
    ours(GRADS, state, PARAMS)
    first = [(stage, "partial") for stage in range(3)]
    assert [(n, name.partition("_")[0]) for n, name in ops[:3]] == first
    assert [name for _, name in ops[3:]] == ["update0", "update1", "update2"]


def test_an_optimizer_that_reads_its_own_leaves_exchanges_nothing():
    ops = []
    ours, _, state = cut(optax.adam(0.1), ops)
    ours(GRADS, state, PARAMS)
    assert [name for _, name in ops] == ["update0", "update1", "update2"]


def test_arrays_of_several_stages_that_meet_are_refused_by_name():
    with pytest.raises(ArgumentError, match="`concatenate` of arrays of stages 0 and"):
        cut(optax.flatten(optax.adam(0.1)), [])


def test_half_precision_adds_up_in_single():
    assert wider_dtype(jnp.bfloat16, jnp.float32) == jnp.float32
