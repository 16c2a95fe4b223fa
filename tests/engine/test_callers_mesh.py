"""A mesh that the caller has set, or whose names a model bears, changes no number."""

import contextlib
import functools
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import replicator
from replicator import strategies
from replicator.errors import ArgumentError
from replicator.nnx import params_of
from replicator.testing import assert_replica_invariant
from tests.steps import assert_equal_bits, mlp, regression_batch, trainer

BATCH = regression_batch()
SPLIT = {"whole_below_bytes": 0}
ENGINES = {
    "replicas": lambda: None,
    "fsdp": lambda: strategies.fsdp(**SPLIT),
    "tensor_parallel": lambda: strategies.Rules(
        [strategies.Rule(pattern="params/w1", stored=(None, "model"))],
        replica=None,
        model=2,
    ),
}


def grid(axis_type, names=("data", "model"), shape=(4, 2)):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


@contextlib.contextmanager
def set_for_good(mesh):
    jax.set_mesh(mesh)
    yield
    jax.set_mesh(None)


@contextlib.contextmanager
def old_way(mesh):
    with pytest.warns(DeprecationWarning, match="set_mesh"):
        mesh.__enter__()
    yield
    mesh.__exit__(None, None, None)


MESHES = {
    "explicit": lambda: jax.set_mesh(grid(AxisType.Explicit)),
    "auto": lambda: jax.set_mesh(grid(AxisType.Auto)),
    "our names": lambda: jax.set_mesh(
        grid(AxisType.Explicit, ("replica", "shard", "model"), (2, 2, 2))
    ),
    "two devices": lambda: jax.set_mesh(grid(AxisType.Explicit, ("x",), (2,))),
    "set for good": lambda: set_for_good(grid(AxisType.Explicit)),
    "with mesh": lambda: old_way(grid(AxisType.Auto)),
}


@functools.cache
def trained(engine):
    """Return a replicator and what it trains."""
    rep = replicator.Replicator(strategy=ENGINES[engine]())
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    return rep, init_fn, step_fn


def stepped(engine, tmp_path, accumulate=1):
    rep, init_fn, step_fn = trained(engine)
    step = rep.compile(step_fn, accumulate=accumulate)
    return jax.device_get(step(rep.init(init_fn), BATCH))


def put(engine, tmp_path):
    rep, init_fn, _ = trained(engine)
    return jax.device_get(rep.put(rep.init(init_fn)))


def inspected(engine, tmp_path):
    rep, init_fn, step_fn = trained(engine)
    return list(rep.inspect(step_fn, init_fn, BATCH).counts().values())


def evaluated(engine, tmp_path):
    rep, init_fn, _ = trained(engine)

    def eval_fn(state, batch):
        return {"x": mlp(state["params"], batch["x"])}

    state = rep.init(init_fn)
    return rep.evaluate(eval_fn, [BATCH], state=state)


def predicted(engine, tmp_path):
    rep, init_fn, _ = trained(engine)

    def predict_fn(state, batch):
        return mlp(state["params"], batch["x"])

    return rep.predict(predict_fn, [BATCH], rep.init(init_fn))


def in_session(engine, tmp_path):
    rep, init_fn, step_fn = trained(engine)
    dataset, given = [BATCH] * 2, {"init_fn": init_fn, "steps": 2, "display": False}
    with rep.session(dataset=dataset, **given) as session:
        step = session.compile(step_fn)
        for batch in session.batches():
            session.after(step(batch))
    return jax.device_get(session.result.state)


def resumed(engine, tmp_path):
    rep, init_fn, step_fn = trained(engine)
    for steps in (1, 2):
        result = rep.run(
            step_fn,
            [BATCH] * 2,
            init_fn=init_fn,
            steps=steps,
            checkpoint_dir=tmp_path,
            display=False,
        )
    return jax.device_get((result.state, result.metrics))


def invariant(engine, tmp_path):
    _, init_fn, step_fn = trained("replicas")
    few = {"replicas": (1, 2), "accumulate": (1, 2), "at_steps": (0, 1)}
    assert_replica_invariant(step_fn, init_fn, BATCH, strategy=ENGINES[engine](), **few)
    return 0


CALLS = {
    "step": stepped,
    "evaluate": evaluated,
    "session": in_session,
    "accumulate": functools.partial(stepped, accumulate=2),
    "put": put,
    "inspect": inspected,
    "predict": predicted,
    "resumed run": resumed,
    "invariant": invariant,
}


def is_quick(mesh, engine, call):
    quick = list(CALLS)[:3] if engine == "replicas" else ["step"]
    return mesh == "explicit" and engine != "tensor_parallel" and call in quick


def marks(mesh, engine, call):
    """All are for the night; of the slow ones each mesh and call meets an engine."""
    if is_quick(mesh, engine, call):
        return ()
    places = (list(MESHES).index(mesh), list(ENGINES).index(engine))
    number = sum(places) + list(CALLS).index(call)
    return [pytest.mark.slow] + [pytest.mark.nightly] * (number % len(MESHES) > 0)


TABLE = [
    pytest.param(*case, marks=marks(*case), id="-".join(case))
    for case in ((m, e, c) for m in MESHES for e in ENGINES for c in CALLS)
]


@functools.cache
def expected(engine, call):
    with tempfile.TemporaryDirectory() as folder:
        return CALLS[call](engine, Path(folder))


@pytest.mark.parametrize(("mesh", "engine", "call"), TABLE)
def test_a_mesh_of_the_caller_changes_no_bit(mesh, engine, call, tmp_path):
    without = expected(engine, call)
    with MESHES[mesh]():
        found = CALLS[call](engine, tmp_path)
    assert_equal_bits(found, without)


def test_the_callers_mesh_is_back_after_a_call():
    rep, init_fn, _ = trained("replicas")
    mesh = grid(AxisType.Explicit)
    with jax.set_mesh(mesh):
        rep.init(init_fn)
        assert jax.sharding.get_mesh() == mesh
    assert jax.sharding.get_mesh().empty


def test_a_step_is_not_compiled_again_under_a_mesh():
    rep, init_fn, step_fn = trained("replicas")
    step = rep.compile(step_fn)
    state, _ = step(rep.init(init_fn), BATCH)
    with jax.set_mesh(grid(AxisType.Explicit)):
        step(state, BATCH)
    assert len(step.compilations) == 1


ON_OTHERS = [grid(AxisType.Explicit), grid(AxisType.Explicit, ("x",), (2,))]


@pytest.mark.parametrize("mesh", ON_OTHERS, ids=["of all", "of two"])
def test_states_and_batches_may_lie_on_another_mesh(mesh):
    rep, init_fn, step_fn = trained("replicas")
    step = rep.compile(step_fn)
    want = step(rep.init(init_fn), BATCH)
    given = jax.device_put((rep.init(init_fn), BATCH), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        found = step(rep.put(given[0]), given[1])
    assert_equal_bits(jax.device_get(found), jax.device_get(want))


CLOSED = {
    "added": lambda x, table: x + table,
    "indexed by the batch": lambda x, table: table[jnp.argmax(x, axis=1)],
    "cut": lambda x, table: x + table[:1],
}


@pytest.mark.parametrize("engine", ["replicas", "fsdp"])
@pytest.mark.parametrize("use", CLOSED)
def test_an_array_on_another_mesh_may_not_be_closed_over(use, engine):
    rep, _, _ = trained(engine)
    table = jax.device_put(
        np.ones((1, 4), np.float32), NamedSharding(ON_OTHERS[0], P())
    )

    def step_fn(state, batch):
        return state, {"x": CLOSED[use](batch["x"], table).mean()}

    with pytest.raises(ArgumentError) as caught:
        rep.compile(step_fn)(rep.put({"a": np.ones(16, np.float32)}), BATCH)
    assert str(caught.value) == (
        "`step_fn` must compute with arrays that lie on no other mesh, got one that "
        "does. Close over `jax.device_get(array)`, or put it into the state."
    )


def test_init_fn_may_not_close_over_an_array_of_fewer_devices():
    rep, _, _ = trained("replicas")
    there = jax.device_put(np.ones(4, np.float32), NamedSharding(ON_OTHERS[1], P()))
    with pytest.raises(ArgumentError, match="`init_fn` must compute with arrays that"):
        rep.init(lambda key: {"a": there})


CONSTRAINTS = {
    "of names": P(None, "model"),
    "of another mesh": NamedSharding(grid(AxisType.Auto), P(None, "model")),
    "of our axis": NamedSharding(
        Mesh(np.array(jax.devices()), "replica"), P("replica")
    ),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_of_the_users_own_is_refused_on_replicas(name):
    rep, _, _ = trained("replicas")

    def step_fn(state, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], CONSTRAINTS[name])
        return state, {"x": x.mean()}

    with pytest.raises(ArgumentError, match="`step_fn` must leave it to the strategy"):
        rep.compile(step_fn)({"a": np.ones(3, np.float32)}, BATCH)


def boxed(names):
    """Return the parameters' maker and a loss of a linen layer."""
    make = nn.initializers.lecun_normal()
    if names is not None:
        make = nn.with_partitioning(make, names)
    dense = nn.Dense(1, kernel_init=make)

    def loss_fn(params, batch):
        return ((dense.apply(params, batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    return lambda key: dense.init(key, jnp.ones((1, 4))), loss_fn


def linen_state(engine, names):
    rep, _, _ = trained(engine)
    init_params, loss_fn = boxed(names)
    init_fn, step_fn = trainer(
        rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)), loss_fn, init_params
    )
    state, _ = rep.compile(step_fn)(rep.init(init_fn), BATCH)
    return jax.tree.leaves(jax.device_get(state))


NAMES = [("data", None), ("replica", None)]


@pytest.mark.parametrize("engine", ["replicas", "fsdp"])
@pytest.mark.parametrize("names", NAMES, ids=str)
def test_boxes_of_linen_change_no_number(names, engine):
    with jax.set_mesh(grid(AxisType.Auto)):
        found = linen_state(engine, names)
    assert_equal_bits(found, linen_state(engine, None))


def nnx_init_fn(key, *, eager):
    make = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    with nnx.use_eager_sharding(eager):
        return {"model": nnx.Linear(4, 16, kernel_init=make, rngs=nnx.Rngs(key))}


@pytest.mark.parametrize("engine", ["replicas", "fsdp"])
def test_names_of_nnx_variables_change_no_number(engine):
    rep, _, _ = trained(engine)

    def step_fn(state, batch):
        return state, {"x": state["model"](batch["x"]).mean()}

    init_fn = functools.partial(nnx_init_fn, eager=False)
    state, metrics = rep.compile(step_fn)(rep.init(init_fn), BATCH)
    assert np.isclose(metrics["x"], BATCH["x"].sum(axis=1).mean(), rtol=1e-5)
    assert params_of(state["model"])["kernel"].shape == (4, 16)


def test_an_nnx_variable_that_places_itself_is_refused_by_name():
    rep, _, _ = trained("replicas")
    with (
        jax.set_mesh(grid(AxisType.Auto)),
        pytest.raises(ArgumentError, match=r"Make the module under `with nnx\.use_eag"),
    ):
        rep.init(functools.partial(nnx_init_fn, eager=True))
