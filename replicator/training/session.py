"""All of a run but its loop, as an object, for users who write the loop.

`run` is a session and a `for`. A session opens checkpoints, input, hooks, records, the
watchdog and signal handlers; the loop hands it each step; however the loop ends, the
session closes them all and its journal records the end. A run that goes back past a
bad number is opened again inside of the session: the loop only sees a lower step
number.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from replicator.base.flat_tree import FlatTree, whole
from replicator.base.tracebacks import short_traceback, short_tracebacks
from replicator.base.types import Key, PyTree, StepFn
from replicator.engine.require_eager import in_no_mesh
from replicator.engine.run_ahead import RunAhead
from replicator.engine.step.state import in_form, step_key
from replicator.errors import ArgumentError, check_function
from replicator.hooks.hook_states import hook_states
from replicator.inputs.placement import Placed, placed
from replicator.inputs.position import Position
from replicator.training.checkpoint_hook import open_store
from replicator.training.closing import close_all
from replicator.training.guards import guarded, log_end, require_possible
from replicator.training.loop import LoopResult
from replicator.training.node import STOPPED
from replicator.training.nonfinite.rollback import GoingBack
from replicator.training.open_run import EndOfBatches, Opened, SessionBatches, open_run
from replicator.training.postmortem.examine import RecordsFailure, examined
from replicator.training.preemption.preemption import Preemption
from replicator.training.reports.records import alone
from replicator.training.run_spec import RunSpec

MOST_BATCHES_OF_AN_UPDATE = 10_000  # a loop that takes more has forgotten `after`
_SAME: Any = object()


@short_tracebacks
class Session:
    """A run whose loop is yours; `rep.session` makes it, a `with` block opens it.

    >>> with rep.session(step_fn, dataset, init_fn=init_fn, steps=3) as session:
    ...     for batch in session.batches():
    ...         metrics = session.step(batch)
    >>> session.result.step
    3

    Without a `step_fn` the loop has steps of its own (`compile`), any number per update
    of the run, and calls `after` when an update is done. Use a session in the thread
    that opened it. Sessions at the same time need devices of their own.

    Args:
      spec: The run, checked and not open yet.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._step = None if spec.step is None else RecordsFailure(spec.step)
        self._first_states = (
            hook_states(spec.hooks) if spec.recovery.policy.goes_back else []
        )
        self._outer = ExitStack()
        self._inner = ExitStack()  # of one opening: a run that goes back has several
        self._preemption: Preemption | None = None
        self._open: Opened | None = None
        self._result: LoopResult | None = None
        self._run_ahead = RunAhead()  # of steps that do not bound it themselves
        self._position = Position()
        self._taken: list[int] = []  # examples of each batch since the last step
        self._thread = 0

    @in_no_mesh
    def __enter__(self) -> Self:
        """Open the run at its last checkpoint, or at its beginning.

        Raises:
          ArgumentError: It is open; or it must be able to go back, and has no
            checkpoints or a dataset that cannot be read again.
          CheckpointInUseError: Another run writes to the directory.
          Exception: Any error of the dataset or of a hook.
        """
        if self._open is not None:
            raise ArgumentError(
                "`session` must be closed to be opened, got an open one. Make another."
            )
        spec, self._result, self._thread = self._spec, None, threading.get_ident()
        require_possible(spec)
        # A hook listed twice is closed once: methods of one object are equal.
        closers = list(dict.fromkeys(hook.close for hook in spec.hooks))
        with ExitStack() as outer:
            outer.callback(setattr, self, "_open", None)
            outer.enter_context(close_all(closers))
            outer.enter_context(alone(spec))
            outer.enter_context(log_end(spec))
            if self._step is not None:
                outer.enter_context(examined(spec, self._step))
            self._open_here()
            self._outer = outer.pop_all()
        return self

    @in_no_mesh
    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # A `next` of a loop that takes several batches per update met the run's end.
        is_end = isinstance(failure, EndOfBatches) and self._result is not None
        if failure is not None and not is_end:
            both = ExitStack()
            both.push(self._outer)
            both.push(self._inner)
            both.__exit__(kind, failure, trace)
            return None
        with self._outer:
            try:
                with self._inner:
                    self._end_here()
            except GoingBack as signal:
                raise signal.too_late(is_saved=self._discard(signal)) from None
        return is_end

    @property
    def state(self) -> PyTree:
        """The state after the last step; donated to the next one."""
        state = whole(self._opened.loop.state)
        return state if self._step is None else state.user

    @property
    def steps_done(self) -> int:
        """Updates made so far, those of earlier runs included."""
        return self._opened.loop.step

    @property
    def key(self) -> Key:
        """The random key of the next step, the same as in `run`."""
        return _step_key(self._opened.resumed.state.key, np.int32(self.steps_done))

    @property
    def position(self) -> Position:
        """Position of the input after the batches taken so far."""
        return self._position

    @property
    def result(self) -> LoopResult:
        """The final state, metrics and numbers, once the session has ended well.

        Raises:
          ArgumentError: The session has not ended well.
        """
        if self._result is None:
            raise ArgumentError(
                "`session.result` must be read after the session, got one that has not "
                "ended. Leave its `with` block first."
            )
        return self._result

    def batches(self) -> Iterator[Placed]:
        """Return batches on the devices, read ahead, until the run ends.

        The last step is saved and evaluated before the loop ends.

        >>> with rep.session(step_fn, dataset, init_fn=init_fn, steps=2) as session:
        ...     losses = [session.step(batch)["loss"] for batch in session.batches()]

        Raises:
          ArgumentError: The session has no dataset, or the dataset ended early; or the
            loop ends between a step of its own and `after`.
          Exception: Any error of reading, or of the end of the run.
        """
        if self._spec.dataset is None:
            raise ArgumentError(
                "`dataset` must be given for `session.batches()`, got None. Pass it to "
                "`session`, or loop over `session.steps()`."
            )
        self._require_own_thread()
        return SessionBatches(self._each_batch())

    def _each_batch(self) -> Iterator[Placed]:
        while True:
            batch = self._next_batch()
            if batch is not None:
                self._position = batch.position
                self._taken.append(batch.examples)
                yield batch
            elif self._ends():
                return

    def steps(self) -> Iterator[int]:
        """Yield the number of each step to be made, until the run ends.

        For batches from elsewhere, a queue or actors; their position is not saved.

        >>> with rep.session(step_fn, init_fn=init_fn, steps=2) as session:
        ...     for number in session.steps():
        ...         metrics = session.step(batch)

        Raises:
          Exception: Any error of the end of the run.
        """
        self._require_own_thread()
        while True:
            while self._opened.loop.goes_on:
                self._spec.phases.enter("input")
                yield self.steps_done + 1
            if short_traceback(self._ends)():  # not over `yield`: that is the caller's
                return

    @in_no_mesh
    def step(self, batch: PyTree, *, metrics: PyTree = None) -> PyTree:
        """Make one update (or `steps_per_call`) by the session's `step_fn`.

        >>> with rep.session(step_fn, dataset, init_fn=init_fn, steps=1) as session:
        ...     for batch in session.batches():
        ...         loss = session.step(batch, metrics={"rate": 0.1})["loss"]

        Args:
          batch: A batch of `batches()`, used once; or your own, as for a compiled step.
          metrics: Metrics of your own, by name, reported beside the step's.

        Returns:
          The metrics, on the devices: reading them waits for the step.

        Raises:
          ArgumentError: The session has no `step_fn`.
          BatchError: The batch does not fit, or no step is left.
          NonFiniteError: A metric of a step so far holds NaN or infinity.
          Preempted: A signal or a program asked the run to stop, and it is saved.
          Exception: Any error of the step or of a hook.
        """
        if self._step is None:
            raise ArgumentError(
                "`step_fn` must be given for `session.step()`, got None. Pass it to "
                "`session`, or hand what your own steps return to `session.after()`."
            )
        opened = self._opened
        loop, is_read = opened.loop, isinstance(batch, Placed)
        given = batch if is_read else self._placed(batch)
        if opened.batches is not None:
            opened.batches.given(given if is_read else None, step=loop.step)
        self._position, self._taken = given.position, []
        try:
            loop.dispatch(self._step, given, self._stall_s(), beside=metrics)
        except GoingBack as signal:
            reported = loop.metrics  # the loop is closed in there
            self._go_back(signal)
            return reported
        return loop.metrics

    def compile(self, step_fn: StepFn) -> Callable[..., PyTree]:
        """Lift a step of the loop's own: `metrics = step(batch[, key])`.

        It updates `session.state`; otherwise as `rep.compile`, under the watchdog.

        >>> with rep.session(dataset=dataset, init_fn=init_fn, steps=3) as session:
        ...     critic = session.compile(critic_step_fn)
        ...     generator = session.compile(generator_step_fn)
        ...     for batch in session.batches():
        ...         session.after(critic(batch) | generator(batch))

        Args:
          step_fn: Step of one replica.

        Raises:
          ArgumentError: `step_fn` is not a step, or the session has one already.
        """
        self._require_own_steps("compile")
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")
        compiled = self._spec.own_step(step_fn)

        def step(batch: PyTree, key: Key | None = None) -> PyTree:
            loop = self._opened.loop
            loop.require_room(1)
            loop.begin_step()
            # Flat: building some trees takes longer than all else in a step.
            loop.state, metrics = compiled(FlatTree.of(loop.state), batch, key)
            loop.in_turn = True  # still in the phase `step`: no signal is handled here
            return metrics

        return short_traceback(step)

    @in_no_mesh
    def after(
        self, metrics: PyTree, *, state: PyTree = _SAME, examples: int = 0
    ) -> None:
        """Complete one update that the loop's own steps have made.

        >>> zero = jnp.zeros(())
        >>> with rep.session(init_fn=lambda key: zero, steps=2) as session:
        ...     for number in session.steps():
        ...         session.after({"number": number}, state=session.state + 1)

        Args:
          metrics: Metrics of the update: a dict of numbers or arrays, on the devices
            or not.
          state: The whole state after it, if a function of your own made it out of
            `session.state`. Hooks and checkpoints see it before the next step.
          examples: Examples of the update, if batches are not the session's.

        Raises:
          ArgumentError: The session has a `step_fn`.
          BatchError: No step is left.
          NonFiniteError: A metric of a step so far holds NaN or infinity.
          Preempted: A signal or a program asked the run to stop, and it is saved.
          StateError: `state` is of another structure, shape or dtype than the first.
          Exception: Any error of a hook.
        """
        self._require_own_steps("after")
        self._require_own_thread()
        loop, taken = self._opened.loop, self._taken
        loop.require_room(1)
        if state is not _SAME:
            state = in_form(state, self._spec.first.shapes.user, self._spec.layout)
        self._taken = []
        loop.begin_step()
        self._run_ahead.admit(metrics)
        loop.after(
            loop.state if state is _SAME else state,
            metrics,
            examples=examples + sum(taken),
            position=self._position,
            stall_s=self._stall_s(),
        )

    def _require_own_steps(self, name: str) -> None:
        if self._step is not None:
            raise ArgumentError(
                f"`step_fn` must be left out for `session.{name}()`, got one. Call "
                "`session.step(batch)`, or leave it out."
            )

    def _require_own_thread(self) -> None:
        if self._opened and threading.get_ident() != self._thread:
            raise ArgumentError(
                "`session` must be used in the thread that opened it, got another. "
                "Open it in this one."
            )

    @property
    def _opened(self) -> Opened:
        if self._open is None:
            raise ArgumentError(
                "`session` must be open, got one that is not. Write `with "
                "rep.session(...) as session:`."
            )
        return self._open

    def _open_here(self) -> None:
        spec = self._spec
        with ExitStack() as inner:
            self._preemption = inner.enter_context(guarded(spec))
            inner.push(self._leave_if_asked)
            closers: list[Callable[[], None]] = []
            inner.enter_context(close_all(closers))
            self._open = open_run(
                spec,
                preemption=self._preemption,
                first_states=self._first_states,
                closers=closers,
            )
            self._inner = inner.pop_all()
        self._position, self._taken = self._open.resumed.position, []

    @in_no_mesh
    def _next_batch(self) -> Any:
        opened = self._opened
        assert opened.batches is not None
        if opened.loop.in_turn:
            if len(self._taken) >= MOST_BATCHES_OF_AN_UPDATE:
                raise self._turn_without_after()
            # Between a step and `after` no signal may end the run: the state is
            # incomplete.
            with self._spec.phases.during("input"):
                more = next(opened.batches, None)
            if more is None:
                raise ArgumentError(
                    f"`dataset` must last until step {opened.loop.step + 1} is done, "
                    "got its end. Repeat it, or pass `steps`."
                )
            return more
        batch = opened.loop.next(opened.batches)
        if batch is None and opened.loop.goes_on:
            if self._preemption is None or not self._preemption.node_stops:
                opened.loop.require_end_of_plan()
            elif opened.leaving is not None:
                opened.leaving.leave_if_waiting(STOPPED)
        return batch

    def _turn_without_after(self) -> ArgumentError:
        return ArgumentError(
            "`session.after()` must be called for each update, got a step after step "
            f"{self.steps_done} without it. Call `session.after(metrics)` where an "
            "update is made."
        )

    @in_no_mesh
    def _ends(self) -> bool:
        """End the run; return False if it goes back to an earlier step instead."""
        try:
            self._end_here()
        except GoingBack as signal:
            self._go_back(signal)
            return False
        return True

    def _end_here(self) -> None:
        if self._result is not None:
            return
        opened = self._opened
        if opened.loop.in_turn:
            raise self._turn_without_after()
        result = opened.end(self._stall_s())
        self._spec.phases.enter("end")
        ran, evaluation = result.metrics is not None, opened.evaluation
        self._result = dataclasses.replace(
            result,
            state=result.state.user,
            metrics=result.metrics if ran else opened.resumed.last_metrics,
            evaluation=evaluation and evaluation.metrics,
            best=evaluation and evaluation.best,
        )

    def _leave_if_asked(self, kind: object, *failure: object) -> None:
        """End the program if a signal arrived while the run ended well."""
        if kind is None and self._preemption is not None and self._result is not None:
            self._preemption.leave_if_asked(self._result.step, log=self._spec.log)

    def _go_back(self, signal: GoingBack) -> None:
        """Open the run once more, from before the step that went bad."""
        self._inner.__exit__(GoingBack, signal, signal.__traceback__)
        self._discard(signal)
        self._open_here()

    def _discard(self, signal: GoingBack) -> bool:
        """Delete the checkpoints after the bad step; return whether one is left."""
        with open_store(self._spec) as store:
            store.discard_after(signal.before_step - 1)
            return bool(store.steps())

    def _stall_s(self) -> float:
        batches = self._opened.batches
        if batches is not None:
            return batches.stall_s
        return self._spec.phases.seconds()["input"]

    def _placed(self, batch: PyTree) -> Placed:
        self._require_own_thread()
        return placed(
            batch,
            self._spec.layout,
            accumulate=self._spec.reading.accumulate,
            steps_per_call=self._spec.plan.steps_per_call,
            index=self.steps_done,
            position=self._position,
        )


_step_key = in_no_mesh(jax.jit(step_key))
