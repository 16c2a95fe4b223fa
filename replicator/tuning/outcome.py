"""What became of a step that was compiled elsewhere: plain data, also as JSON."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from replicator.strategies.cost import Features
from replicator.strategies.traffic import Traffic
from replicator.strategies.variables import Variable
from replicator.tuning.choosing.candidates import Work

Status = Literal[
    "compiled",
    "forecast",
    "memory",
    "compiler",
    "refused",
    "problem",
    "timeout",
    "died",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOutcome:
    """Outcome of compiling one step for one strategy and one set of devices.

    Attributes:
      status: `"compiled"`: it fits. `"memory"`: it needs more than a device has, says
        the compiler. `"compiler"`: the compiler failed otherwise. `"refused"`: strategy
        and step do not go together, or tracing failed. `"problem"`: `problem` returned
        none. `"timeout"`, `"died"`: the
        process that compiled was ended, or ended by itself. `"forecast"`: traced and
        lowered alone.
      reason: Why it is none of the first and the last; empty for these.
      strategy: Name of the strategy.
      mesh: Size of each axis of the mesh.
      examples: Number of examples of the global batch.
      state_bytes: Bytes of the state on a device; 0 if it came to none.
      memory_bytes: Memory of a device that the program needs at its peak, by the
        compiler; None if it does not say.
      limit_bytes: Memory of a device that a program may use, by the compiler; None if
        it is not one for devices that are not there.
      flops: Number of operations of products of a step, of all devices.
      features: Work of a device; None for what was not compiled.
      work: Work of all devices, where it was asked for instead of a program.
      key: Key of the program's text; empty if it was not lowered.
      versions: Of the packages that compiled it.
      seconds: Time that it took, tracing included.
    """

    status: Status
    reason: str = ""
    strategy: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    examples: int = 0
    state_bytes: int = 0
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    flops: float = 0.0
    features: Features | None = None
    work: Work | None = None
    key: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_lasting(self) -> bool:
        """Whether another try would find the same."""
        return self.status in ("compiled", "memory", "compiler")

    def to_json(self) -> str:
        """Write it as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "CompileOutcome":
        """Read what `to_json` wrote.

        Raises:
          ValueError: It is something else.
        """
        plain: Any = json.loads(text)
        try:
            if plain["features"] is not None:
                plain["features"] = features_from(plain["features"])
            if plain.get("work") is not None:
                plain["work"] = _work_from(plain["work"])
            return cls(**plain)
        except (KeyError, TypeError) as failure:
            raise ValueError(f"not an outcome: {failure}") from failure


def features_from(plain: Mapping[str, Any]) -> Features:
    """Return features from the plain data of `dataclasses.asdict`, or its JSON.

    >>> found = features_from({"num_devices": 1, "flops": {}, "traffic": []})
    >>> found.traffic
    ()
    """
    traffic = [
        Traffic(**each | {"axes": tuple(each["axes"])}) for each in plain["traffic"]
    ]
    return Features(**{**plain, "traffic": tuple(traffic)})


def _work_from(plain: Mapping[str, Any]) -> Work:
    variables = [
        Variable(**{**each, "shape": tuple(each["shape"])})
        for each in plain["variables"]
    ]
    return Work(**{**plain, "variables": tuple(variables)})
