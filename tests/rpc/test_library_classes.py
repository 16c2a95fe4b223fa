"""States of optax and flax travel without being registered; nothing else does."""

import importlib.util
import subprocess
import sys

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from msgpack import ExtType, packb

from replicator import rpc
from replicator.errors import DecodeError, EncodeError
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.wire_format import TAG, in_one_piece
from tests.rpc.courier_cases import courier

PARAMS = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4)}
OPTIMIZERS = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1.0, 10)),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), 2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "parted": optax.multi_transform({"a": optax.adam(1.0)}, {"w": "a", "b": "a"}),
    "adafactor": optax.adafactor(1e-3),
    "lbfgs": optax.lbfgs(),
    "free": optax.contrib.schedule_free_adamw(),
    "guarded": optax.apply_if_finite(optax.sgd(1.0), 3),
}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


def train_state():
    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))


def same(found, sent):
    assert jax.tree.structure(found) == jax.tree.structure(sent)
    jax.tree.map(np.testing.assert_array_equal, found, sent)


@pytest.fixture
def echo():
    with courier("unix") as (client, _):
        yield client.echo


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_states_of_optimizers_travel(echo, optimizer):
    state = optimizer.init(PARAMS)
    same(echo(state), state)


@pytest.mark.parametrize(
    "value",
    [
        flax.core.freeze({"params": {"w": np.ones(3)}, "n": 1}),
        flax.core.freeze({}),
        DynamicScale(),
        [flax.core.freeze({"opt": optax.EmptyState()})],
    ],
    ids=str,
)
def test_values_of_flax_travel(echo, value):
    found = echo(value)
    assert type(found) is type(value)
    same(found, value)


def test_a_train_state_travels_but_for_its_functions(echo):
    state = train_state()
    found = echo(state)
    same(found.params, state.params)
    same(found.opt_state, state.opt_state)
    assert found.step == 0
    for use, field in (
        (lambda: found.apply_fn({}), "apply_fn"),
        (lambda: found.tx.update({}, {}), "tx"),
        (lambda: found.apply_gradients(grads=found.params), "tx"),
    ):
        with pytest.raises((TypeError, AttributeError), match=f"TrainState.{field}"):
            use()


def test_a_train_state_goes_on_with_functions_of_the_receiver(echo):
    state = train_state()
    found = rpc.fill(echo({"of": [state, 1]}), like={"of": [state, 2]})["of"][0]
    grads = jax.tree.map(jnp.ones_like, state.params)
    with jax.numpy_dtype_promotion("standard"):  # of optax itself
        same(found.apply_gradients(grads=grads), state.apply_gradients(grads=grads))
    assert found.apply_fn is state.apply_fn


def test_what_was_filled_keeps_its_own_arrays():
    sent, own = train_state().replace(step=7), train_state()
    head, buffers, _ = encode(sent)
    assert rpc.fill(decode(head, in_one_piece(buffers)), like=own).step == 7
    assert decode(head, in_one_piece(buffers)).step == 7, "what arrived is as it was"


def test_what_is_not_sent_is_sent_on_as_that(echo):
    found = echo(echo(train_state()))
    with pytest.raises(AttributeError, match=r"rpc\.fill"):
        found.tx.init(found.params)


def test_what_else_cannot_be_sent_is_named_and_not_the_functions():
    with pytest.raises(EncodeError, match=r"value\.params"):
        encode(train_state().replace(params={"w": object()}))


@pytest.mark.parametrize("value", [Net(), nn.Dense(3), optax.adam(1e-3)], ids=type)
def test_no_code_of_a_library_travels(value):
    with pytest.raises(EncodeError):
        encode(value)


def named(name, *parts):
    return packb([ExtType(TAG, b"O"), name, *parts])


@pytest.mark.parametrize(
    "name",
    [
        "flax.linen.linear:Dense",
        "flax.core.frozen_dict:FrozenDict.__init__",
        "optax:EmptyState",
        "optax._src.base:jnp",
        "optax._src.base:Any",
        "subprocess:Popen",
        "optax._src.base:",
        ":EmptyState",
        "optax.nowhere:EmptyState",
        "builtins:tuple",
        f"{__name__}:Net",
    ],
)
def test_only_data_of_these_libraries_is_made(name):
    with pytest.raises(DecodeError, match="registered"):
        decode(named(name))


def test_a_frozen_dict_is_made_of_a_dictionary_alone():
    # The keys of pairs were looked at by nobody: all may have one hash.
    with pytest.raises(DecodeError, match="must be of a dictionary"):
        decode(named("flax.core.frozen_dict:FrozenDict", "items", [[1, None]]))


def test_a_name_loads_no_lazy_module(tmp_path, monkeypatch):
    (tmp_path / "lazily.py").write_text("raise SystemExit('it was loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazily")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazily", module)
    spec.loader.exec_module(module)
    with pytest.raises(DecodeError, match="registered"):
        decode(named("lazily:Loaded"))


def test_a_name_imports_nothing():
    head = encode(optax.EmptyState()).head
    code = f"""
import sys
from replicator.rpc.codec.codec import decode
from replicator.rpc.codec.wire_format import in_one_piece
from replicator.errors import DecodeError
before = set(sys.modules)
try:
    decode({head!r})
except DecodeError as error:
    assert "import optax" in str(error)
else:
    raise SystemExit("it was made")
assert not {{"optax", "flax"}} & set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fields_are_those_of_the_class():
    decode(encode(optax.ScaleByScheduleState(1)).head)
    with pytest.raises(DecodeError, match="fields"):
        decode(named("optax._src.transform:ScaleByScheduleState", "size", 1))
