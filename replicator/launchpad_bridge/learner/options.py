"""Options of a learner, checked when its node is made."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from replicator.base.types import InitFn, PyTree, StepFn
from replicator.errors import (
    ArgumentError,
    check_count,
    check_function,
    check_kind,
)
from replicator.inputs.options import InputOptions
from replicator.launchpad_bridge.learner.lifted_step import VariablesOf
from replicator.strategies.builders import Builder
from replicator.strategies.strategy import Strategy
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import RunOptions

_FIXED_INPUTS = ("mode", "epochs", "steps")  # a learner sets these itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    """Options of a learner; `ReplicatedLearnerNode` documents each.

    Attributes:
      run: Options of its run, `init_fn` and `steps` among them.

    Raises:
      ArgumentError: An option is out of range, or two exclude each other.
    """

    step_fn: StepFn
    batch_size: int
    replicas: int | None
    processes: int
    variables: VariablesOf
    max_policy_lag: int | None
    fixed_lag: int | None
    strategy: Strategy | Builder | None
    run: RunOptions
    priorities: str | None = None
    samples_per_call: int = 1

    def __post_init__(self) -> None:
        check_function(
            "step_fn", self.step_fn, "state, trajectories", "state, trajectories, key"
        )
        check_function("init_fn", self.init_fn, "key")
        check_function("variables", self.variables, "state")
        check_count("batch_size", self.batch_size)
        check_count("processes", self.processes)
        if not callable(self.strategy):
            check_kind("strategy", self.strategy, Strategy)
        for name, value in (("steps", self.run.steps), ("replicas", self.replicas)):
            if value is not None:
                check_count(name, value)
        check_kind("priorities", self.priorities, str)
        self._check_lags()
        self._check_strategy()
        self._check_cut()
        self._check_run()

    @property
    def init_fn(self) -> InitFn:
        """Function that returns the state for a key."""
        assert self.run.init_fn is not None, "`__post_init__` checks it"
        return self.run.init_fn

    @property
    def is_partitioned(self) -> bool:
        """Whether all devices are one replica."""
        if isinstance(self.strategy, Strategy):
            return self.strategy.kind == "partitions"
        return self.strategy is not None

    def _check_strategy(self) -> None:
        if not self.is_partitioned:
            return
        # Processes share out rows by replica; earlier variables have no rules.
        for name, value, least in (
            ("processes", self.processes, 1),
            ("fixed_lag", self.fixed_lag, None),
        ):
            if value != least:
                raise ArgumentError(
                    f"`{name}` must be left out under a strategy that partitions, got "
                    f"{value}. Leave it out, or use `strategies.data_parallel()`."
                )

    def _check_lags(self) -> None:
        for name in ("max_policy_lag", "fixed_lag"):
            lag = getattr(self, name)
            if lag is not None:
                check_count(name, lag, least=0)
        if self.max_policy_lag is not None and self.fixed_lag is not None:
            raise ArgumentError(
                "`max_policy_lag` must be left out where actors take turns, got both "
                "it and `fixed_lag`. Leave one out."
            )

    def _check_cut(self) -> None:
        """Raise if a batch cannot be cut over processes, replicas, microbatches."""
        replicas = self._batch_owners()
        if self.replicas is not None and replicas % self.processes:
            raise ArgumentError(
                f"`replicas` must divide evenly over {self.processes} processes, got "
                f"{replicas}. Use {-(-replicas // self.processes) * self.processes}."
            )
        accumulate = self.run.accumulate
        check_count("accumulate", accumulate)
        owners = "devices" if self.is_partitioned else "replicas"
        cuts = {
            owners: replicas,
            "processes": self.processes,
            f"microbatches of all {owners}": accumulate * replicas,
        }
        for name, parts in cuts.items():
            if self.batch_size % parts:
                fits = max(self.batch_size // parts, 1) * parts
                raise ArgumentError(
                    f"`batch_size` must divide evenly over {parts} {name}, got "
                    f"{self.batch_size}. Use {fits}."
                )

    def _batch_owners(self) -> int:
        """Return the number of replicas, or devices, with rows of their own.

        1 if it is not known yet: under a builder, or on all devices.
        """
        if isinstance(self.strategy, Strategy) and self.is_partitioned:
            if self.replicas is None:
                return 1
            sizes = self.strategy.sizes(self.replicas)
            return math.prod(sizes[axis] for axis in self.strategy.batch_axes)
        return 1 if self.is_partitioned else self.replicas or 1

    def _check_run(self) -> None:
        run = self.run
        self._check_inputs(run.inputs)
        self._check_calls(run.steps_per_call)
        if run.on_mismatch == "rollback":
            raise _left_out("on_mismatch", "rollback", 'Use "raise".')
        if "rollback" in (run.on_nonfinite, _action(run.spikes)):
            # Trajectories cannot be read again.
            raise _left_out("on_nonfinite", "rollback", 'Use "skip", or "raise".')
        if run.on_nonfinite == "skip" and self.fixed_lag:
            # A version would have no update behind it.
            raise _left_out("on_nonfinite", "skip", 'Use "raise" with `fixed_lag`.')

    def _check_inputs(self, inputs: Any) -> None:
        check_kind("inputs", inputs, InputOptions)
        default = InputOptions()
        for name in _FIXED_INPUTS if inputs is not None else ():
            if getattr(inputs, name) != getattr(default, name):
                raise _left_out(
                    f"inputs.{name}", getattr(inputs, name), "Leave it out."
                )

    def _check_calls(self, steps_per_call: int) -> None:
        calls = {
            "steps_per_call": steps_per_call,
            "samples_per_call": self.samples_per_call,
        }
        for name, count in calls.items():
            check_count(name, count)
        # Variables are published behind each call only; all batches of a sample are
        # taken before the first of them is learnt from.
        steps, samples = calls.values()
        least = samples - 1 + steps - math.gcd(samples, steps)
        lag = self.max_policy_lag if self.fixed_lag is None else self.fixed_lag
        is_enough = lag is None or (self.fixed_lag is None and lag >= least)
        for name, count in calls.items():
            if count > 1 and not is_enough:
                remedy = f"Use 1, or a `max_policy_lag` of {least} or more."
                raise _left_out(name, count, remedy)


def params_of(state: PyTree) -> dict[str, PyTree]:
    """Return the default variables for actors: `state["params"]`, as `params`.

    Raises:
      ArgumentError: The state has none.

    >>> params_of({"params": {"w": 1.0}, "opt": ()})
    {'params': {'w': 1.0}}
    """
    try:
        return {"params": state["params"]}
    except (KeyError, TypeError, IndexError):
        held = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(
            "`variables` must be given for a state without 'params', got none for "
            f"{held}. Pass `variables=lambda state: {{...}}`, arrays by name."
        ) from None


def _action(spikes: Spikes | None) -> str | None:
    # Another type is refused when the run is planned.
    return spikes.action if isinstance(spikes, Spikes) else None


def _left_out(name: str, value: Any, remedy: str) -> ArgumentError:
    return ArgumentError(
        f"`{name}` must be left out of a learner like this, got {value!r}. {remedy}"
    )
