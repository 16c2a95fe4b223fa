"""Forty bad batches, first and later in a run, and in an own loop (fault row 11).

Each is refused by a typed error before a device works on it; nothing is compiled for
it; and the good step after it has the bits of a run that never met it.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.errors import BatchError, NonFiniteError
from replicator.inputs.options import InputOptions
from tests.steps import assert_equal_bits, replicas, trainer
from tests.steps import regression_batch as good

X, Y = (16, 4), (16,)
Pair = collections.namedtuple("Pair", ["x", "y"])
REFUSED = (BatchError, NonFiniteError)


def zeros(shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def but(**leaves):
    """Return a good batch in which some leaves are others."""
    return {**good(), **leaves}


def nan_at(leaf, *place):
    batch = good()
    batch[leaf][place] = np.nan
    return batch


def deleted():
    x = jnp.zeros(X)
    x.delete()
    return but(x=x)


@dataclasses.dataclass(frozen=True)
class Row:
    """A bad batch, and where it shows: a first batch can have any form."""

    make: Callable[[], Any]
    as_first: bool = True
    in_own_loop: bool = True


def other_form(make):
    """Describe a batch that is bad only after others, in an input."""
    return Row(make, as_first=False, in_own_loop=False)


ROWS = {
    # What is no batch at all.
    "nothing": Row(lambda: None),
    "a number": Row(lambda: 3.0),
    "a string": Row(lambda: "batch"),
    "no leaves": Row(dict),
    "empty containers": Row(lambda: {"x": {}, "y": []}),
    "a function": Row(lambda: but(x=print)),
    # Leaves that hold no numbers, or no axis of examples.
    "objects": Row(lambda: but(x=np.asarray([None] * 16, object))),
    "ragged rows": Row(lambda: but(x=np.asarray([[1], [1, 2]] * 8, object))),
    "text": Row(lambda: but(y=np.asarray(["a"] * 16))),
    "bytes": Row(lambda: but(y=np.asarray([b"a"] * 16))),
    "times": Row(lambda: but(y=np.zeros(16, "datetime64[s]"))),
    "durations": Row(lambda: but(y=np.zeros(16, "timedelta64[s]"))),
    "records": Row(lambda: but(y=np.zeros(16, [("a", "f4"), ("b", "i4")]))),
    "raw memory": Row(lambda: but(y=np.zeros(16, "V4"))),
    "an uneven list of numbers": Row(lambda: but(y=[[0.0], [0.0, 1.0]] * 8)),
    "a Python number": Row(lambda: but(y=0.0)),
    "a scalar array": Row(lambda: but(y=np.asarray(0.0, np.float32))),
    "a NumPy scalar": Row(lambda: but(y=np.float32(0))),
    "a scalar on a device": Row(lambda: but(y=jnp.zeros(()))),
    "an array that was donated": Row(deleted),
    "another byte order": Row(lambda: but(x=zeros(X, ">f4"))),
    # Numbers of examples.
    "no examples": Row(lambda: good(0)),
    "leaves of two lengths": Row(lambda: but(y=zeros(8))),
    "an uneven batch": Row(lambda: good(12), as_first=True),
    "an odd batch": Row(lambda: good(17)),
    "fewer than replicas": Row(lambda: good(3)),
    "one example": Row(lambda: good(1)),
    "more than before": other_form(lambda: good(32)),
    # Another form than the first batch had.
    "another trailing shape": other_form(lambda: but(x=zeros((16, 5)))),
    "an axis too few": other_form(lambda: but(x=zeros(16))),
    "an axis too many": other_form(lambda: but(x=zeros((16, 4, 1)))),
    "a column": other_form(lambda: but(y=zeros((16, 1)))),
    "integers": other_form(lambda: but(y=zeros(Y, np.int32))),
    "booleans": other_form(lambda: but(y=zeros(Y, bool))),
    "half precision": other_form(lambda: but(x=zeros(X, np.float16))),
    "bfloat16": other_form(lambda: but(x=zeros(X, jnp.bfloat16))),
    "complex numbers": other_form(lambda: but(x=zeros(X, np.complex64))),
    "unsigned bytes": other_form(lambda: but(x=zeros(X, np.uint8))),
    "a missing leaf": other_form(lambda: {"x": zeros(X)}),
    "a leaf that is None": other_form(lambda: but(y=None)),
    "a leaf too many": other_form(lambda: but(z=zeros(Y))),
    "another name": other_form(lambda: {"x": zeros(X), "Y": zeros(Y)}),
    "another nesting": other_form(lambda: but(x={"x": zeros(X)})),
    "a tuple": other_form(lambda: (zeros(X), zeros(Y))),
    "a named tuple": other_form(lambda: Pair(zeros(X), zeros(Y))),
    # Numbers that poison.
    "NaN in an input": Row(lambda: nan_at("x", 5, 2), in_own_loop=False),
    "NaN in a target": Row(lambda: nan_at("y", 15), in_own_loop=False),
}
FIRST = [name for name, row in ROWS.items() if row.as_first]
OWN = [name for name, row in ROWS.items() if row.in_own_loop]


class Trained:
    """One compiled step on eight replicas, and the bits it should come to."""

    def __init__(self):
        self.rep = replicas(8)
        self.init_fn, step_fn = trainer(self.rep.wrap_optimizer(optax.sgd(0.1)))
        # An input adds a mask to its batches: that is another program.
        self.step, self.fed_step = self.rep.compile(step_fn), self.rep.compile(step_fn)
        state = self.rep.init(self.init_fn)
        self.after = []
        for seed in range(3):
            state, _ = self.step(state, good(seed=seed))
            self.after.append(jax.device_get(state))
        self.train([good()])

    def count_programs(self):
        return len(self.step._programs), len(self.fed_step._programs)

    def train(self, batches):
        """Train on an input, as a run does; return the last good state and the rest."""
        state, done = self.rep.init(self.init_fn), 0
        failure = None
        with self.rep.batches(batches, InputOptions(epochs=1)) as placed:
            try:
                for batch in placed:
                    state, _ = self.fed_step(state, batch)
                    done += 1
            except REFUSED as refused:
                failure = refused
        return state, done, failure


@pytest.fixture(scope="module")
def trained():
    return Trained()


@pytest.mark.parametrize("name", ROWS)
def test_later_in_an_input_it_is_refused_and_no_step_is_lost(name, trained):
    batches = [good(seed=0), good(seed=1), ROWS[name].make(), good(seed=2)]
    state, done, failure = trained.train(batches)
    assert isinstance(failure, REFUSED)
    assert "batch 2" in str(failure)
    assert done == 2
    assert_equal_bits(state, trained.after[1])
    state, _ = trained.step(state, good(seed=2))
    assert_equal_bits(state, trained.after[2])
    assert trained.count_programs() == (1, 1)


@pytest.mark.parametrize("name", FIRST)
def test_first_in_an_input_it_is_refused_before_any_step(name, trained):
    _, done, failure = trained.train([ROWS[name].make(), good(seed=0)])
    assert isinstance(failure, REFUSED)
    assert done == 0
    assert trained.count_programs() == (1, 1)


@pytest.mark.parametrize("name", OWN)
def test_in_an_own_loop_it_is_refused_and_the_state_is_not_taken(name, trained):
    state, _ = trained.step(trained.rep.init(trained.init_fn), good(seed=0))
    with pytest.raises(BatchError):
        trained.step(state, ROWS[name].make())
    state, _ = trained.step(state, good(seed=1))
    assert_equal_bits(state, trained.after[1])
    assert trained.count_programs() == (1, 1)


@pytest.mark.parametrize("name", OWN)
def test_it_is_refused_at_once(name, trained):
    state = trained.rep.init(trained.init_fn)

    def refusal_s():
        batch = ROWS[name].make()
        started_s = time.perf_counter()
        with pytest.raises(BatchError):
            trained.step(state, batch)
        return time.perf_counter() - started_s

    # On a busy machine one try may be slow; it is enough that one is not.
    assert any(refusal_s() < 0.01 for _ in range(50))


@pytest.mark.parametrize("name", ["another trailing shape", "text", "NaN in a target"])
def test_a_run_that_met_it_goes_on_after_the_input_was_mended(name, tmp_path):
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def run(third, **where):
        batches = [good(seed=0), good(seed=1), third, good(seed=3)]
        return rep.run(
            step_fn, batches, init_fn=init_fn, steps=4, display=False, **where
        )

    where = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(REFUSED, match="batch 2"):
        run(ROWS[name].make(), **where)
    mended = run(good(seed=2), **where)
    assert mended.step == 4
    assert_equal_bits(mended.state, run(good(seed=2)).state)


def test_there_are_forty_of_them():
    assert len(ROWS) >= 40
