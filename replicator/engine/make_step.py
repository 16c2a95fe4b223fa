"""Choose the engine of a strategy, and lift a step onto its layout."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from replicator.base.per_replica import take_own
from replicator.base.types import Device, PyTree, StepFn
from replicator.engine.analysis.example_means import warn_of_shares
from replicator.engine.compiled_step import CompiledStep, CompilePhases
from replicator.engine.debug_step import DebugStep
from replicator.engine.first_update.check import FirstUpdateCheck, FirstUpdates
from replicator.engine.layout import Layout, ProcessGroup
from replicator.engine.partitioned import PartitionedLayout, refuse_own_sums
from replicator.engine.replicated import ReplicatedLayout
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.optimizer_state import Reduction
from replicator.engine.step.skipping import skip_bad_updates
from replicator.engine.step.transforms import (
    count_steps,
    lift,
    repeat_steps,
    report_norms,
)
from replicator.errors import ArgumentError, check_kind, check_not_async, takes
from replicator.inputs.placement import batch_axis
from replicator.strategies.builders import Builder
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy
from replicator.strategies.variables import Variable


def make_layout(
    mesh: Mesh,
    strategy: Strategy | Builder | str | None,
    *,
    reduction: Reduction,
    processes: ProcessGroup | None = None,
    machine: Machine | None = None,
) -> Layout:
    """Return the layout of a strategy over the devices of `mesh`.

    Args:
      mesh: The devices, as replicas.
      strategy: None for a replica on each of them; a builder of one that partitions is
        called once the variables of a state are known.
      reduction: How gradients add up.
      processes: The processes that share the devices; None for this one alone.
      machine: Where the devices are: it gives a strategy the devices of a host.

    Raises:
      ArgumentError: It is not a strategy, does not fit the devices, or partitions where
        an order of replicas is asked for.
    """
    name = getattr(strategy, "__name__", "a function")
    if callable(strategy):
        if not takes(strategy, 2):
            raise ArgumentError(
                "`strategy` must be a `Strategy`, or take (variables, devices), got "
                f"the function {name}. Call it: `{name}(...)`."
            )
    elif isinstance(strategy, str):
        raise ArgumentError(
            f"`strategy` must be a `Strategy`, got {strategy!r}. Pass "
            "`strategies.fsdp()`, or what another function there returns."
        )
    else:
        check_kind("strategy", strategy, Strategy)
    if strategy is not None and machine is not None:
        strategy = _for_hosts(
            strategy, min(machine.devices_per_host, mesh.devices.size)
        )
    if strategy is None or isinstance(strategy, Strategy):
        if strategy is None or strategy.kind == "replicates":
            _check_order(strategy, reduction)
            return ReplicatedLayout(mesh, processes, strategy)
        name = strategy.name
    if reduction == "ordered":
        raise ArgumentError(
            "`reduction` must be 'fast' under a strategy that partitions, got "
            f"'ordered' and {name}. Leave it out: there is one replica."
        )
    return PartitionedLayout(strategy, list(mesh.devices.flat), processes)


def _for_hosts(strategy: Strategy | Builder, devices: int) -> Strategy | Builder:
    """Return a strategy, or a builder of one, for hosts of so many devices."""
    if isinstance(strategy, Strategy):
        return strategy.for_hosts(devices)

    def build(variables: tuple[Variable, ...], every: Sequence[Device]) -> Strategy:
        found = strategy(variables, every)
        return found.for_hosts(devices) if isinstance(found, Strategy) else found

    return functools.wraps(strategy)(build)


def _check_order(strategy: Strategy | None, reduction: Reduction) -> None:
    """Refuse rules for sums of which the order of replicas is fixed."""
    found = [each for each in strategy.rules if each.synchronises] if strategy else []
    if reduction == "ordered" and found:
        raise ArgumentError(
            "`reduction` must be 'fast' with rules for synchronising, got 'ordered' "
            f"and one for {found[0].pattern!r}. Leave one of them out."
        )


def rules_of(layout: Layout) -> Strategy | None:
    """Return the strategy by whose rules replicas add up gradients; None for none.

    >>> rules_of(rep.layout).name
    'data_parallel'
    """
    return layout.strategy if isinstance(layout, ReplicatedLayout) else None


def check_own_sums(layout: Layout, accumulate: int) -> None:
    """Refuse an optimizer that adds up gradients of each replica call by call.

    Raises:
      ArgumentError: `accumulate` is not 1, and all devices are one replica.
    """
    if isinstance(layout, PartitionedLayout) and accumulate != 1:
        refuse_own_sums(accumulate)


def compiled_step(
    step_fn: StepFn,
    layout: Layout,
    options: CompileOptions,
    *,
    counted: bool,
    skips_bad: bool = False,
    reports_norms: bool = True,
    phases: CompilePhases | None = None,
    check: FirstUpdateCheck | None = None,
) -> CompiledStep:
    """Return a step that runs on all replicas, compiled at its first call.

    Args:
      step_fn: Step of one replica.
      layout: Layout of the replicas on devices.
      options: Options of the compiled step.
      counted: Whether its state is a run's, with a step count and a key of its own.
      skips_bad: Whether updates that bring NaN or infinity are left out; for `counted`.
      reports_norms: Whether metrics hold the gradients' norms; for `counted`.
      phases: Notes that the run compiles, and times it; None for neither.
      check: Options of the check of its first updates, if the layout partitions; None
        for no check.
    """
    if isinstance(step_fn, CompiledStep | DebugStep):
        raise ArgumentError(
            "`step_fn` must be the step of one replica, got one that is compiled. Pass "
            "the function itself."
        )
    check_not_async("step_fn", step_fn)
    update = lift(
        step_fn,
        accumulate=options.accumulate,
        reduction=options.reduction,
        measures=counted,
    )
    if counted:
        update = count_steps(update)
        if skips_bad:
            update = skip_bad_updates(update, reduction=options.reduction)
        update = report_norms(update, among_metrics=reports_norms)
    first_updates = None
    if check is not None and isinstance(layout, PartitionedLayout):
        alone = dataclasses.replace(options, steps_per_call=1)
        once = CompiledStep(update, layout, alone) if alone != options else None
        first_updates = FirstUpdates(
            update,
            layout,
            options,
            check,
            once=once,
            now_s=phases.clock.now_s if phases else float,
        )
    if options.steps_per_call > 1:
        update = repeat_steps(update)
    examine = None
    if counted and isinstance(layout, ReplicatedLayout) and layout.num_replicas > 1:
        examine = functools.partial(
            _examine, count_steps(lift(step_fn)), layout, options
        )
    return CompiledStep(
        update,
        layout,
        options,
        phases,
        first_updates=first_updates,
        examine=examine,
    )


def _examine(
    update: KeyedStep,
    layout: Layout,
    options: CompileOptions,
    state: PyTree,
    batch: PyTree,
) -> None:
    """Look whether gradients are means over examples, before a run compiles a step."""
    axis = batch_axis(options.accumulate, options.steps_per_call)
    replicas = layout.num_replicas

    def own(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        rows = leaf.shape[axis] // replicas
        return jax.ShapeDtypeStruct((rows, *leaf.shape[axis + 1 :]), leaf.dtype)

    of_one = jax.tree.map(own, batch)
    warn_of_shares(update, jax.eval_shape(take_own, state), of_one)


def debug_step(
    step_fn: StepFn,
    options: CompileOptions,
    *,
    counted: bool,
    reports_norms: bool = True,
) -> DebugStep:
    """Return a step that runs as one replica on the whole batch, without `jit`.

    Args:
      step_fn: Step of one replica.
      options: Options of the compiled step; of these only `accumulate` may differ from
        the default.
      counted: As in `compiled_step`.
      reports_norms: As in `compiled_step`.

    Raises:
      ArgumentError: `options` are for a compiled step only.
    """
    if options.steps_per_call > 1 or options.checks is not None:
        raise ArgumentError(
            "`debug` must be False with `steps_per_call` above 1 or `checks`, got "
            "True. Leave those out: in debug mode checks raise by themselves."
        )
    update = lift(step_fn, measures=counted)
    if counted:
        update = report_norms(count_steps(update), among_metrics=reports_norms)
    return DebugStep(update, accumulate=options.accumulate)
