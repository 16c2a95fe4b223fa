"""One object for users: where replicas run, how a step is lifted onto them, and a loop.

It joins modules and decides nothing: `state` makes states, `make_step` lifts, `inputs`
feeds, `evaluate` counts, `training` runs what `session` puts together.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, Literal, ParamSpec, TypeVar, overload

import optax
from jax.sharding import Mesh

from replicator.base.host.compilation_cache import enable_compilation_cache
from replicator.base.host.fake_devices import size_cpu_pool
from replicator.base.mesh import replica_mesh
from replicator.base.types import Dataset, Device, InitFn, Key, PyTree, StepFn
from replicator.checkpoint.retention import Retention
from replicator.distributed import same_everywhere
from replicator.distributed.jax_group import require_joined
from replicator.engine import make_step
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.debug_step import DebugStep
from replicator.engine.evaluation.blocks import DEFAULT_BLOCK
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.engine.evaluation.predict import PredictFn, Prediction
from replicator.engine.first_update.check import FirstUpdateCheck
from replicator.engine.inspection.inspection import Inspection
from replicator.engine.layout import Layout
from replicator.engine.require_eager import eager
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step import optimizer as optimizers
from replicator.engine.step.loss_scale import DynamicLossScale
from replicator.engine.step.optimizer_state import Reduction
from replicator.engine.step.state import first_state, placed_copy, run_keys
from replicator.errors import ArgumentError, check_flags, check_function
from replicator.hooks.protocol import Hook
from replicator.hooks.schedule import Every
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position
from replicator.inputs.prefetch import Prefetcher
from replicator.monitoring.phases import Phases
from replicator.strategies.builders import Builder
from replicator.strategies.strategy import Strategy
from replicator.training.best_metric import Follow
from replicator.training.loop import LoopResult
from replicator.training.node import Node
from replicator.training.nonfinite.policy import OnNonfinite
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import RunOptions
from replicator.training.run_spec import make_run_spec
from replicator.training.session import Session
from replicator.training.watchdog.limits import Limits

P = ParamSpec("P")
R = TypeVar("R")


class Replicator:
    """Run what one replica does on many devices.

    Args:
      num_replicas: How many devices to use; all by default.
      devices: Devices to choose from; JAX's own by default.
      strategy: How a step and its state are spread: from `replicator.strategies`. By
        default each device has a replica; one that partitions makes all of them one. A
        function `(variables, devices)` of your own that returns one is called when
        the first state is made, and a state of another model is refused then.
      reduction: `"fast"` leaves to XLA in which order gradients add up. `"ordered"`
        adds them in example order, in replicas × microbatches blocks: 8 × 1, 4 × 2 and
        2 × 4 give the same bits; another product of the two adds otherwise. One replica
        is compiled to another program: 1 × 8 has the bits of 8 × 1 for layers and
        convolutions, and for attention those of a rounding elsewhere.
      max_in_flight: Most calls dispatched and not finished; never above 16 on CPU.
      compilation_cache: Keep compiled programs in a private directory of this user.

    Raises:
      ArgumentError: An argument is out of range.
      DistributedError: `replicator launch` started this process as one of several, and
        it has not joined them.
      TooLateError: JAX's own `initialize` made a group whose CPU devices would hang.
    """

    def __init__(
        self,
        num_replicas: int | None = None,
        *,
        devices: Sequence[Device] | None = None,
        strategy: Strategy | Builder | None = None,
        reduction: Reduction = "fast",
        max_in_flight: int = DEFAULT_RUN_AHEAD,
        compilation_cache: bool = True,
    ) -> None:
        optimizers.check_reduction(reduction)
        check_flags(compilation_cache=compilation_cache)
        require_joined()
        size_cpu_pool()
        if compilation_cache:
            enable_compilation_cache()
        mesh = replica_mesh(num_replicas, devices=devices)
        self._layout: Layout = make_step.make_layout(
            mesh, strategy, reduction=reduction, processes=same_everywhere
        )
        self._defaults = CompileOptions(
            max_in_flight=max_in_flight, reduction=reduction
        )
        # By function, so that evaluating every n steps compiles once.
        self._evaluation = functools.lru_cache(maxsize=16)(self.compile_evaluation)
        predict = functools.partial(
            Prediction, layout=self._layout, max_in_flight=max_in_flight
        )
        self._prediction = functools.lru_cache(maxsize=16)(predict)

    @property
    def mesh(self) -> Mesh:
        """The mesh; its only axis is `replica` unless the strategy partitions."""
        return self._layout.mesh

    @property
    def layout(self) -> Layout:
        """How state and batches lie on the mesh."""
        return self._layout

    @property
    def num_replicas(self) -> int:
        """How many replicas a step runs on."""
        return self._layout.num_replicas

    def wrap_optimizer(
        self,
        tx: optax.GradientTransformation,
        *,
        name: str = "params",
        skip_nonfinite: bool = False,
        loss_scale: DynamicLossScale | None = None,
        accumulate: int = 1,
    ) -> optax.GradientTransformationExtraArgs:
        """Reduce gradients over replicas, then let `tx` update.

        See `replicator.wrap_optimizer` for arguments, result and errors; this one adds
        the replicator's `reduction`. Under a strategy that partitions `accumulate` is
        for `compile` alone.
        """
        make_step.check_own_sums(self._layout, accumulate)
        return optimizers.wrap_optimizer(
            tx,
            name=name,
            skip_nonfinite=skip_nonfinite,
            loss_scale=loss_scale,
            accumulate=accumulate,
            reduction=self._defaults.reduction,
        )

    @eager("rep.init")
    def init(self, init_fn: InitFn, *, seed: int = 0) -> PyTree:
        """Make the state for an own loop, born on every device.

        Args:
          init_fn: `init_fn(key)` returns any pytree of arrays.
          seed: Of the key it gets; the same as in `run(seed=...)`.

        Returns:
          The state; `PerReplica` leaves have a replica axis, padded ones are `Padded`.

        Raises:
          ArgumentError: `init_fn` is no function of a key, `seed` no whole number, or
            JAX traces the call.
        """
        check_function("init_fn", init_fn, "key")
        key, _ = run_keys(seed)
        return first_state(init_fn, self._layout, key=key).born()

    @eager("rep.put")
    def put(self, state: PyTree) -> PyTree:
        """Put a copy of a state on every device, for an own loop: to tune a model.

        Args:
          state: Any pytree of arrays, of JAX or of NumPy, from wherever; left as it
            is. `PerReplica` leaves have a leading replica axis, as in `result.state`.

        Returns:
          The state as `init` would have made it. It shares no memory with what was
          given: a step may take it over.

        Raises:
          ArgumentError: A leaf is no array, a `PerReplica` leaf has no row for each
            replica, or JAX traces the call.

        >>> params = init_params(key)                    # or what a file holds
        >>> state = rep.put({"params": params, "opt": optimizer.init(params)})
        """
        return placed_copy(state, self._layout)

    @overload
    def compile(
        self,
        step_fn: StepFn,
        *,
        accumulate: int = 1,
        steps_per_call: int = 1,
        checks: frozenset | None = None,
        check_first_updates: bool = False,
        debug: Literal[False] = False,
    ) -> CompiledStep: ...
    @overload
    def compile(
        self, step_fn: StepFn, *, accumulate: int = 1, debug: Literal[True]
    ) -> DebugStep: ...
    def compile(
        self,
        step_fn: StepFn,
        *,
        accumulate: int = 1,
        steps_per_call: int = 1,
        checks: frozenset | None = None,
        check_first_updates: bool = False,
        debug: bool = False,
    ) -> CompiledStep | DebugStep:
        """Lift `step_fn` onto all replicas: `state, metrics = step(state, batch)`.

        One call takes one global batch and makes exactly one update.

        Args:
          step_fn: What one replica does: `step_fn(state, batch[, key])` returns the new
            state and metrics.
          accumulate: Equal microbatches that the batch is cut into.
          steps_per_call: Updates per call; batches, keys and metrics then have a
            leading axis of that length.
          checks: `checkify` errors to look for, e.g. `checkify.user_checks`. Each call
            then waits for its result.
          check_first_updates: Under a strategy that partitions, compare the first two
            updates of each program with what one device makes of them:
            `step.checked_updates` tells what came of it.
          debug: Run as one replica on the whole batch, without `jit` or `shard_map`.

        Returns:
          The step, compiled at its first call.

        Raises:
          ArgumentError: An argument is of another kind, a number is below 1, or
            `debug` is asked for with `steps_per_call` or `checks`.
        """
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")
        check_flags(debug=debug, check_first_updates=check_first_updates)
        options = dataclasses.replace(
            self._defaults,
            accumulate=accumulate,
            steps_per_call=steps_per_call,
            checks=checks,
        )
        if debug:
            return make_step.debug_step(step_fn, options, counted=False)
        check = FirstUpdateCheck() if check_first_updates else None
        return make_step.compiled_step(
            step_fn, self._layout, options, counted=False, phases=Phases(), check=check
        )

    def inspect(
        self,
        step: StepFn | CompiledStep,
        state: PyTree = None,
        batch: PyTree = None,
        key: Key | None = None,
    ) -> Inspection:
        """Say what a step sends, keeps and computes: it is compiled, and not run.

        Args:
          step: A `step_fn`, or what `compile` returned. Of one that was called, and
            without what follows, it is the program that was compiled last.
          state: Arrays, shapes, or the `init_fn(key)` that returns it.
          batch: One global batch: arrays, or `jax.ShapeDtypeStruct`s.
          key: A random key if `step_fn` takes one.

        Returns:
          Each collective with its kind, count, bytes, axes and the user's line, memory
          of a device, and arithmetic; printed, a table.

        Raises:
          ArgumentError: There is no state or batch, and nothing compiled; the step is
            one for `debug`; or as a call of the step.
          BatchError: As a call of the step.
          jax.errors.JaxRuntimeError: The compiler found that it needs more memory than
            a device has.

        >>> rep = replicator.Replicator()
        >>> rep.inspect(step_fn, init_fn, batch).counts()
        {'all-reduce replica': 1}
        """
        if not isinstance(step, CompiledStep | DebugStep):
            step = self.compile(step)
        return step.inspect(state, batch, key)

    def batches(
        self,
        dataset: Dataset,
        options: InputOptions | None = None,
        *,
        start: Position | None = None,
    ) -> Prefetcher:
        """Read a dataset ahead, onto the mesh, for an own loop.

        Args:
          dataset: An iterable of global batches, or `input_fn(context)`.
          options: How it is read, checked and placed.
          start: Where to begin: the `position` of the last batch that was used.

        Returns:
          An iterator of `Placed` batches that a compiled step takes; close it when
          done.
        """
        return open_input(dataset, self._layout, options=options, start=start)

    def run(
        self,
        step_fn: StepFn,
        dataset: Dataset,
        *,
        init_fn: InitFn | None = None,
        init_state: PyTree = None,
        steps: int | None,
        seed: int = 0,
        accumulate: int = 1,
        auto_microbatch: bool = False,
        memory_limit_bytes: int | None = None,
        steps_per_call: int = 1,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 100,
        retention: Retention | None = None,
        eval_fn: EvalFn | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        eval_every: int | Every | None = None,
        follow: Follow | None = None,
        hooks: Sequence[Hook] = (),
        step_timeout: float | Limits | None = None,
        inputs: InputOptions | None = None,
        write_every: int = 10,
        gradient_norm: bool = True,
        display: bool = True,
        profile: range | None = None,
        on_nonfinite: OnNonfinite | None = None,
        spikes: Spikes | None = None,
        checks: frozenset | None = None,
        check_first_updates: bool | None = None,
        debug: bool = False,
        node: Node | None = None,
    ) -> LoopResult:
        """Train: read ahead, dispatch ahead, report one step late.

        Args:
          step_fn: What one replica does: `step_fn(state, batch[, key])` returns the new
            state and metrics. The key is `fold_in(run's key, step)`, equal on all
            replicas and in all microbatches.
          dataset: An iterable of global batches, or `input_fn(context)`; one that can
            be iterated again is, until the steps are done.
          init_fn: `init_fn(key)` returns the first state.
          init_state: In its place: the first state, as `put` takes it; copied.
          steps: Updates to make; None runs until the dataset ends.
          seed: Of the keys of `init_fn` and `step_fn`.
          accumulate: Equal microbatches that each global batch is cut into.
          auto_microbatch: Choose the smallest `accumulate` that fits into memory:
            programs are compiled, and the first that fits is run, to find it.
          memory_limit_bytes: What it has to fit into on each device; by default what
            the devices say that they have.
          steps_per_call: Updates per dispatch, with no change of meaning.
          directory: Where `metrics.jsonl`, TensorBoard events (if installed),
            `run.json` and the journal go; None writes nothing. `replicator report`
            makes a page of it.
          checkpoint_dir: Where the whole run is saved, and from where it goes on by
            itself, bit for bit; one directory per run.
          checkpoint_every: Steps between saves, or a schedule such as
            `options.every(seconds=600)`.
          retention: Which checkpoints stay; the last three by default.
          eval_fn: What is evaluated, as in `evaluate`; tried on one batch before the
            first step.
          eval_dataset: On what, read anew each time; several by name, `{"val": ...}`.
          eval_every: Steps between evaluations, or a schedule; the last state is
            evaluated, too.
          follow: The number of the evaluation that tells which step is the best, and
            when to give up.
          hooks: What else happens, after the built-in reports.
          step_timeout: Seconds that a step may take before the program ends, with all
            stacks told; by default ten times the median, at least 60. `Limits` say
            it for all that a run does.
          inputs: How the dataset is read and checked; its `accumulate`,
            `steps_per_call` and `steps` are left to the run.
          write_every: Steps between written metrics.
          gradient_norm: Whether metrics tell the norm of the reduced gradient; it takes
            one more reading of the gradient, several per cent of a small model's step.
          display: Whether progress is shown on standard error.
          profile: Steps to trace, for example `range(100, 110)`; the signal SIGUSR2
            traces the next ten.
          on_nonfinite: What a metric that is NaN or infinite leads to. `"raise"` ends
            the run, and is the default unless an optimizer skips such updates;
            `"skip"` leaves the update out, on all replicas alike; `"rollback"` goes
            back to the last good checkpoint and leaves the batch out; `"ignore"` goes
            on.
          spikes: Which metric to watch for sudden leaps, and what they lead to.
          checks: As in `compile`.
          check_first_updates: As in `compile`, and on by default, but where
            `REPLICATOR_CHECK_FIRST_UPDATES=0` is in the environment.
          debug: As in `compile`.
          node: `lp.context.get_context()` in a node of a program: the run stops,
            saved, when the program stops, and a run that hangs fails its node.

        Returns:
          The final state of the user, the last metrics, steps, examples and rates.

        Raises:
          ArgumentError: An argument is of a wrong kind or out of range, or the dataset
            ended early.
          BatchError: A batch does not fit.
          NonFiniteError: A batch or a metric holds NaN or infinity.
          PartitionError: One of the first updates is not what one device makes of it.
          Preempted: A signal asked the run to stop, and it is saved.
          ReplicationError: The state may differ between replicas.
          StateError: `step_fn` returned another structure.
        """
        options = RunOptions(
            init_fn=init_fn,
            init_state=init_state,
            steps=steps,
            seed=seed,
            accumulate=accumulate,
            auto_microbatch=auto_microbatch,
            memory_limit_bytes=memory_limit_bytes,
            steps_per_call=steps_per_call,
            directory=directory,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            retention=retention,
            eval_fn=eval_fn,
            eval_dataset=eval_dataset,
            eval_every=eval_every,
            follow=follow,
            hooks=hooks,
            step_timeout=step_timeout,
            inputs=inputs,
            write_every=write_every,
            gradient_norm=gradient_norm,
            display=display,
            profile=profile,
            on_nonfinite=on_nonfinite,
            spikes=spikes,
            checks=checks,
            check_first_updates=check_first_updates,
            debug=debug,
            node=node,
        )
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")
        if dataset is None:
            raise ArgumentError(
                "`dataset` must be an iterable of batches or a callable, got NoneType. "
                "Pass the batches; for those of a queue there is `rep.session`."
            )
        with self.session_by(step_fn, dataset, options) as session:
            for batch in session.batches():
                session.step(batch)
        return session.result

    def session(
        self,
        step_fn: StepFn | None = None,
        dataset: Dataset | None = None,
        *,
        init_fn: InitFn | None = None,
        init_state: PyTree = None,
        steps: int | None,
        seed: int = 0,
        accumulate: int = 1,
        auto_microbatch: bool = False,
        memory_limit_bytes: int | None = None,
        steps_per_call: int = 1,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 100,
        retention: Retention | None = None,
        eval_fn: EvalFn | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        eval_every: int | Every | None = None,
        follow: Follow | None = None,
        hooks: Sequence[Hook] = (),
        step_timeout: float | Limits | None = None,
        inputs: InputOptions | None = None,
        write_every: int = 10,
        gradient_norm: bool = True,
        display: bool = True,
        profile: range | None = None,
        on_nonfinite: OnNonfinite | None = None,
        spikes: Spikes | None = None,
        checks: frozenset | None = None,
        check_first_updates: bool | None = None,
        debug: bool = False,
        node: Node | None = None,
    ) -> Session:
        """Return what `run` has around its loop, for a loop of your own.

        `run` is a session and a `for`; see `Session` for what the loop calls. Arguments
        are those of `run`. `step_fn` may be left out of a loop with steps of its own,
        and `dataset` of one whose batches come from elsewhere: their position is not
        saved.

        Returns:
          A session: open it by `with`.

        Raises:
          ArgumentError: As `run`; or what is asked for needs the `step_fn`, or the
            dataset, that is not there.
        """
        options = RunOptions(
            init_fn=init_fn,
            init_state=init_state,
            steps=steps,
            seed=seed,
            accumulate=accumulate,
            auto_microbatch=auto_microbatch,
            memory_limit_bytes=memory_limit_bytes,
            steps_per_call=steps_per_call,
            directory=directory,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            retention=retention,
            eval_fn=eval_fn,
            eval_dataset=eval_dataset,
            eval_every=eval_every,
            follow=follow,
            hooks=hooks,
            step_timeout=step_timeout,
            inputs=inputs,
            write_every=write_every,
            gradient_norm=gradient_norm,
            display=display,
            profile=profile,
            on_nonfinite=on_nonfinite,
            spikes=spikes,
            checks=checks,
            check_first_updates=check_first_updates,
            debug=debug,
            node=node,
        )
        return self.session_by(step_fn, dataset, options)

    def session_by(
        self, step_fn: StepFn | None, dataset: Dataset | None, options: RunOptions
    ) -> Session:
        """Return a session whose options are one object, made elsewhere.

        >>> chosen = options.RunOptions(init_fn=init_fn, steps=3)
        >>> session = rep.session_by(step_fn, dataset, chosen)

        Args:
          step_fn: As in `session`.
          dataset: As in `session`.
          options: All others.

        Raises:
          ArgumentError: As `session`.
        """
        spec = make_run_spec(
            step_fn, dataset, options, self._layout, self._defaults, self._evaluation
        )
        return Session(spec)

    def compile_evaluation(
        self, eval_fn: EvalFn, *, block: int = DEFAULT_BLOCK
    ) -> Evaluation:
        """Lift `eval_fn` onto all replicas: `metrics = evaluation(state, dataset)`.

        Args:
          eval_fn: As in `evaluate`.
          block: Examples that it gets at a time; rounded up for devices to share.

        Returns:
          The evaluation, compiled at its first call.

        Raises:
          ArgumentError: `eval_fn` is no function of a state and a batch, or `block`
            is below 1.
        """
        return Evaluation(
            eval_fn,
            self._layout,
            block=block,
            max_in_flight=self._defaults.max_in_flight,
        )

    def evaluate(
        self,
        eval_fn: EvalFn,
        dataset: Dataset,
        *,
        state: PyTree,
        inputs: InputOptions | None = None,
        block: int = DEFAULT_BLOCK,
    ) -> dict[str, PyTree]:
        """Evaluate a state on every example of a dataset, each counted once.

        The result has the same bits on any number of replicas, and for any batches that
        the dataset comes in. Each function is compiled once.

        Args:
          eval_fn: `eval_fn(state, batch)` gets `block` examples and returns a dict of
            metrics: arrays with one row per example, which are averaged, or declared
            ones, weighted by `batch["mask"]`.
          dataset: An iterable of batches of any sizes, or `input_fn(context)`, that
            ends. It is read once.
          state: As from `init`, a compiled step or `run`; neither changed nor donated.
          inputs: How the dataset is read; see `Evaluation`.
          block: Examples that `eval_fn` gets at a time; bits depend on it.

        Returns:
          The metrics over all examples: Python numbers, and NumPy arrays where a metric
          is no scalar. `examples` says how many there were.

        Raises:
          ArgumentError: `eval_fn` returns what could not be counted exactly.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        # Here, too: what is no function may be nothing that a cache takes.
        check_function("eval_fn", eval_fn)
        evaluation = self._evaluation(eval_fn, block=block)
        return evaluation(state, dataset, inputs=inputs)

    def predict(
        self,
        predict_fn: PredictFn,
        dataset: Dataset,
        state: PyTree,
        *,
        inputs: InputOptions | None = None,
        block: int = DEFAULT_BLOCK,
    ) -> PyTree:
        """Return outputs for every example of a dataset, in its order.

        They have the same bits on any number of replicas, and for any batches that the
        dataset comes in; every process gets all of them. Each function is compiled
        once.

        Args:
          predict_fn: `predict_fn(state, batch)` gets `block` examples, as the dataset
            has them, and returns a pytree of arrays with one row per example. Some
            examples of the last blocks only fill up: their rows are left out.
          dataset: As in `evaluate`. Of an `input_fn` that reads in every process, the
            order is that in which replicas got the examples.
          state: As in `evaluate`.
          inputs: How the dataset is read; see `Evaluation`.
          block: Examples that `predict_fn` gets at a time; bits depend on it.

        Returns:
          What `predict_fn` returns, with NumPy leaves [examples, ...].

        Raises:
          ArgumentError: `predict_fn` returns something without a row per example, or
            speaks to other replicas.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        # Here, too: what is no function may be nothing that a cache takes.
        check_function("predict_fn", predict_fn)
        return self._prediction(predict_fn, block=block)(state, dataset, inputs=inputs)


def _on_all_devices(
    method: Callable[Concatenate[Replicator, P], R],
) -> Callable[P, R]:
    """Return a method of `Replicator` as a function: of one over all devices."""

    @functools.wraps(method)
    def on_all_devices(*args: P.args, **arguments: P.kwargs) -> R:
        return method(Replicator(), *args, **arguments)

    of_method = inspect.signature(method)
    parameters = list(of_method.parameters.values())[1:]
    vars(on_all_devices)["__signature__"] = of_method.replace(parameters=parameters)
    return on_all_devices


run = _on_all_devices(Replicator.run)
