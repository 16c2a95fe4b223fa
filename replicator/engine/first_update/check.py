"""Make the first two updates of a program twice: as compiled, and on one device.

XLA's partitioner is not right for every program, and no list knows which. So what a
partitioned program returned is compared with what one device computes from the same
state and batch, before anybody else sees it. Gradients are not among the results of a
program: they show in what the optimizer keeps of them (moments, traces, sums of
squares), or, where nothing divides by them, in how parameters moved. An optimizer that
keeps only their signs shows nothing.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from replicator.base.flat_tree import whole
from replicator.base.mesh import spans_processes
from replicator.base.padded import unpadded
from replicator.base.types import Key, PyTree
from replicator.engine.analysis.dataflow import find_equation
from replicator.engine.first_update.comparison import (
    GRADIENT_TOLERANCE,
    SPLIT_TOLERANCE,
    Compared,
    differences,
    farthest_leaf,
    paths_and_groups,
)
from replicator.engine.first_update.sensitivity import comparable
from replicator.engine.first_update.wide import narrowest, widened
from replicator.engine.memory_errors import (
    is_out_of_memory,
    memory_limit_bytes,
    memory_need,
    readable,
)
from replicator.engine.partitioned import PartitionedLayout, traced_alone
from replicator.engine.sharded_step import (
    CompileOptions,
    Outputs,
    joined_metrics,
    one_replica,
)
from replicator.engine.step.donation import copied
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.state import RunState
from replicator.errors import PartitionError
from replicator.inputs.placement import Placed, batch_axis

UPDATES = 2
"""How many are checked: at the first, much of a state is zero."""

_TIMES_ITSELF = 3.0
_log = logging.getLogger(__name__)

Result = Literal["same", "rounding", "differs", "not checked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedUpdate:
    """What came of the check of one update.

    Attributes:
      program: Its key.
      update: Which of them; `UPDATES` once there is nothing left to check.
      result: `"same"` by law 1's bound; `"rounding"` where floats of fewer bits than 32
        differ by more, and no more than on one device.
      why: What differs most; or why it was not checked.
      seconds: That it took: to compile for one device, too, if that came first.
    """

    program: str
    update: int
    result: Result
    why: str
    seconds: float

    def __str__(self) -> str:
        """Tell it on one line."""
        return f"update {self.update} is {self.result}: {self.why}"


class Held(NamedTuple):
    """What an update begins with, on the host: the program takes its state over."""

    program: str
    given: PyTree  # shapes of state, batch and key
    leaves: list[np.ndarray]

    @property
    def state(self) -> list[np.ndarray]:
        """The leaves of the state."""
        return self.leaves[: len(jax.tree.leaves(self.given[0]))]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FirstUpdateCheck:
    """What is known of checks before, and who hears of this one.

    Attributes:
      is_known: Whether the program of a key was checked before, in another process.
      tell: Takes what came of each update, before an error is raised.
    """

    is_known: Callable[[str], bool] = lambda key: False
    tell: Callable[[CheckedUpdate], None] = lambda told: None


class FirstUpdates:
    """The check of a step's first updates, of each program that it becomes.

    Args:
      update: What one replica does in one update.
      layout: How it is partitioned.
      options: How it is lifted.
      check: What is known, and who hears of it.
      once: `update` compiled by itself, where a program makes several in one call:
        between them nobody sees the state.
    """

    def __init__(
        self,
        update: KeyedStep,
        layout: PartitionedLayout,
        options: CompileOptions,
        check: FirstUpdateCheck,
        *,
        once: Callable[..., tuple[PyTree, PyTree]] | None = None,
    ) -> None:
        self._update = update
        self._layout = layout
        self._options = dataclasses.replace(options, steps_per_call=1)
        self._check = check
        self._once = once
        self._done: dict[str, int] = {}
        self._alone: dict[str, _Alone] = {}
        self.found: list[CheckedUpdate] = []

    def is_done(self, program: str) -> bool:
        """Tell whether nothing of the program of this key is left to be checked."""
        if program not in self._done:
            self._done[program] = UPDATES * self._check.is_known(program)
        return self._done[program] >= UPDATES

    def hold(
        self, program: str, state: PyTree, batch: PyTree, key: Key | None
    ) -> Held | None:
        """Copy what an update begins with; None if it is not to be checked.

        Args:
          program: Its key.
          state: Before the update, as it is kept.
          batch: As placed.
          key: As the step takes it.
        """
        if self.is_done(program):
            return None
        if spans_processes(self._layout.mesh):
            self._report(program, "not checked", "the mesh spans processes", 0.0)
            return None
        if self._once is not None:
            self._check_once(program, state, batch, key)
            return None
        return _held(program, state, batch, key)

    def _check_once(self, program: str, state: PyTree, batch: PyTree, key: Any) -> None:
        assert self._once is not None
        state = jax.tree.map(copied, whole(state))
        for row in range(UPDATES):
            turn, own = jax.tree.map(lambda leaf, row=row: leaf[row], (batch, key))
            axis = batch_axis(self._options.accumulate)
            where = self._layout.batch_shardings(turn, axis=axis)
            value = jax.device_put(turn, where)
            held = _held(program, state, value, own)
            placed = Placed(
                value=value,
                examples=0,
                padded=False,
                index=row,
                steps=1,
                accumulate=self._options.accumulate,
            )
            state, metrics = self._once(state, placed, own)
            self.compare(held, state, metrics)

    def compare(self, held: Held, state: PyTree, metrics: PyTree) -> None:
        """Compare an update with what one device makes of what was held.

        Args:
          held: What it began with.
          state: After it, as it is kept.
          metrics: Of it.

        Raises:
          PartitionError: It differs by more than rounding does.
        """
        began_s = time.monotonic()
        self._done[held.program] += 1
        found = _on_host((_user(unpadded(whole(state))), metrics))
        try:
            result, why = self._compared(held, found)
        except _NotChecked as reason:
            result, why = "not checked", str(reason)
        self._report(held.program, result, why, time.monotonic() - began_s)
        if self._done[held.program] >= UPDATES:
            self._alone.pop(held.program, None)
        if result == "differs":
            layout = self._layout
            raise PartitionError(
                f"`strategy` must give the answer of one device, got {why} under "
                f"{layout.strategy.name} on {layout.mesh.devices.size} devices: the "
                "compiler cut this step wrongly. Use another strategy; "
                "`replicator.testing.assert_replica_invariant(step_fn, init_fn, batch, "
                "strategy=...)` tells which are right."
            )

    def _compared(self, held: Held, found: list[np.ndarray]) -> tuple[Result, str]:
        if held.program not in self._alone:
            alone = _Alone(self._update, self._options, self._layout, held)
            self._alone[held.program] = alone
        alone = self._alone[held.program]
        expected, before = alone.run(held), _of_user(held.given[0], held.state)
        is_split = self._layout.mesh.shape.get("model", 1) > 1
        law = SPLIT_TOLERANCE if is_split else GRADIENT_TOLERANCE
        apart = differences(found, expected, before, alone.compared)
        if not apart:
            raise _NotChecked("no result is compared: all may be turned by a rounding")
        allowed, result = dict.fromkeys(apart, law), "same"
        if alone.rounding and any(off > law for off in apart.values()):
            # What one device differs from itself, and a rounding at least: a single
            # number may meet by chance.
            wide = alone.run_wide(held)
            itself = differences(expected, wide, before, alone.compared)
            for group in apart:
                by = max(itself.get(group, np.inf), alone.rounding)
                allowed[group] = max(law, _TIMES_ITSELF * by)
            result = "rounding"
        wrong = [group for group, off in apart.items() if not off <= allowed[group]]
        worst = max(wrong or apart, key=lambda group: apart[group] / allowed[group])
        words = f"{apart[worst]:.1e} of its norm ({allowed[worst]:.1e} is allowed)"
        if not wrong:
            return result, f"at most `{worst}` is off by {words}"
        leaf = farthest_leaf(worst, found, expected, alone.compared)
        others = [f"`{group}`" for group in wrong if group != worst]
        more = f", and {', '.join(others[:3])} too" if others else ""
        return "differs", f"`{leaf}` off by {words}{more}"

    def _report(self, program: str, result: Result, why: str, seconds: float) -> None:
        if result == "not checked":
            self._done[program] = UPDATES
        told = CheckedUpdate(
            program=program,
            update=self._done[program],
            result=result,
            why=why,
            seconds=round(seconds, 3),
        )
        self.found.append(told)
        _log.info("First updates checked: %s (%.1f s)", told, seconds)
        self._check.tell(told)


class _NotChecked(Exception):
    """Why an update is not checked."""


class _Alone:
    """The program of one update on one device."""

    def __init__(
        self,
        update: KeyedStep,
        options: CompileOptions,
        layout: PartitionedLayout,
        held: Held,
    ) -> None:
        self._device = layout.mesh.local_devices[0]
        self._shapes = jax.tree.leaves(held.given)
        one = one_replica(update, options)
        traced, outputs = self._attempt(lambda: traced_alone(one, held.given))
        self._traced = traced
        self._results = jax.tree.structure(outputs)
        if find_equation(traced.jaxpr, _draws_by_place):
            raise _NotChecked("its random numbers depend on where they are drawn")
        self.compared = _compared_of(traced, held.given, outputs)
        self.rounding = narrowest(traced.jaxpr, on_cpu=self._device.platform == "cpu")
        self._require_room(held)
        self._program = self._compiled(core.jaxpr_as_fun(traced))
        self._wide: Any = None

    def run(self, held: Held) -> list[np.ndarray]:
        """Return the state and the metrics after the update."""
        return self._results_of(self._program, held)

    def run_wide(self, held: Held) -> list[np.ndarray]:
        """Likewise, in float32 at the highest precision."""
        if self._wide is None:
            self._wide = self._compiled(widened(self._traced))
        return self._results_of(self._wide, held)

    def _results_of(self, program: Any, held: Held) -> list[np.ndarray]:
        given = [
            jax.device_put(_as_given(leaf, shape), self._device)
            for leaf, shape in zip(held.leaves, self._shapes, strict=True)
        ]
        outputs = self._results.unflatten(self._attempt(lambda: program(*given)))
        return _on_host((_user(outputs.state), joined_metrics(outputs)))

    def _compiled(self, fn: Callable[..., Sequence]) -> Any:
        where = jax.sharding.SingleDeviceSharding(self._device)
        shapes = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=where)
            for each in self._shapes
        ]
        compiled = self._attempt(lambda: jax.jit(fn).lower(*shapes).compile())
        need, free = memory_need(compiled), self._free_bytes()
        if need is not None and free is not None and need.total_bytes > free:
            raise _NotChecked(f"one device would need {need.describe()}")
        return compiled

    def _require_room(self, held: Held) -> None:
        needed = 2 * sum(leaf.nbytes for leaf in held.state)
        free = self._free_bytes()
        if free is not None and needed > free:
            raise _NotChecked(f"one device would need {readable(needed)} for the state")

    def _free_bytes(self) -> int | None:
        limit = memory_limit_bytes([self._device])
        used = (self._device.memory_stats() or {}).get("bytes_in_use", 0)
        return None if limit is None else limit - used

    def _attempt(self, act: Callable[[], Any]) -> Any:
        """Do what one device may not be able to do."""
        try:
            return jax.block_until_ready(act())
        except Exception as failure:
            if is_out_of_memory(failure):
                raise _NotChecked("one device has not enough memory") from failure
            first = str(failure).partition("\n")[0][:200]
            raise _NotChecked(f"one device cannot run it: {first}") from failure


def _draws_by_place(eqn: core.JaxprEqn) -> bool:
    """Tell whether XLA draws random numbers: another device draws others."""
    name = eqn.primitive.name
    key = str(getattr(eqn.invars[0].aval, "dtype", "")) if eqn.invars else ""
    drawn = name in ("random_bits", "random_gamma") and "rbg" in key
    return drawn or name in ("rng_bit_generator", "rng_uniform")


def _compared_of(
    traced: core.ClosedJaxpr, given: PyTree, outputs: Outputs
) -> list[Compared | None]:
    """Say of each result, of the user's state and of the metrics, what it is."""
    state, batch, key = (jax.tree.leaves(each) for each in given)
    of_user = [True] * len(state + batch) + [False] * len(key)
    marks = jax.tree.structure(outputs).unflatten(
        compared + 2 * moves
        for compared, moves in zip(*comparable(traced.jaxpr, of_user), strict=True)
    )
    names = paths_and_groups(_user(outputs.state), joined_metrics(outputs))
    found = jax.tree.leaves((_user(marks.state), joined_metrics(marks)))
    return [
        Compared(*name, moves=mark == 3) if mark & 1 else None
        for name, mark in zip(names, found, strict=True)
    ]


def _held(program: str, state: PyTree, batch: PyTree, key: Any) -> Held:
    given = (unpadded(whole(state)), batch, key)
    return Held(program, jax.tree.map(_described, given), _on_host(given))


def _user(state: PyTree) -> PyTree:
    return state.user if isinstance(state, RunState) else state


def _of_user(shapes: PyTree, leaves: list[np.ndarray]) -> list[np.ndarray]:
    return jax.tree.leaves(_user(jax.tree.structure(shapes).unflatten(leaves)))


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def _on_host(tree: PyTree) -> list[np.ndarray]:
    """Copy the leaves: on a CPU an array of NumPy's may lie where a donated one did."""
    return [
        np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def _as_given(leaf: np.ndarray, shape: jax.ShapeDtypeStruct) -> Any:
    if not _is_key(shape):
        return leaf
    like: Any = shape
    return jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(like))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
