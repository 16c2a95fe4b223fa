"""A strategy: mesh axes and rules, which decide how each variable lies on devices."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from replicator.collectives.synchronise.method import SumMethod
from replicator.errors import (
    ArgumentError,
    check_counts,
    check_text,
    check_whole,
    check_word,
)
from replicator.strategies.rule import AXES, Cut, Partition, Rule, axes_of
from replicator.strategies.variables import Variable

WHOLE_BELOW_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Place of one variable: a mesh axis, or None, for each of its dimensions.

    Attributes:
      stored: Axes between steps.
      computed: Axes where it is multiplied.
      gradient: Axes of its gradient, or of its parameter's.
    """

    stored: Cut
    computed: Cut
    gradient: Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Description of how a step and its state are spread over devices.

    Attributes:
      name: Name of the builder.
      kind: `"replicates"`: a replica on each device. `"partitions"`: one replica over
        all of them.
      replica: Size of the mesh axis `replica`, over which only batches are cut; None
        for all devices that the other axes leave, and for every strategy that
        replicates.
      shard: Size of the mesh axis `shard`; `"host"` for the devices of a host, which
        `for_hosts` puts in.
      model: Size of the mesh axis `model`.
      batch_axes: Mesh axes that batches are cut over.
      rules: Rules, of which the first that matches a parameter's path decides.
      whole_below_bytes: Smaller variables stay whole, unless a rule names dimensions.
      variables: `path shape` of the parameters that it was made for; empty for any.
      devices_per_host: Number of devices that fast links join, for rules that
        synchronise by hosts; None where there are none, or until `for_hosts`.

    Raises:
      ArgumentError: A field breaks its rule.
    """

    name: str
    kind: Literal["replicates", "partitions"] = "partitions"
    replica: int | None = 1
    shard: int | Literal["host"] | None = 1
    model: int | None = 1
    batch_axes: tuple[str, ...] = ("replica", "shard")
    rules: tuple[Rule, ...] = ()
    whole_below_bytes: int = WHOLE_BELOW_BYTES
    variables: tuple[str, ...] = ()
    devices_per_host: int | None = None

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_word("kind", self.kind, ("replicates", "partitions"))
        check_whole("whole_below_bytes", self.whole_below_bytes)
        check_counts(self, *(a for a in AXES if a != "shard" or self.shard != "host"))
        sizes = tuple(getattr(self, axis) for axis in AXES)
        if sizes.count(None) > 1:
            raise ArgumentError(
                "`strategy` must leave the size of one mesh axis open at most, got "
                f"{self._mesh_text()}. Give the others a number."
            )
        if self.kind == "replicates" and sizes != (None, 1, 1):
            raise ArgumentError(
                "`strategy` must have replica=None (all devices), shard=1 and model=1 "
                f"where it replicates, got {self._mesh_text()}. Use "
                "`data_parallel()`."
            )
        for name, kind, remedy in (
            ("batch_axes", str, 'Write `("replica", "shard")`.'),
            ("rules", Rule, 'Write `(Rule(pattern="*", stored="shard"),)`.'),
            ("variables", str, "Use `strategy.made_for(variables)`."),
        ):
            object.__setattr__(
                self, name, _listed(name, getattr(self, name), kind, remedy)
            )
        self._check_rules()
        if tuple(axis for axis in AXES if axis in self.batch_axes) != self.batch_axes:
            raise ArgumentError(
                f"`batch_axes` must be some of {AXES}, in this order, got "
                f"{self.batch_axes!r}. Leave it out for ('replica', 'shard')."
            )

    def _check_rules(self) -> None:
        """Refuse a rule that this kind of strategy would ignore."""
        for rule in self.rules:
            if self.kind == "replicates" and rule.partitions:
                raise ArgumentError(
                    "`rules` must leave variables whole where a strategy replicates, "
                    f"got one that cuts {rule.pattern!r}. Use `Rules([...])`, or leave "
                    "all but `synchronise` and `compress` out."
                )
            if self.kind == "partitions" and rule.synchronises:
                raise ArgumentError(
                    "`rules` must leave `synchronise` and `compress` out where a "
                    f"strategy partitions, got {rule.pattern!r} with "
                    f"{rule.compress or rule.synchronise!r}: XLA adds gradients up. "
                    "Use `data_parallel([...])`."
                )
        check_counts(self, "devices_per_host")
        if self.devices_per_host is not None and not self._sums_by_hosts:
            raise ArgumentError(
                "`devices_per_host` must be left out where no rule synchronises by "
                f"hosts, got {self.devices_per_host}. Write "
                '`Rule(pattern="*", synchronise="hierarchical")`.'
            )

    @property
    def _sums_by_hosts(self) -> bool:
        return any(rule.synchronise == "hierarchical" for rule in self.rules)

    def for_hosts(self, devices: int) -> "Strategy":
        """Return the strategy for hosts of so many devices, where it left that open.

        >>> Strategy(name="mine", replica=None, shard="host").for_hosts(4).shard
        4
        """
        given = self.devices_per_host or devices
        return replace(
            self,
            shard=devices if self.shard == "host" else self.shard,
            devices_per_host=given if self._sums_by_hosts else None,
        )

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Return the size of each mesh axis.

        Raises:
          ArgumentError: That many devices do not suffice, or do not divide, or nothing
            says how many a host has.

        >>> Strategy(name="mine", replica=None, shard=4).sizes(8)
        {'replica': 2, 'shard': 4, 'model': 1}
        """
        for name, is_open in (
            ("shard", self.shard == "host"),
            ("devices_per_host", self._sums_by_hosts and not self.devices_per_host),
        ):
            if is_open:
                raise ArgumentError(
                    f"`{name}` must be the number of devices of a host, got "
                    f"{self.name} without it. Pass `{name}=8`; a `Replicator` also "
                    "takes it from its `machine`."
                )
        given = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(size for size in given.values() if size is not None)
        is_open = None in given.values()
        if fixed > num_devices or (is_open and num_devices % fixed):
            raise ArgumentError(
                f"`strategy` must fit {num_devices} devices, got {self.name} with "
                f"{self._mesh_text()}. Choose sizes whose product is {num_devices}."
            )
        if num_devices > (host := self.devices_per_host or 1) and num_devices % host:
            raise ArgumentError(
                f"`devices_per_host` must divide the {num_devices} devices, got {host}."
                " Pass the number of devices that each host has."
            )
        return {
            axis: num_devices // fixed if size is None else size
            for axis, size in given.items()
        }

    def _mesh_text(self) -> str:
        sizes = ((axis, getattr(self, axis)) for axis in AXES)
        return ", ".join(f"{axis}={'all' if n is None else n}" for axis, n in sizes)

    def place(self, variable: Variable, sizes: dict[str, int]) -> Placement:
        """Return how a variable lies on a mesh of such sizes.

        Raises:
          ArgumentError: It does not divide, and may not stay whole.

        >>> rule = Rule(pattern="*", stored="shard")
        >>> kernel = Variable(path="w", shape=(64, 512), dtype="float32", follows="w")
        >>> Strategy(name="mine", rules=(rule,)).place(kernel, {"shard": 8}).stored
        (None, 'shard')
        """
        rule = self.rule_of(variable)
        if rule is None or not variable.shape or variable.dtype.startswith("key<"):
            whole = (None,) * len(variable.shape)
            return Placement(stored=whole, computed=whole, gradient=whole)
        kept = rule.stored if rule.optimizer is None else rule.optimizer
        stored = kept if variable.is_optimizer else rule.stored
        gradient = kept if rule.gradient is None else rule.gradient
        return Placement(
            stored=self._cut(stored, variable, rule, sizes),
            computed=self._cut(rule.computed, variable, rule, sizes),
            gradient=self._cut(gradient, variable, rule, sizes),
        )

    def rule_of(self, variable: Variable) -> Rule | None:
        """Return the rule that decides; None if none matches."""
        matching = (r for r in self.rules if fnmatchcase(variable.follows, r.pattern))
        return next(matching, None)

    def method_of(self, path: str) -> SumMethod:
        """Return how replicas add up the gradient of the parameter at `path`.

        >>> rule = Rule(pattern="params/*", compress="int8")
        >>> mine = Strategy(name="a", kind="replicates", replica=None, rules=(rule,))
        >>> mine.method_of("params/w").compress, mine.method_of("other/w").compress
        ('int8', None)
        """
        for rule in self.rules:
            if fnmatchcase(path, rule.pattern):
                hosts = self.devices_per_host
                if rule.synchronise != "hierarchical":
                    hosts = None
                return SumMethod(
                    synchronise=rule.synchronise,
                    compress=rule.compress,
                    devices_per_host=hosts,
                )
        return SumMethod()

    def _cut(
        self, partition: Partition, variable: Variable, rule: Rule, sizes: dict
    ) -> Cut:
        shape = variable.shape
        whole = (None,) * len(shape)
        # Optimizer state of another shape has none of the dimensions that a rule names.
        is_other = variable.is_optimizer and variable.follows == variable.path
        pads = rule.uneven == "pad" and not is_other
        if isinstance(partition, str):
            if variable.nbytes < self.whole_below_bytes or sizes[partition] == 1:
                return whole
            every = [(n, -d) for d, n in enumerate(shape)]
            ways = [way for way in every if way[0] % sizes[partition] == 0]
            if ways or pads:
                dimension = -max(ways or every)[1]
                return tuple(
                    partition if d == dimension else None for d in range(len(shape))
                )
        elif len(partition) <= len(shape):
            cut = (*partition, *whole[len(partition) :])
            if pads or padded_shape(shape, cut, sizes) == shape:
                return tuple(a if sizes.get(a or "", 1) > 1 else None for a in cut)
        if rule.uneven != "whole" and not variable.is_optimizer:
            raise _uneven(variable, partition, sizes)
        return whole

    def check_variables(self, variables: tuple[Variable, ...]) -> None:
        """Refuse a state that the strategy was not written for.

        Raises:
          ArgumentError: A rule matches nothing, or it was saved for other variables.
        """
        if self.variables and (found := parameters_of(variables)) != self.variables:
            want, have = set(self.variables), set(found)
            differing = sorted(want ^ have) or ["their order"]
            side = "missing" if differing[0] in want else "new"
            raise ArgumentError(
                f"`strategy` must be one for the variables of this state, got "
                f"{self.name} made for others: `{differing[0]}` is {side}. "
                "Make another `Replicator`, with a strategy built for this state."
            )
        for rule in self.rules if variables else ():
            if not any(fnmatchcase(v.follows, rule.pattern) for v in variables):
                named = ", ".join(v.path for v in variables if not v.is_optimizer)
                raise ArgumentError(
                    f"`rules` must each match a parameter, got {rule.pattern!r}, which "
                    f"matches none of: {named[:120]}. Write for example "
                    '"params/*/kernel".'
                )

    def made_for(self, variables: tuple[Variable, ...]) -> "Strategy":
        """Return the strategy, bound to these variables: others are refused."""
        return replace(self, variables=parameters_of(variables))

    def as_json(self) -> dict[str, Any]:
        """Return the strategy in plain JSON."""
        return json.loads(json.dumps(asdict(self)))

    def diff(self, other: "Strategy") -> str:
        """Return the differences to `other`, a line each; empty if they are equal.

        >>> print(Strategy(name="a").diff(Strategy(name="a", shard=8)))
        -"shard": 1,
        +"shard": 8,
        """
        before, after = (
            json.dumps(each.as_json(), indent=1).splitlines() for each in (self, other)
        )
        changed = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(
            line[0] + line[1:].strip()
            for line in changed
            if line[0] in "+-" and line[:3] not in ("+++", "---")
        )


def padded_shape(
    shape: tuple[int, ...], cut: Cut, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return a shape with the dimensions that are cut rounded up, so that they divide.

    >>> padded_shape((50257, 512), ("shard", None), {"shard": 8})
    (50264, 512)
    """
    return tuple(
        n + -n % sizes.get(a or "", 1) for n, a in zip(shape, cut, strict=True)
    )


def parameters_of(variables: tuple[Variable, ...]) -> tuple[str, ...]:
    """Return the `Strategy.variables` of a state: `path shape` of its parameters."""
    return tuple(
        f"{each.path} {each.dtype}{list(each.shape)}"
        for each in variables
        if not each.is_optimizer
    )


def _listed(name: str, value: Any, kind: type, remedy: str) -> tuple[Any, ...]:
    """Return the list in a field as a tuple.

    Raises:
      ArgumentError: It is not a list, or holds something else.
    """
    is_list = isinstance(value, (tuple, list))
    if not is_list or not all(isinstance(each, kind) for each in value):
        kinds = "strings" if kind is str else "rules"
        raise ArgumentError(
            f"`{name}` must be a list of {kinds}, got {value!r}. {remedy}"
        )
    return tuple(value)


def _uneven(variable: Variable, partition: Partition, sizes: dict) -> ArgumentError:
    if not isinstance(partition, str) and len(partition) > len(variable.shape):
        return ArgumentError(
            f"`{variable.path}` must have as many dimensions as its partition, got the "
            f"shape {list(variable.shape)} for {partition!r}. Change its rule."
        )
    cut = {axis: sizes[axis] for axis in axes_of(partition)}
    return ArgumentError(
        f"`{variable.path}` must divide over {cut}, got the shape "
        f"{list(variable.shape)} for the partition {partition!r}. Change its rule, "
        'let it stay whole, `uneven="whole"`, or pad it: `uneven="pad"`.'
    )
