"""Run a function on every example of a dataset, once, with the same bits on any mesh.

The stream of examples is cut into blocks of a fixed size. Every block passes the same
`lax.scan` body, always as one of `BLOCKS_PER_CALL`, so its numbers depend neither on
how many replicas there are nor on how the dataset is batched; the host gets blocks in
example order. The last ones are filled up with examples that are there already.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS, put
from replicator.base.types import Dataset, PyTree
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.source_lines import user_line
from replicator.engine.layout import STATE, Layout, examples
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD, RunAhead
from replicator.engine.step.state import check_own_axes
from replicator.errors import ArgumentError, check_whole
from replicator.inputs.one_pass import BATCH, open_one_pass
from replicator.inputs.options import InputOptions
from replicator.inputs.remainder import MASK

BlockFn = Callable[[PyTree, PyTree, jax.Array], PyTree]
"""`block_fn(state, batch, real) -> outputs`: one block; `real` is 0 for filling."""

DEFAULT_BLOCK = 64
# Fixed, because a loop of another length may be compiled otherwise; even, because the
# door looks at the same rows in blocks of double size.
BLOCKS_PER_CALL = 4


class Block(NamedTuple):
    """What one block of examples yielded: NumPy leaves."""

    outputs: PyTree
    real: int  # how many of its rows are examples; the others only fill up
    replica: int  # which replica ran it


class Traced(NamedTuple):
    """What is known of the outputs before anything runs.

    Attributes:
      outputs: Shapes, with an axis of blocks in front.
      doubled: The same where blocks have twice the examples: an axis of examples is one
        that grows with them, not one that happens to be as long.
      jaxpr: The program, on the leaves of the state and of the rows.
      state: What it is called with.
      rows: Likewise, `{"batch": ..., "mask": ...}`.
    """

    outputs: PyTree
    doubled: PyTree
    jaxpr: core.Jaxpr
    state: PyTree
    rows: PyTree


class BlockRunner:
    """Run a function on the blocks of datasets; what was compiled is kept.

    Args:
      block_fn: What one replica does with one block.
      layout: How replicas lie on devices.
      name: Of the user's function, in errors.
      block: Examples in a block. Bits depend on it.
      max_in_flight: Calls dispatched and not yet finished, at most.
      check: Refuses outputs that will not do, once for each signature.

    Raises:
      ArgumentError: `block` is no whole number, or below 1, or too small to share.
    """

    def __init__(
        self,
        block_fn: BlockFn,
        layout: Layout,
        *,
        name: str,
        block: int,
        check: Callable[[Traced], None],
        max_in_flight: int = DEFAULT_RUN_AHEAD,
    ) -> None:
        check_whole("block", block)
        if block < 1:
            raise ArgumentError(f"`block` must be at least 1, got {block}. Use 1.")
        # One replica on many devices: each gets its part of the blocks of a call.
        parts = len(layout.batch_owners) // layout.num_replicas
        unit = parts // math.gcd(parts, BLOCKS_PER_CALL)
        if block % unit:
            raise ArgumentError(
                f"`block` must be a multiple of {unit} where a replica has {parts} "
                f"devices, got {block}. Use {block + -block % unit}."
            )
        self._layout = layout
        self._name = name
        self._block = block
        self._max_in_flight = max_in_flight
        self._check = check
        self._program = _make_program(block_fn, layout, block)
        self._doubled = _make_program(block_fn, layout, 2 * block)
        self._checked: set[tuple] = set()

    def run(
        self,
        state: PyTree,
        dataset: Dataset,
        take: Callable[[Block], None],
        *,
        inputs: InputOptions | None,
    ) -> None:
        """Hand every block that holds an example to `take`, in example order.

        Args:
          state: Of any replicas; neither changed nor donated.
          dataset: An iterable of batches of any sizes, or `input_fn(context)`, that
            ends. It is read once.
          take: Gets the same blocks in every process, so all decide the same.
          inputs: How the dataset is read.
        """
        state = self._place(state)
        ahead = RunAhead(self._max_in_flight)
        waiting: deque[_Outputs] = deque()
        rows = BLOCKS_PER_CALL * self._block
        with open_one_pass(
            dataset, self._layout, replica_batch=rows, options=inputs
        ) as batches:
            for batch in batches:
                self._check_once(state, batch)
                waiting.append(self._program(state, batch))
                ahead.admit(waiting[-1])
                while len(waiting) > ahead.in_flight:
                    _hand_over(waiting.popleft(), take)
        for outputs in waiting:
            _hand_over(outputs, take)

    def _place(self, state: PyTree) -> PyTree:
        state = jax.tree.map(jnp.asarray, state)
        check_own_axes("state", state, self._layout)
        return put(state, self._layout.state_shardings(state))

    def _check_once(self, state: PyTree, rows: PyTree) -> None:
        leaves, treedef = jax.tree.flatten((state, rows))
        signature = (treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        if signature in self._checked:
            return
        traced = self._program.trace(state, rows)
        jaxpr = traced.jaxpr.jaxpr
        _refuse_collectives(jaxpr, self._name)
        outputs, doubled = traced.out_info.outputs, self._double(state, rows)
        self._check(Traced(outputs, doubled, jaxpr, state, rows))
        self._checked.add(signature)

    def _double(self, state: PyTree, rows: PyTree) -> PyTree:
        try:
            return jax.eval_shape(self._doubled, state, rows).outputs
        except Exception as failure:
            failure.add_note(
                f"`{self._name}` was traced with {2 * self._block} examples, after "
                f"{self._block}, to see which results have one row per example."
            )
            raise


def has_rows(leaf: Any, doubled: Any, block: int) -> bool:
    """Tell whether an output has one row per example; see `Traced` for both."""
    return leaf.shape[1:2] == (block,) and doubled.shape[1:2] == (2 * block,)


class _Outputs(NamedTuple):
    """What one call hands back; leaves have a leading axis of blocks."""

    outputs: PyTree
    real: jax.Array  # how many rows of each block are examples


def _make_program(block_fn: BlockFn, layout: Layout, block: int) -> Any:
    """Return the jitted `program(state, {"batch", "mask"}) -> _Outputs`."""

    def replica(state: PyTree, rows: PyTree) -> _Outputs:
        leaves, treedef = jax.tree.flatten(state)

        def run(carry: None, each: PyTree) -> tuple[None, _Outputs]:
            # Built anew for each block: a module that counts or keeps statistics
            # changes a copy of its own, and the next block meets it as it was.
            own, real = treedef.unflatten(leaves), each[MASK]
            return carry, _Outputs(block_fn(own, each[BATCH], real), real.sum())

        blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), rows)
        return lax.scan(run, None, blocks)[1]

    rows = examples()
    return jax.jit(layout.spread(replica, inputs=(STATE, rows), outputs=rows))


def _hand_over(found: _Outputs, take: Callable[[Block], None]) -> None:
    """Fetch what a call found: every process has the blocks of all."""
    found = jax.device_get(found)
    for index, real in enumerate(found.real):
        if real:
            outputs = jax.tree.map(lambda x, i=index: x[i], found.outputs)
            take(Block(outputs, int(real), replica=index // BLOCKS_PER_CALL))


def _refuse_collectives(jaxpr: core.Jaxpr, name: str) -> None:
    """Refuse to mix blocks: which ones run side by side depends on the replicas."""
    found = dataflow.find_equation(
        jaxpr, lambda eqn: dataflow.is_collective(eqn, REPLICA_AXIS)
    )
    if found is not None:
        raise ArgumentError(
            f"`{name}` must not speak to other replicas, got `{found.primitive.name}` "
            f"at {user_line(found)}. Return what one replica finds: the blocks of all "
            "are put together."
        )
