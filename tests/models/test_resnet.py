import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.resnet import BasicBlock, Bottleneck, ConvNorm, ResNet
from replicator.base.mesh import replica_mesh
from replicator.errors import ArgumentError
from replicator.nnx import BatchNorm, value_and_grad


def unit(*args, **kwargs):
    return ConvNorm(
        *args, norm=BatchNorm, compute_dtype=None, rngs=nnx.Rngs(0), **kwargs
    )


def abstract(*args, **kwargs):
    """Shapes of a model that is never computed."""
    return nnx.eval_shape(lambda: ResNet(*args, rngs=nnx.Rngs(0), **kwargs))


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        pytest.param(50, 25_557_032, marks=pytest.mark.slow),
    ],
)
def test_parameters_are_as_many_as_published(depth, expected):
    shapes = jax.tree.leaves(nnx.state(abstract(depth, 1000), nnx.Param))
    assert sum(leaf.size for leaf in shapes) == expected


@pytest.mark.parametrize(("stem", "pixels"), [("imagenet", 2), ("small", 8)])
def test_the_stem_decides_the_size_of_the_first_stage(stem, pixels):
    model = abstract(18, 10, width=4, stem=stem)
    x = jax.eval_shape(lambda m, x: m.stem(x, None), model, jnp.zeros((2, 8, 8, 3)))
    assert x.shape == (2, pixels, pixels, 4)


def test_a_bottleneck_strides_in_its_spatial_convolution():
    blocks = abstract(50, 10, width=4).blocks
    strided = [block for block in blocks if block.spatial.conv.strides == 2]
    assert len(strided) == 3
    assert {block.reduce.conv.strides for block in blocks} == {1}


def test_a_new_block_passes_on_what_it_gets(key):
    x = jax.random.uniform(key, (2, 4, 4, 8))  # not negative: ReLU keeps it
    y = jax.jit(lambda x: Bottleneck(8, 2, 1, unit)(x, None))(x)
    np.testing.assert_array_equal(y, x)


def test_half_precision_keeps_parameters_and_logits_in_single():
    model = abstract(50, 10, width=4, compute_dtype=jnp.bfloat16)
    features, logits = jax.eval_shape(
        lambda m, x: (m.stem(x, None), m(x)), model, jnp.zeros((2, 32, 32, 3))
    )
    assert features.dtype == jnp.bfloat16
    assert (logits.dtype, logits.shape) == (jnp.float32, (2, 10))
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}


def test_norms_take_the_statistics_that_the_user_chose():
    norm = functools.partial(BatchNorm, stats="replica", momentum=0.5)
    model = abstract(18, 10, width=4, norm=norm)
    norms = [m for _, m in nnx.iter_modules(model) if isinstance(m, BatchNorm)]
    assert len(norms) == 20
    assert {(each.stats, each.momentum) for each in norms} == {("replica", 0.5)}


class Tiny(nnx.Module):
    """A block of each kind, which takes seconds less to compile than a ResNet."""

    def __init__(self):
        self.basic = BasicBlock(1, 12, 2, unit)
        self.bottleneck = Bottleneck(12, 3, 1, unit)

    def __call__(self, x, *, weight=None):
        return self.bottleneck(self.basic(x, weight), weight).mean((1, 2))


MODELS = {
    "tiny": Tiny,
    "resnet18": lambda: ResNet(
        18, 10, width=4, in_channels=1, stem="small", rngs=nnx.Rngs(0)
    ),
}


def random_model(name):
    """Fill a model with numbers, so that no block is the identity that it starts as."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * rng.standard_normal(leaf.shape), leaf.dtype),
        nnx.eval_shape(MODELS[name]),
    )


def loss_fn(model, images, labels, weight):
    logits = model(images, weight=weight)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(weight * losses)


def gradients_and_statistics(model, batch):
    (_, model), grads = value_and_grad(loss_fn)(model, *batch)
    grads = jax.lax.psum(grads, "replica")
    return grads, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


@functools.cache
def compiled(replicas):
    return jax.jit(
        jax.shard_map(
            gradients_and_statistics,
            mesh=replica_mesh(replicas),
            in_specs=(P(), P("replica")),
            out_specs=P(),
            check_vma=False,
        )
    )


@pytest.fixture
def batch(key):
    """Images, labels, and a weight that makes six of the images padding."""
    images, labels = jax.random.split(key)
    return (
        jax.random.normal(images, (16, 8, 8, 1)),
        jax.random.randint(labels, (16,), 0, 10),
        (jnp.arange(16) < 10).astype(jnp.float32),
    )


def relative_distance(found, expected):
    found, expected = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (found, expected)
    )
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    "name", ["tiny", pytest.param("resnet18", marks=pytest.mark.slow)]
)
def test_eight_replicas_equal_one_device(name, batch):
    model = random_model(name)
    one, many = (compiled(replicas)(model, batch) for replicas in (1, 8))
    assert relative_distance(many[0], one[0]) <= 1.1e-5  # design law 1
    assert relative_distance(many[1], one[1]) <= 1.1e-5


def test_padded_images_change_nothing(batch):
    model = random_model("tiny")
    images, labels, weight = batch
    expected = compiled(8)(model, batch)
    found = compiled(8)(model, (images.at[10:].set(7.0), labels, weight))
    assert relative_distance(found, expected) <= 1e-6


@pytest.mark.parametrize(
    ("depth", "stem", "message"),
    [
        (
            20,
            "small",
            "`depth` must be one of [18, 34, 50, 101, 152], got 20. Use 18 or 50.",
        ),
        (
            18,
            "tiny",
            "`stem` must be one of ['imagenet', 'small'], got 'tiny'. "
            "Use 'small' for images of up to 32 pixels.",
        ),
    ],
)
def test_an_unknown_network_is_refused(depth, stem, message):
    with pytest.raises(ArgumentError) as error:
        ResNet(depth, 10, stem=stem, rngs=nnx.Rngs(0))
    assert str(error.value) == message
