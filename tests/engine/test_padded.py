"""What does not divide is kept with padding, and no step ever sees it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from replicator import Replicator, strategies, wrap_optimizer
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.errors import ArgumentError
from replicator.strategies import Padded, Rule, Rules, unpadded
from replicator.testing import assert_replica_invariant
from replicator.testing.invariance import GRADIENT_TOLERANCE
from tests.engine.test_partitioned import Model, adamw, apart, floats, over, trainer
from tests.steps import lenient, normals

WORDS, WIDTH = 13, 5
PAD = {"whole_below_bytes": 0, "uneven": "pad"}


def tied():
    """An embedding that is its own head; primes everywhere."""
    params = {"embedding": normals(WORDS, WIDTH, seed=1), "b": jnp.zeros(WIDTH)}

    def loss_fn(params, batch):
        rows = params["embedding"][batch["id"]] + params["b"]
        logits = jnp.tanh(rows) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["id"]
        ).mean()

    return Model(params, loss_fn, {"id": np.arange(16, dtype=np.int32) % WORDS})


def mlp():
    params = {"up": normals(7, 11, seed=1), "b": jnp.zeros(11)}
    params["down"] = normals(11, 3, seed=2)

    def loss_fn(params, batch):
        y = jnp.tanh(batch["x"] @ params["up"] + params["b"]) @ params["down"]
        return jnp.square(y - batch["x"][:, :3]).mean()

    return Model(params, loss_fn, {"x": floats(16, 7)(np.random.default_rng(0))})


VOCABULARY = Rules(
    [Rule(pattern="params/embedding", stored=("shard",), uneven="pad")], shard=None
)


@pytest.fixture(scope="module", autouse=True)
def lenient_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def two_steps(model, tx, rep, **options):
    init_fn, step_fn = trainer(model, tx)
    step, state = rep.compile(step_fn, **options), rep.init(init_fn)
    state, _ = step(state, model.batch)
    return step(state, model.batch)


def alone(model, tx=adamw):
    init_fn, step_fn = trainer(model, tx)
    step = jax.jit(step_fn)
    return step(step(init_fn(None), model.batch)[0], model.batch)


def test_a_vocabulary_that_does_not_divide_is_cut_with_padding_behind_it():
    state, metrics = two_steps(tied(), adamw, over(VOCABULARY))
    expected, wanted = alone(tied())
    kept, moments = state["params"]["embedding"], state["opt"][1][0].mu["embedding"]

    for each in (kept, moments):
        assert each.shape == (WORDS, WIDTH)
        assert each.padded.addressable_shards[0].data.shape == (2, WIDTH)
        assert not np.asarray(each.padded)[WORDS:].any()
    assert isinstance(state["params"]["b"], jax.Array)
    assert apart(unpadded(state), expected) <= 1e-4
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)


def poison(state):
    """Fill padding with NaN."""

    def fill(node):
        if not isinstance(node, Padded):
            return node
        values = np.full(node.padded.shape, np.nan, node.dtype)
        values[tuple(map(slice, node.shape))] = node
        return Padded(jax.device_put(values, node.sharding), node.shape)

    return jax.tree.map(fill, state, is_leaf=lambda node: isinstance(node, Padded))


@pytest.mark.parametrize("make", [tied, pytest.param(mlp, marks=pytest.mark.slow)])
def test_what_is_in_the_padding_reaches_no_value(make):
    model, rep = make(), over(strategies.fsdp(**PAD))
    init_fn, step_fn = trainer(model, adamw)
    step = rep.compile(step_fn)
    clean, _ = step(rep.init(init_fn), model.batch)
    found, metrics = step(poison(jax.tree.map(jnp.copy, clean)), model.batch)
    expected, wanted = step(clean, model.batch)

    jax.tree.map(np.testing.assert_array_equal, found, expected)  # padding is 0 again
    np.testing.assert_array_equal(metrics["loss"], wanted["loss"])
    predicted = rep.predict(
        lambda state, rows: jnp.full(
            len(jax.tree.leaves(rows)[0]),
            sum(jnp.sum(leaf) for leaf in jax.tree.leaves(state["params"])),
        ),
        [model.batch],
        poison(found),
    )
    assert np.isfinite(predicted).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero1", "zero2"])
def test_padding_adds_no_collective(name):
    strategy, counts = getattr(strategies, name)(**PAD), []
    for rows, width in ((16, 8), (WORDS, WIDTH)):
        params = {"embedding": normals(rows, width, seed=1), "b": jnp.zeros(width)}
        model = tied()
        model.params = params
        init_fn, step_fn = trainer(model, adamw)
        counts.append(over(strategy).inspect(step_fn, init_fn, model.batch).counts())
    assert counts[0] == counts[1]


def test_to_cut_and_to_pad_sends_nothing():
    model = mlp()

    def step_fn(state, batch):
        return jax.tree.map(lambda leaf: leaf * 2, state), {"n": batch["x"][0, 0]}

    rep = over(strategies.fsdp(**PAD))
    found = rep.inspect(step_fn, lambda key: {"params": model.params}, model.batch)
    assert found.wire_bytes <= 4 * 7  # of the metric


STRATEGIES = {
    "fsdp": strategies.fsdp(**PAD),
    "hybrid": strategies.hybrid(shard=4, **PAD),
    "zero1": strategies.zero1(**PAD),
    "zero2": strategies.zero2(replicas=2, **PAD),
    "tensor_parallel": strategies.tensor_parallel(
        {"*/embedding": ("model",), "*/up": (None, "model"), "*/down": ("model",)},
        model=4,
        replicas=2,
        uneven="pad",
    ),
}
MODELS = {"tied": tied, "mlp": mlp}


def strategy_for(name, model):
    chosen = STRATEGIES[name]
    if name != "tensor_parallel":
        return chosen
    rules = [r for r in chosen.rules if r.pattern[2:] in model.params]
    return Rules(rules, replica=2, model=4)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_pads_to_the_gradient_of_one_device(name, which, accumulate):
    model = MODELS[which]()
    rep = over(strategy_for(name, model))
    tx = rep.wrap_optimizer(adamw)
    init_fn, step_fn = trainer(model, tx)
    step, state = rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)
    pieces = shapes_of_pieces(state)
    expected = trainer(model, adamw)[0](None)
    run = jax.jit(trainer(model, adamw)[1])
    assert any(isinstance(leaf, Padded) for leaf in nodes(state))
    for number in range(3):
        state, _ = step(state, model.batch)
        expected, _ = run(expected, model.batch)
        if number == 0:
            inner = unpadded(state["opt"]).inner
            moments = inner[1][0].mu, expected["opt"][1][0].mu
            tolerance = 5e-5 if name == "tensor_parallel" else GRADIENT_TOLERANCE
            assert apart(*moments) <= tolerance
    assert apart(unpadded(state["params"]), expected["params"]) <= 1e-4
    assert shapes_of_pieces(state) == pieces


def shapes_of_pieces(state):
    return [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(state)]


def nodes(state):
    return jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Padded))


def fsdp_run(model, strategy, tmp_path, steps, **options):
    init_fn, step_fn = trainer(model, adamw)
    options = {"checkpoint_dir": tmp_path, "display": False, **options}
    rep = over(strategy) if strategy else Replicator(compilation_cache=False)
    tx = rep.wrap_optimizer(adamw)
    init_fn, step_fn = trainer(model, tx)
    return rep, rep.run(step_fn, [model.batch], init_fn=init_fn, steps=steps, **options)


@pytest.mark.slow
def test_a_checkpoint_holds_true_shapes_and_restores_under_any_strategy(tmp_path):
    model = tied()
    _, first = fsdp_run(model, strategies.fsdp(**PAD), tmp_path, 1)
    saved = restored(tmp_path)
    assert saved["user"]["params"]["embedding"].shape == (WORDS, WIDTH)
    np.testing.assert_array_equal(
        saved["user"]["params"]["embedding"], first.state["params"]["embedding"]
    )
    for steps, strategy in enumerate(
        (None, strategies.fsdp(shards=4, **PAD), strategies.zero1(**PAD)), start=2
    ):
        _, found = fsdp_run(model, strategy, tmp_path, steps)
        assert found.step == steps
    expected, run = trainer(model, adamw)[0](None), jax.jit(trainer(model, adamw)[1])
    for _ in range(4):
        expected, _ = run(expected, model.batch)
    assert apart(unpadded(found.state["params"]), expected["params"]) <= 1e-4


def restored(directory):
    with CheckpointStore(directory) as store:
        return store.restore().arrays


def test_a_state_is_restored_into_one_that_is_padded(tmp_path):
    state = over(VOCABULARY).put({"params": tied().params})
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=state))
        found = store.restore(jax.tree.map(jnp.zeros_like, state)).arrays
        part = store.restore(state, only="params/b").arrays
    kept = found["params"]["embedding"]
    assert kept.sharding == state["params"]["embedding"].sharding
    jax.tree.map(np.testing.assert_array_equal, found, state)
    jax.tree.map(np.testing.assert_array_equal, part, state)


def test_another_layout_takes_padding_off_or_pads_its_own_way():
    model = tied()
    state = over(strategies.fsdp(**PAD)).put({"params": model.params})
    eight = Replicator(compilation_cache=False).put(state)
    four = over(strategies.fsdp(shards=4, **PAD)).put(state)

    assert isinstance(eight["params"]["embedding"], jax.Array)
    assert four["params"]["embedding"].padded.shape == (16, WIDTH)
    assert four["params"]["b"].padded.shape == (8,)
    for found in (eight, four):
        np.testing.assert_array_equal(
            found["params"]["embedding"], model.params["embedding"]
        )


def score(state, rows):
    logits = state["params"]["embedding"][rows["id"]] @ state["params"]["embedding"].T
    return {"score": logits.mean(axis=-1)}


def test_evaluation_and_predictions_see_the_array_without_padding():
    model, rep = tied(), over(strategies.fsdp(**PAD))
    state = rep.put({"params": model.params})
    expected = score({"params": model.params}, model.batch)["score"]
    for given in (state, {"params": model.params}):
        found = rep.evaluate(score, [model.batch], state=given)
        np.testing.assert_allclose(found["score"], expected.mean(), rtol=1e-5)
    found = rep.predict(score, [model.batch], state)["score"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_session_takes_a_state_that_a_function_of_ones_own_made():
    model, rep = tied(), over(strategies.fsdp(**PAD))
    init_fn, step_fn = trainer(model, adamw)

    @jax.jit
    def halved(state):
        embedding = 0.5 * state["params"]["embedding"]
        return state | {"params": state["params"] | {"embedding": embedding}}

    with rep.session(init_fn=init_fn, dataset=None, steps=2, display=False) as session:
        step = session.compile(step_fn)
        for number in session.steps():
            metrics = step(model.batch)
            state = session.state if number == 1 else halved(session.state)
            session.after(metrics, state=state)
    kept = session.result.state["params"]["embedding"]
    expected, _ = alone(model)
    assert kept.padded.shape == (16, WIDTH)
    assert apart(jnp.asarray(kept) * 2, expected["params"]["embedding"]) <= 1e-4


@pytest.mark.slow
def test_a_step_that_is_debugged_sees_the_array_without_padding():
    model, rep = tied(), over(strategies.fsdp(**PAD))
    init_fn, step_fn = trainer(model, adamw)
    found = rep.run(
        step_fn, [model.batch], init_fn=init_fn, steps=2, debug=True, display=False
    )
    assert apart(found.state["params"], alone(model)[0]["params"]) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero2"])
def test_the_law_holds_for_a_padded_strategy(name):
    model = mlp()
    init_fn, step_fn = trainer(model, wrap_optimizer(adamw))
    report = assert_replica_invariant(
        step_fn,
        init_fn,
        model.batch,
        replicas=(1, 4),
        accumulate=(1, 2),
        at_steps=(0, 1, 3),
        strategy=STRATEGIES[name] if name == "fsdp" else strategies.zero2(**PAD),
    )
    assert report.comparisons


OPTIMIZERS = {
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "masked": optax.masked(optax.adamw(1e-2), {"embedding": True, "b": False}),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_the_state_of_an_optimizer_of_any_shape_is_right(which):
    tx = lenient(optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[which]))
    state, _ = two_steps(tied(), tx, over(strategies.fsdp(**PAD)))
    assert apart(unpadded(state["params"]), alone(tied(), tx)[0]["params"]) <= 1e-4


def test_a_train_state_keeps_its_methods():
    model, rep = tied(), over(strategies.fsdp(**PAD))

    def init_fn(key):
        return TrainState.create(apply_fn=model.loss_fn, params=model.params, tx=adamw)

    def step_fn(state, batch):
        grads = jax.grad(state.apply_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), {}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    for _ in range(2):
        state, _ = step(state, model.batch)
    assert isinstance(state.opt_state[1][0].mu["embedding"], Padded)
    assert apart(unpadded(state.params), alone(model)[0]["params"]) <= 1e-4


class Net(nnx.Module):
    """An embedding and a layer, of prime sizes."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layer = nnx.Linear(WIDTH, 7, rngs=rngs)

    def __call__(self, ids):
        return self.layer(self.embed(ids))


def test_an_nnx_module_and_its_optimizer_are_padded_and_can_be_called():
    rep, ids = over(strategies.fsdp(**PAD)), np.arange(16, dtype=np.int32) % WORDS

    def init_fn(key):
        model = Net(nnx.Rngs(key))
        return {"model": model, "opt": nnx.Optimizer(model, adamw, wrt=nnx.Param)}

    def step_fn(state, batch):
        model, optimizer = state["model"], state["opt"]
        loss, grads = nnx.value_and_grad(
            lambda model: jnp.square(model(batch["id"])).mean()
        )(model)
        optimizer.update(model, grads)
        return {"model": model, "opt": optimizer}, {"loss": loss}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    expected = unpadded(jax.device_get(state))
    state, metrics = step(state, {"id": ids})
    _, wanted = jax.jit(step_fn)(expected, {"id": ids})

    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
    assert state["model"].embed.embedding.get_value().padded.shape == (16, WIDTH)
    called = jax.jit(lambda model: model(ids))(state["model"])
    np.testing.assert_allclose(called, unpadded(state["model"])(ids), rtol=1e-5)


def test_what_names_more_dimensions_than_there_are_is_refused():
    rule = Rule(pattern="*", stored=(None, "shard"), uneven="pad")
    with pytest.raises(ArgumentError, match=r"`params/b` must have as many dimensions"):
        over(Rules([rule], shard=None)).put({"params": tied().params})


def test_random_keys_and_numbers_stay_whole():
    state = {"params": tied().params, "key": jax.random.split(jax.random.key(0), 3)}
    rule = Rule(pattern="*", stored=("shard",), uneven="pad")
    found = over(Rules([rule], shard=None)).put(state | {"n": 3})
    assert found["key"].shape == (3,)
    assert found["n"].sharding.is_fully_replicated


def test_inspection_counts_padded_bytes_and_names_variables():
    model, rep = tied(), over(strategies.fsdp(**PAD))
    init_fn, step_fn = trainer(model, optax.sgd(0.1))
    found = rep.inspect(step_fn, init_fn, model.batch)

    # 16 of 13 rows, 8 of 5 numbers, over 8 devices; and two examples.
    kept_bytes = (16 * WIDTH + 8) * 4 // 8
    assert found.memory.arguments_bytes == kept_bytes + 2 * 4
    assert found.memory.aliased_bytes == kept_bytes  # donated, and taken
    assert {each.variable for each in found.collectives} >= {"params/embedding"}
