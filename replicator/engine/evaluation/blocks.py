"""Run a function on every example of a dataset, once, with the same bits on any mesh.

The stream of examples is cut into blocks of a fixed size. Every block passes the same
`lax.scan` body, always as one of `BLOCKS_PER_CALL`, so its numbers depend neither on
the number of replicas nor on the batches of the dataset; the host gets blocks in
example order. The last ones are filled up with copies of examples.

One replica on many devices has every block cut over them: none computes the rows of
another.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS, put
from replicator.base.types import Dataset, PyTree
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.other_meshes import other_meshes_refused
from replicator.engine.analysis.source_lines import user_line
from replicator.engine.layout import STATE, Layout, examples
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD, RunAhead
from replicator.engine.step.donation import refuse_deleted
from replicator.engine.step.state import as_arrays, check_own_axes
from replicator.errors import ArgumentError, check_count
from replicator.inputs.one_pass import BATCH, open_one_pass
from replicator.inputs.options import InputOptions
from replicator.inputs.remainder import MASK

BlockFn = Callable[[PyTree, PyTree, jax.Array], PyTree]
"""`block_fn(state, batch, real) -> outputs`: one block; `real` is 0 for filling."""

DEFAULT_BLOCK = 64
# Fixed, because a loop of another length may be compiled otherwise; even, because the
# check before the first call runs the same rows in blocks of double size.
BLOCKS_PER_CALL = 4


class Block(NamedTuple):
    """Results of one block of examples: NumPy leaves."""

    outputs: PyTree
    real: np.ndarray  # which of its rows are examples; the others only fill up
    replica: int  # which replica ran it


class TracedBlocks(NamedTuple):
    """Traced program of blocks, and the shapes of its outputs.

    Attributes:
      outputs: Shapes, with an axis of blocks in front.
      doubled: Shapes for blocks of twice the examples: an axis of examples is one that
        grows with them, not one that happens to be as long.
      jaxpr: The program, on the leaves of the state and of the rows.
      state: State of the call.
      rows: Rows of the call, `{"batch": ..., "mask": ...}`.
      block: Number of examples in a block.
    """

    outputs: PyTree
    doubled: PyTree
    jaxpr: core.Jaxpr
    state: PyTree
    rows: PyTree
    block: int


@dataclasses.dataclass(eq=False)
class BlockRunner:
    """Run a function on the blocks of datasets; compiled programs are kept.

    Attributes:
      block_fn: Function of one replica, of one block.
      layout: Layout of the replicas on devices.
      name: Name of the user's function, in errors.
      block: Number of examples in a block. Bits depend on it. It is rounded up to a
        multiple of the devices that share a replica's examples.
      max_in_flight: Largest number of calls dispatched and not yet finished.
      check: Refuses wrong outputs, once for each signature.

    Raises:
      ArgumentError: `block` is not a whole number, or below 1.
    """

    block_fn: BlockFn
    layout: Layout
    _: dataclasses.KW_ONLY
    name: str
    block: int
    check: Callable[[TracedBlocks], None]
    max_in_flight: int = DEFAULT_RUN_AHEAD

    def __post_init__(self) -> None:
        check_count("block", self.block)
        self._checked: set[tuple] = set()

    def run(
        self,
        state: PyTree,
        dataset: Dataset,
        take: Callable[[Block], None],
        *,
        inputs: InputOptions | None,
    ) -> None:
        """Pass every block that holds an example to `take`, in example order.

        Args:
          state: A state of any replicas; neither changed nor donated.
          dataset: An iterable of batches of any sizes, or `input_fn(context)`, that
            ends. It is read once.
          take: Gets the same blocks in every process, so all decide the same.
          inputs: Options of the input.
        """
        refuse_deleted(state)
        state = self._place(state)
        programs = self.programs
        ahead = RunAhead(self.max_in_flight)
        waiting: deque[_BlockOutputs] = deque()
        with open_one_pass(
            dataset,
            self.layout,
            replica_batch=BLOCKS_PER_CALL * programs.block,
            blocks=BLOCKS_PER_CALL if programs.is_cut else 1,
            options=inputs,
        ) as batches:
            for batch in batches:
                self._check_once(state, batch)
                waiting.append(programs.run(state, batch))
                ahead.admit(waiting[-1])
                while len(waiting) > ahead.in_flight:
                    _hand_over(waiting.popleft(), programs.block, take)
        for outputs in waiting:
            _hand_over(outputs, programs.block, take)

    @functools.cached_property
    def programs(self) -> "_Programs":
        """The programs; a builder of strategies has seen the state before."""
        devices = len(self.layout.batch_owners) // self.layout.num_replicas
        block = self.block + -self.block % devices
        make = functools.partial(
            _make_program, self.block_fn, self.layout, is_cut=devices > 1
        )
        return _Programs(make(block), make(2 * block), block, is_cut=devices > 1)

    def _place(self, state: PyTree) -> PyTree:
        state = self.layout.pad_state(as_arrays(state))
        check_own_axes("state", state, self.layout)
        return put(state, self.layout.state_shardings(state))

    def _check_once(self, state: PyTree, rows: PyTree) -> None:
        leaves, treedef = jax.tree.flatten((state, rows))
        signature = (treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        if signature in self._checked:
            return
        programs = self.programs
        with other_meshes_refused(self.name):
            traced = programs.run.trace(state, rows)
        jaxpr = traced.jaxpr.jaxpr
        _refuse_collectives(jaxpr, self.name)
        outputs, doubled = traced.out_info.outputs, self._double(state, rows)
        self.check(TracedBlocks(outputs, doubled, jaxpr, state, rows, programs.block))
        self._checked.add(signature)

    def _double(self, state: PyTree, rows: PyTree) -> PyTree:
        try:
            return jax.eval_shape(self.programs.doubled, state, rows).outputs
        except Exception as failure:
            failure.add_note(
                f"`{self.name}` was traced with {2 * self.programs.block} examples, "
                f"after {self.programs.block}, to see which results have one row per "
                "example."
            )
            raise


def has_rows(leaf: Any, doubled: Any, block: int) -> bool:
    """Return whether an output has one row per example; see `TracedBlocks`.

    >>> has_rows(jnp.ones((4, 8, 2)), jnp.ones((4, 16, 2)), block=8)
    True
    """
    return leaf.shape[1:2] == (block,) and doubled.shape[1:2] == (2 * block,)


class _Programs(NamedTuple):
    """Programs that run blocks.

    Attributes:
      run: The jitted `program(state, {"batch", "mask"}) -> _BlockOutputs`.
      doubled: The same for blocks of twice the examples; only traced.
      block: Number of examples in a block.
      is_cut: Whether rows come as [blocks, block, ...], each block cut over devices.
    """

    run: Any
    doubled: Any
    block: int
    is_cut: bool


class _BlockOutputs(NamedTuple):
    """Results of one call; leaves have a leading axis of blocks.

    Attributes:
      outputs: Results of the function.
      real: Number of rows of each block that are examples: the first ones. For blocks
        that are cut, whether each row is one: processes that read for themselves fill
        up their own.
    """

    outputs: PyTree
    real: jax.Array


def _make_program(
    block_fn: BlockFn, layout: Layout, block: int, *, is_cut: bool
) -> Any:
    """Return a program; see `_Programs`."""

    def replica(state: PyTree, rows: PyTree) -> _BlockOutputs:
        leaves, treedef = jax.tree.flatten(state)

        def run(carry: None, each: PyTree) -> tuple[None, _BlockOutputs]:
            # Built anew for each block: a module that counts or keeps statistics
            # changes a copy of its own, and the next block gets the first one.
            own, real = treedef.unflatten(leaves), each[MASK]
            outputs = block_fn(own, each[BATCH], real)
            return carry, _BlockOutputs(outputs, real if is_cut else real.sum())

        after = 1 + int(is_cut)
        blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[after:]), rows)
        return lax.scan(run, None, blocks)[1]

    inputs = (STATE, examples(axis=int(is_cut)))
    return jax.jit(layout.spread(replica, inputs=inputs, outputs=examples()))


def _hand_over(found: _BlockOutputs, block: int, take: Callable[[Block], None]) -> None:
    """Fetch the results of a call: every process has the blocks of all."""
    found = jax.device_get(found)
    for index, given in enumerate(found.real):
        real = given != 0 if np.ndim(given) else np.arange(block) < given
        if real.any():
            outputs = jax.tree.map(lambda x, i=index: x[i], found.outputs)
            take(Block(outputs, real, replica=index // BLOCKS_PER_CALL))


def _refuse_collectives(jaxpr: core.Jaxpr, name: str) -> None:
    """Refuse to mix blocks: the number of replicas decides which run side by side."""
    found = dataflow.find_collective(jaxpr, REPLICA_AXIS)
    if found is not None:
        raise ArgumentError(
            f"`{name}` must not call collectives, got `{found.primitive.name}` at "
            f"{user_line(found)}. Return the results of one replica: the blocks of all "
            "are put together."
        )
