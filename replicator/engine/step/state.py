"""State of a run: born under its shardings, never whole in one place first."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.extend import core
from jax.sharding import NamedSharding

from replicator.base.host.collection_pause import collection_paused
from replicator.base.mesh import put, replicated, spans_processes
from replicator.base.per_replica import is_per_replica, repeat_own
from replicator.base.trees import (
    describe,
    first_difference,
    first_without_numbers,
    named_leaves,
)
from replicator.base.types import InitFn, Key, PyTree
from replicator.collectives.context.axes import one_state_for_all
from replicator.engine.analysis.other_meshes import other_meshes_refused
from replicator.engine.layout import Layout
from replicator.engine.program_key import program_key
from replicator.engine.step.donation import copied
from replicator.errors import ArgumentError, StateError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """Full state of a run between updates, as a checkpoint holds it.

    Attributes:
      step: Number of updates done, an int32 scalar.
      key: Data of the run's random key (`jax.random.key_data`); a step gets
        `fold_in(key, step)`. A typed key would keep JAX from its fast way of calling a
        compiled program: 300 µs a step.
      user: The state that the user's step sees.
      skipped: Number of updates left out for a bad number, an int32 scalar; None if not
        counted.
    """

    step: jax.Array
    key: jax.Array
    user: PyTree
    skipped: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FirstState:
    """A state whose shapes are known and that is not made yet: a resume needs no more.

    Attributes:
      shapes: `jax.ShapeDtypeStruct`s with shardings.
      born: Makes the state, compiled, each part on its device.
    """

    shapes: PyTree
    born: Callable[[], PyTree]


def strong(state: PyTree) -> PyTree:
    """Return a state of strongly typed arrays, like one from a step or a file.

    A number of Python is weakly typed. From such a first state a step would compute
    other dtypes than after an update, a resume, or a batch of another size: other bits,
    and another program.

    >>> strong({"scale": 2.0})["scale"].weak_type
    False
    """

    def array(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        return leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf

    return jax.tree.map(array, state)


def as_arrays(state: PyTree) -> PyTree:
    """Return a state whose leaves have JAX's dtypes, to be put on devices.

    Arrays of NumPy stay on the host: a device may have no room for the whole of an
    array of which it is to hold a piece.

    >>> as_arrays({"w": np.ones(2)})["w"].dtype
    dtype('float32')
    """

    def array(leaf: Any) -> jax.Array | np.ndarray:
        if type(leaf) is not np.ndarray or not leaf.dtype.isnative:
            return strong(leaf)
        return leaf.astype(canonicalize_dtype(leaf.dtype), copy=False)

    return jax.tree.map(array, state)


def check_own_axes(name: str, state: PyTree, layout: Layout) -> None:
    """Refuse `PerReplica` leaves of the argument `name` that lack their replica axis.

    Raises:
      ArgumentError: One does.
    """
    count = layout.num_replicas
    for path, node in named_leaves(state, is_leaf=is_per_replica):
        for leaf in jax.tree.leaves(node) if is_per_replica(node) else ():
            if jnp.shape(leaf)[:1] != (count,):
                raise ArgumentError(
                    f"`{name}` must hold a leading axis of {count} replicas at "
                    f"`{path}`, a `PerReplica` leaf, got {describe(leaf)}. Give each "
                    "replica its row, or make the state with `rep.init(init_fn)`."
                )


def in_form(state: PyTree, shapes: PyTree, layout: Layout) -> PyTree:
    """Return a state as it is kept, if it could be saved as that of a run.

    Args:
      state: State after an update that was not compiled here.
      shapes: Shapes of the first state.
      layout: Layout of the replicas on devices.

    Raises:
      StateError: Its structure, a shape or a dtype is another.
    """
    leaves, structure = jax.tree.flatten(state)
    wanted, first = jax.tree.flatten(shapes)
    if structure == first and all(
        getattr(leaf, "shape", None) == want.shape and leaf.dtype == want.dtype
        for leaf, want in zip(leaves, wanted, strict=True)
    ):
        return state  # the rest costs a hundred times as much
    state = layout.pad_state(state)
    difference = first_difference(shapes, state)
    if difference is not None:
        raise StateError(
            "`state` must be of the structure, shapes and dtypes of the first state, "
            f"got another: {difference}. Hand over every leaf, updated."
        )
    return state


def placed_copy(state: PyTree, layout: Layout, *, name: str = "state") -> PyTree:
    """Put a copy of a state on devices; it shares no memory with what was given.

    Args:
      state: Arrays and numbers, of JAX or of NumPy; declared `PerReplica` leaves have a
        leading replica axis.
      layout: Layout of the replicas on devices.
      name: Of the argument, for errors.

    Raises:
      ArgumentError: A leaf is not an array, or lacks its replica axis, or, if there is
        one replica, is not the same in all processes.
    """
    state, shardings = _given(name, state, layout)
    if layout.num_replicas == 1:  # each process keeps its pieces, and compares no more
        layout.processes.require_same_state(layout.mesh, state)

    leaves, structure = jax.tree.flatten(state)
    # Leaf by leaf: `put` may leave arrays where they are, or cut them out of host
    # memory; so no array is there three times at once.
    return structure.unflatten(
        copied(put(leaf, sharding))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def given_state(state: PyTree, layout: Layout, *, name: str) -> "FirstState":
    """Return a first state that is a copy of `state`; arguments as `placed_copy`'s."""
    given, shardings = _given(name, state, layout)
    shapes = jax.eval_shape(lambda tree: jax.tree.map(jnp.asarray, tree), given)
    layout.check_state(shapes)
    return FirstState(
        shapes=_with_shardings(shapes, shardings),
        born=lambda: placed_copy(state, layout, name=name),
    )


def _given(
    name: str, state: PyTree, layout: Layout
) -> tuple[PyTree, list[NamedSharding]]:
    """Return a state as it is kept, and its shardings."""
    _check_numbers(name, state)
    # First: a layout without `PerReplica` leaves refuses them, whatever their axis.
    state = layout.pad_state(as_arrays(state))
    shardings = layout.state_shardings(state)
    check_own_axes(name, state, layout)
    return state, shardings


def _check_numbers(name: str, state: PyTree) -> None:
    if found := first_without_numbers(state):
        raise ArgumentError(
            f"`{name}` must hold arrays and numbers, got {found}. Keep it out of the "
            "state."
        )


def state_shapes(state: PyTree, layout: Layout, *, name: str) -> PyTree:
    """Return the shapes, with shardings, of a state; no array is made.

    Args:
      state: Arrays or `jax.ShapeDtypeStruct`s, `PerReplica` leaves with a leading
        replica axis; or an `init_fn(key)`.
      layout: Layout of the replicas on devices.
      name: Of the argument, for errors.

    Raises:
      ArgumentError: A leaf is neither, or lacks its replica axis.
    """
    # A module is a tree of its arrays, though it may be called.
    if callable(state) and jax.tree_util.all_leaves([state]):
        return first_state(state, layout, key=jax.random.key(0)).shapes
    given = named_leaves(state)
    _check_numbers(
        name, {path: x for path, x in given if not isinstance(x, jax.ShapeDtypeStruct)}
    )
    shapes = jax.eval_shape(
        lambda tree: layout.pad_state(jax.tree.map(jnp.asarray, tree)), state
    )
    shardings = layout.state_shardings(shapes)
    check_own_axes(name, state, layout)
    return _with_shardings(shapes, shardings)


def first_state(init_fn: InitFn, layout: Layout, *, key: Key) -> FirstState:
    """Trace `init_fn(key)` once, and run nothing yet.

    Args:
      init_fn: Returns one replica's state; any pytree of arrays.
      layout: Layout of the replicas on devices.
      key: The key it gets.

    Returns:
      The state to be; declared `PerReplica` leaves have a leading replica axis.

    Raises:
      ArgumentError: A leaf is not an array, or has no place in this layout.
    """

    def whole(key: Key) -> PyTree:
        with one_state_for_all():
            made = init_fn(key)
        if made is None:
            raise ArgumentError(
                "`init_fn` must return the state, got None. End it with `return`."
            )
        if found := first_without_numbers(made):
            raise ArgumentError(
                f"`init_fn` must return arrays and numbers, got {found}. Keep it out "
                "of the state."
            )
        return layout.pad_state(
            repeat_own(strong(made), num_replicas=layout.num_replicas)
        )

    with collection_paused(), other_meshes_refused("init_fn"):
        traced, shapes = jax.make_jaxpr(whole, return_shape=True)(key)
    shardings = layout.state_shardings(shapes)
    layout.check_state(shapes)
    program = jax.jit(core.jaxpr_as_fun(traced), out_shardings=shardings)

    def born() -> PyTree:
        if layout.num_replicas == 1 and spans_processes(layout.mesh):
            # Pieces of different states would make a wrong one.
            processes, mesh = layout.processes, layout.mesh
            processes.require_same_state(mesh, {"key": key})
            found = functools.partial(program_key, program.lower(key))
            processes.require_same_program(mesh, found, name="init_fn")
        with other_meshes_refused("init_fn"):
            return jax.tree.structure(shapes).unflatten(program(key))

    return FirstState(shapes=_with_shardings(shapes, shardings), born=born)


def run_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return two keys: for `init_fn`, and for the steps.

    Raises:
      ArgumentError: `seed` is not a whole number, or has more than 64 bits.

    >>> for_init, for_steps = run_keys(0)
    >>> bool(for_init == for_steps)
    False
    """
    try:
        operator.index(seed)
        # As in `jax.random.key`: a whole number of Python has 64 bits.
        start = jnp.asarray(np.int64(seed) if isinstance(seed, int) else seed)
    except (TypeError, OverflowError) as failure:
        raise ArgumentError(
            f"`seed` must be a whole number of 64 bits, got {seed!r}. Use 0."
        ) from failure
    impl = jax.config.jax_default_prng_impl  # pyright: ignore
    for_init, for_steps = np.asarray(_two_keys(start, impl))
    return jax.random.wrap_key_data(for_init), jax.random.wrap_key_data(for_steps)


# One program for all seeds: single operations would be four programs to compile at a
# start. `jax.jit` does not notice a change of the default `impl`.
@functools.partial(jax.jit, static_argnames="impl")
def _two_keys(seed: jax.Array, impl: str) -> jax.Array:
    return jax.random.key_data(jax.random.split(jax.random.key(seed, impl=impl)))


def step_key(key: jax.Array, step: jax.Array) -> Key:
    """Return the key of a step, from `RunState.key` and the updates before it."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), step)


def first_run(init_fn: InitFn, layout: Layout, *, seed: int) -> FirstState:
    """Return the state of a run at step 0, not born yet.

    Args:
      init_fn: Returns one replica's state.
      layout: Layout of the replicas on devices.
      seed: Seed of the run's random key, from which `init_fn`'s key is split off.

    Returns:
      A `RunState` to be.
    """
    for_init, for_steps = run_keys(seed)
    return _first_run(first_state(init_fn, layout, key=for_init), for_steps, layout)


def given_run(state: PyTree, layout: Layout, *, seed: int) -> FirstState:
    """Return the state of a run at step 0 that begins with a copy of `state`.

    Args:
      state: As in `run(init_state=...)`.
      layout: Layout of the replicas on devices.
      seed: Seed of the run's random key; steps get the same as with `first_run`.

    Returns:
      A `RunState` to be.
    """
    _, for_steps = run_keys(seed)
    return _first_run(given_state(state, layout, name="init_state"), for_steps, layout)


def _first_run(user: FirstState, for_steps: Key, layout: Layout) -> FirstState:
    # On the host: the state is donated, and may be made once more. On a CPU arrays may
    # share memory with NumPy: each has memory of its own.
    ours = {
        "step": np.zeros((), np.int32),
        "key": np.array(jax.random.key_data(for_steps)),
        "skipped": np.zeros((), np.int32),
    }
    everywhere = replicated(layout.mesh)
    return FirstState(
        shapes=RunState(
            user=user.shapes, **_with_shardings(ours, [everywhere] * len(ours))
        ),
        born=lambda: RunState(user=user.born(), **put(ours, everywhere)),
    )


def _with_shardings(tree: PyTree, shardings: list[NamedSharding]) -> PyTree:
    """Describe leaves; `shardings` has one for each."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )
