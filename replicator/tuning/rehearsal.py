"""What is rehearsed of a plan: on which mesh, and which variables are cut there.

Small sizes would leave whole what true sizes cut: variables below a strategy's limit of
bytes, and those whose dimensions do not divide. So a variable is cut in a rehearsal if
that of its path is cut at true sizes; what does not divide there is named.
"""

import dataclasses
import glob
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from replicator.strategies.rule import Rule
from replicator.strategies.strategy import Strategy
from replicator.strategies.variables import Variable

MOST_DEVICES = 256
"""Faked devices in a process: XLA's pool for CPUs starves with more, and aborts."""

Status = Literal["ok", "differs", "unchecked", "refused", "problem", "timeout", "died"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
      status: `"ok"`: both updates are those of one device. `"differs"`: one is not.
        `"unchecked"`: they were made, and cannot be compared. `"refused"`: strategy and
        step do not go together. `"problem"`: there is no step at small sizes.
        `"timeout"`, `"died"`: the process was ended, or ended by itself.
      reason: The variable that is off most, and by how much; or why there is no
        comparison.
      strategy: Name of the strategy.
      planned: Size of each axis of the mesh that is planned.
      mesh: Size of each axis of the mesh that was rehearsed.
      cut: Number of parameters that were cut.
      left_whole: Paths of parameters that are cut at true sizes, and were whole here.
      seconds: Time that it took, compiling included.
    """

    status: Status
    reason: str = ""
    strategy: str = ""
    planned: Mapping[str, int] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    cut: int = 0
    left_whole: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return a line or two.

        >>> print(Rehearsal(status="ok", reason="equal", mesh={"replica": 8}))
        rehearsed on replica=8: ok, equal
        """
        mesh = _mesh_text(self.mesh)
        nearest = ""
        if self.planned and dict(self.planned) != dict(self.mesh):
            nearest = f", the nearest to {_mesh_text(self.planned)} that fits a process"
        lines = [f"rehearsed on {mesh}{nearest}: {self.status}, {self.reason}"]
        if self.left_whole:
            first, count = ", ".join(self.left_whole[:3]), len(self.left_whole)
            more = ", ..." if count > 3 else ""
            lines.append(
                f"not rehearsed: {count} parameters are cut at true sizes, and small "
                f"ones do not divide ({self.cut} are cut): {first}{more}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Write it as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Rehearsal":
        """Read what `to_json` wrote."""
        plain: dict[str, Any] = json.loads(text)
        plain["left_whole"] = tuple(plain["left_whole"])
        return cls(**plain)


class RehearsedCut(NamedTuple):
    """How a rehearsal cuts variables.

    Attributes:
      strategy: Strategy for the small sizes.
      cut: Number of parameters that it cuts.
      left_whole: Paths of those that it leaves whole and that are cut at true sizes.
    """

    strategy: Strategy
    cut: int
    left_whole: tuple[str, ...]


def nearest_mesh(sizes: Mapping[str, int], most: int = MOST_DEVICES) -> dict[str, int]:
    """Return the sizes of a mesh of the same axes that has few enough devices.

    The longest axis is halved until they are.

    >>> nearest_mesh({"replica": 64, "shard": 16, "model": 1})
    {'replica': 16, 'shard': 16, 'model': 1}
    """
    found = dict(sizes)
    while math.prod(found.values()) > most:
        longest = max(found, key=lambda axis: found[axis])
        found[longest] //= 2
    return found


def on_mesh(strategy: Strategy, sizes: Mapping[str, int]) -> Strategy:
    """Return a strategy for a mesh of such sizes, and for any variables."""
    if strategy.kind == "replicates":
        return dataclasses.replace(strategy, variables=())
    return dataclasses.replace(strategy, variables=(), **sizes)


def rehearsed_cut(
    strategy: Strategy,
    planned: dict[str, int],
    true: Sequence[Variable],
    small: Sequence[Variable],
) -> RehearsedCut:
    """Return how small variables are cut: as those of true sizes on the planned mesh.

    Args:
      strategy: Strategy on the mesh of the rehearsal.
      planned: Sizes of the axes of the mesh that is planned.
      true: Variables of the state at true sizes.
      small: Variables of the state at small sizes. One whose path is not among the true
        ones is cut if it divides.

    Raises:
      ArgumentError: One does not divide, and may not stay whole.
    """
    if strategy.kind == "replicates":
        return RehearsedCut(strategy, 0, ())
    by_path = {each.path: each for each in true}
    rules, wanted = [], []
    for each in small:
        rule = strategy.rule_of(each)
        if each.follows != each.path or rule is None:
            continue
        like = by_path.get(each.path)
        is_cut = like is None or _is_cut(strategy, like, planned)
        own = rule if is_cut else Rule(pattern="*")
        rules.append(dataclasses.replace(own, pattern=glob.escape(each.path)))
        if is_cut and not each.is_optimizer:
            wanted.append((each, like is not None))
    made = dataclasses.replace(strategy, rules=tuple(rules), whole_below_bytes=0)
    sizes = {axis: getattr(made, axis) for axis in planned}
    whole = [
        (each.path, is_known)
        for each, is_known in wanted
        if not _is_cut(made, each, sizes)
    ]
    missing = tuple(path for path, is_known in whole if is_known)
    return RehearsedCut(made, len(wanted) - len(whole), missing)


def _is_cut(strategy: Strategy, variable: Variable, sizes: dict[str, int]) -> bool:
    """Return whether a variable, or the optimizer's state for it, lies in pieces."""
    moments = dataclasses.replace(variable, is_optimizer=True)
    own, kept = (strategy.place(each, sizes) for each in (variable, moments))
    return any((*own.stored, *own.computed, *own.gradient, *kept.stored))


def _mesh_text(sizes: Mapping[str, int]) -> str:
    longer = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(longer) or "one device"
