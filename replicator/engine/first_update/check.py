"""Make the first two updates of a program twice: as compiled, and on one device.

XLA's partitioner is not right for every program, and it is not known for which. So the
results of a partitioned program are compared with those of one device from the same
state and batch, before the caller gets them. Gradients are not among the results of a
program: they show in the state of the optimizer (moments, traces, sums of squares), or,
if it does not divide by them, in how parameters moved. An optimizer that keeps only
their signs shows nothing.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax

from replicator.base.flat_tree import whole
from replicator.base.mesh import spans_processes
from replicator.base.out_of_memory import is_out_of_memory
from replicator.base.padded import unpadded
from replicator.base.types import Key, PyTree
from replicator.engine.first_update.comparison import differences, farthest_leaf, law
from replicator.engine.first_update.one_device import (
    NotChecked,
    OneDevice,
    UpdateInputs,
    on_host,
    results_of,
)
from replicator.engine.partitioned import PartitionedLayout
from replicator.engine.sharded_step import CompileOptions, one_replica
from replicator.engine.step.donation import copied
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.errors import PartitionError
from replicator.inputs.placement import Placed, batch_axis

UPDATES = 2
"""Number of updates that are checked: at the first, much of a state is zero."""

_TIMES_ITSELF = 3.0
_log = logging.getLogger(__name__)

Result = Literal["same", "rounding", "differs", "not checked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedUpdate:
    """Result of the check of one update.

    Attributes:
      program: Key of the program.
      update: Number of the update; `UPDATES` once there is nothing left to check.
      result: `"same"` by law 1's bound; `"rounding"` if the difference is more, and no
        more than that of one device with other roundings.
      why: The largest difference; or why it was not checked.
      seconds: Time of the check: to compile for one device, too, if that came first.
    """

    program: str
    update: int
    result: Result
    why: str
    seconds: float

    def __str__(self) -> str:
        """Return one line."""
        return f"update {self.update} is {self.result}: {self.why}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FirstUpdateCheck:
    """Callbacks of the check of first updates.

    Attributes:
      is_known: Whether the program of a key was checked before, in another process.
      report: Takes the result of each update, before an error is raised.
    """

    is_known: Callable[[str], bool] = lambda key: False
    report: Callable[[CheckedUpdate], None] = lambda update: None


class FirstUpdates:
    """The check of a step's first updates, of each program that it becomes.

    Attributes:
      found: Result of each check.

    Args:
      update: One update of one replica.
      layout: The partitioned layout.
      options: Options of the compiled step.
      check: Callbacks.
      once: `update` compiled by itself, if a program makes several in one call, between
        which the state is not seen.
      now_s: The time, for that of each check.
    """

    def __init__(
        self,
        update: KeyedStep,
        layout: PartitionedLayout,
        options: CompileOptions,
        check: FirstUpdateCheck,
        *,
        once: Callable[..., tuple[PyTree, PyTree]] | None,
        now_s: Callable[[], float],
    ) -> None:
        self._replica = one_replica(update, options)
        self._layout, self._options = layout, options
        self._check, self._once, self._now_s = check, once, now_s
        self._done: dict[str, int] = {}
        self._alone: dict[str, OneDevice] = {}
        self.found: list[CheckedUpdate] = []

    def is_done(self, program: str) -> bool:
        """Return whether all updates of the program of this key are checked."""
        if program not in self._done:
            self._done[program] = UPDATES * self._check.is_known(program)
        return self._done[program] >= UPDATES

    def hold(
        self, program: str, state: PyTree, batch: PyTree, key: Key | None
    ) -> UpdateInputs | None:
        """Copy the inputs of an update; None if it is not to be compared.

        Args:
          program: Key of the program.
          state: State before the update, as it is kept.
          batch: The batch as placed.
          key: The key of the step.

        Raises:
          PartitionError: As `compare`, for a program of several updates.
        """
        if spans_processes(self._layout.mesh):
            self._report(program, "not checked", "the mesh spans processes", 0.0)
        elif self._once is None:
            return self._given(program, whole(state), batch, key)
        else:
            try:
                self._check_rows(self._once, program, state, (batch, key))
            except (MemoryError, jax.errors.JaxRuntimeError) as failure:
                if not (isinstance(failure, MemoryError) or is_out_of_memory(failure)):
                    raise
                why = "the devices have no memory for a second state"
                self._report(program, "not checked", why, 0.0)
        return None

    def compare(
        self, program: str, given: UpdateInputs, state: PyTree, metrics: PyTree
    ) -> None:
        """Compare an update with that of one device from the same inputs.

        Args:
          program: Key of the program.
          given: Inputs of the update.
          state: State after it, as it is kept.
          metrics: Metrics of it.

        Raises:
          PartitionError: It differs by more than rounding does.
        """
        began_s = self._now_s()
        self._done[program] += 1
        try:
            result, why = self._compared(program, given, results_of(state, metrics))
        except NotChecked as reason:
            result, why = "not checked", str(reason)
        self._report(program, result, why, self._now_s() - began_s)
        if self.is_done(program):
            self._alone.pop(program, None)
        if result == "differs":
            strategy, devices = self._layout.strategy, self._layout.mesh.devices
            raise PartitionError(
                f"`strategy` must give the answer of one device, got {why}, under "
                f"{strategy.name} on {devices.size} devices: the step was cut wrongly. "
                "Use another one; `replicator.testing.assert_replica_invariant("
                "step_fn, init_fn, batch, strategy=...)` checks one."
            )

    def _check_rows(
        self, once: Callable, program: str, state: PyTree, inputs: tuple
    ) -> None:
        """Make the first updates of a call one by one, on a copy of its state."""
        state, cut = jax.tree.map(copied, whole(state)), self._options.accumulate
        rest: Any = {"examples": 0, "padded": False, "steps": 1, "accumulate": cut}
        for row in range(UPDATES):
            batch, key = jax.tree.map(lambda leaf, row=row: leaf[row], inputs)
            where = self._layout.batch_shardings(batch, axis=batch_axis(cut))
            batch = jax.device_put(batch, where)
            given = self._given(program, state, batch, key)
            if given is None:
                return
            state, metrics = once(state, Placed(value=batch, index=row, **rest), key)
            self.compare(program, given, state, metrics)
            if self.is_done(program):
                return

    def _given(
        self, program: str, state: PyTree, batch: PyTree, key: Key | None
    ) -> UpdateInputs | None:
        """Copy the inputs of an update; None if one device cannot make it."""
        given = on_host(UpdateInputs(unpadded(state), batch, key))
        device = self._layout.mesh.local_devices[0]
        try:
            if program not in self._alone:
                self._alone[program] = OneDevice(self._replica, given, device)
        except NotChecked as reason:
            self._report(program, "not checked", str(reason), 0.0)
            return None
        return given

    def _compared(
        self, program: str, given: UpdateInputs, found: list
    ) -> tuple[Result, str]:
        mesh = self._layout.mesh
        alone = self._alone[program]
        expected, before = alone.results(given), results_of(given.state, ())
        apart = differences(found, expected, before, alone.compared)
        if not apart:
            raise NotChecked("a rounding may turn over all that it returns")
        bound, result = law(mesh), "same"
        allowed = dict.fromkeys(apart, bound)
        if max(apart.values()) > bound:
            result = "rounding"
            for other in alone.others(given):
                itself = differences(other, expected, before, alone.compared)
                # A rounding at least: a single number may meet by chance.
                for group in apart.keys() & itself.keys():
                    off = _TIMES_ITSELF * max(itself[group], alone.rounding)
                    allowed[group] = max(allowed[group], off)
                if all(apart[group] <= allowed[group] for group in apart):
                    break
        worst = max(apart, key=lambda group: apart[group] / allowed[group])
        size = f"{apart[worst]:.1e} of its norm ({allowed[worst]:.1e} is allowed)"
        if apart[worst] <= allowed[worst]:
            shows = any(each and each.moves for each in alone.compared)
            blind = "" if shows else ", and no gradient shows in the results compared"
            return result, f"at most `{worst}` is off by {size}{blind}"
        leaf = farthest_leaf(worst, found, expected, alone.compared)
        wrong = sum(apart[group] > allowed[group] for group in apart)
        more = f", and {wrong - 1} more" if wrong > 1 else ""
        return "differs", f"`{leaf}` off by {size}{more}"

    def _report(self, program: str, result: Result, why: str, seconds: float) -> None:
        if result == "not checked":
            self._done[program] = UPDATES
        update = CheckedUpdate(
            program=program,
            update=self._done[program],
            result=result,
            why=why,
            seconds=round(seconds, 3),
        )
        self.found.append(update)
        _log.info("Checked: %s (%.1f s)", update, seconds)
        self._check.report(update)
