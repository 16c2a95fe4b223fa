"""Faults as data, read from text.

One fault on a line, or several separated by semicolons:

    kill rank 1 at step 40                       SIGKILL to oneself
    terminate rank 0 at step 10..50              SIGTERM, at a step that the seed picks
    raise at step 17                             an exception from a hook
    stuck rank 1 at step 5                       the loop sleeps forever
    hold the interpreter 70 s at step 5          no Python thread gets a turn
    stall input 30 s at step 5                   the next batch to be read is late
    nan in the next batch on replica 3 of 8 at step 7
    disk full at write 3                         the third save of this process fails
    flip a bit in the last checkpoint at step 20
    flip a bit in the state on replica 3 of 8 at step 20

Batches are read ahead: the next to be read is one of the next few steps, or of the next
32 where batches are small, unless `InputOptions(prefetch=1)` is given.

Without `rank` a fault happens in every process. Each happens once, also over restarts;
`always kill ...` happens each time.
"""

import dataclasses
import random
import re
from typing import Literal, TypeAlias, get_args

from replicator.errors import ArgumentError, check_count, check_word

Kind: TypeAlias = Literal[
    "kill",
    "terminate",
    "raise",
    "stuck",
    "hold the interpreter",
    "stall input",
    "nan in the next batch",
    "disk full",
    "flip a bit in the last checkpoint",
    "flip a bit in the state",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_TIMED = ("hold the interpreter", "stall input")
_OF_REPLICA = ("nan in the next batch", "flip a bit in the state")
_SENTENCE = re.compile(
    rf"(?P<always>always )?(?P<kind>{'|'.join(KINDS)})"
    r"(?: rank (?P<rank>\d+))?"
    r"(?: (?P<seconds>\d+(?:\.\d+)?) s)?"
    r"(?: on replica (?P<replica>\d+) of (?P<replicas>\d+))?"
    r" at (?P<unit>step|write) (?P<at>\d+)(?:\.\.(?P<last>\d+))?"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    Attributes:
      kind: Kind of the fault.
      at: Step after which it happens; for `disk full` the save of the process.
      rank: Number of the process; None for each.
      seconds: Duration, for those that take time.
      replica: Replica whose part of a batch becomes NaN, or device whose copy of a leaf
        is damaged, by its place among them, and the number of them; None for the whole
        batch, or a copy that the seed picks.
      always: Whether it happens again after a restart.

    Raises:
      ArgumentError: The parts do not belong together.

    >>> str(Fault(kind="stall input", at=5, seconds=30))
    'stall input 30 s at step 5'
    """

    kind: Kind
    at: int
    rank: int | None = None
    seconds: float | None = None
    replica: tuple[int, int] | None = None
    always: bool = False

    def __post_init__(self) -> None:
        check_word("kind", self.kind, KINDS)
        check_count("at", self.at)
        if (self.seconds is not None) != (self.kind in _TIMED):
            need = "have a time" if self.kind in _TIMED else "have no time"
            raise ArgumentError(
                f"`{self.kind}` must {need}, got {self.seconds}. "
                "Write for example `stall input 30 s at step 5`."
            )
        if self.replica is not None and not (
            self.kind in _OF_REPLICA and self.replica[0] < self.replica[1]
        ):
            raise ArgumentError(
                "`replica` must be one of those that there are, got "
                f"{self.replica} for `{self.kind}`. Write `on replica 3 of 8`."
            )

    def __str__(self) -> str:
        """Write the fault as `parse` reads it."""
        parts = ["always"] if self.always else []
        parts.append(self.kind)
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        if self.seconds is not None:
            parts.append(f"{self.seconds:g} s")
        if self.replica is not None:
            parts.append("on replica {} of {}".format(*self.replica))
        return " ".join([*parts, f"at {_unit(self.kind)} {self.at}"])


def parse(text: str, *, seed: int = 0) -> tuple[Fault, ...]:
    """Read a schedule.

    Args:
      text: Faults, one on a line or separated by semicolons.
      seed: Selects the step of a range (`at step 10..50`), the same at each restart and
        in each process.

    Returns:
      The faults, in the order of the text.

    Raises:
      ArgumentError: A line is not a fault.

    >>> [str(fault) for fault in parse("kill rank 1 at step 40; disk full at write 3")]
    ['kill rank 1 at step 40', 'disk full at write 3']
    """
    sentences = [part.strip() for part in re.split(r"[;\n]", text)]
    return tuple(
        _parse_one(sentence, random.Random(f"{seed}/{number}"))
        for number, sentence in enumerate(filter(None, sentences))
    )


def _parse_one(sentence: str, pick: random.Random) -> Fault:
    found = _SENTENCE.fullmatch(" ".join(sentence.split()))
    if found is None or found["unit"] != _unit(found["kind"]):
        raise ArgumentError(
            "`text` must hold faults such as `kill rank 1 at step 40` or `disk full at "
            f"write 3`, got {sentence!r}. See `replicator.testing.faults.schedule`."
        )
    first, last = int(found["at"]), int(found["last"] or found["at"])
    if last < first:
        raise ArgumentError(
            f"`{sentence}` must name a range upwards, got {first}..{last}. Turn it."
        )
    replica = found["replica"] and (int(found["replica"]), int(found["replicas"]))
    return Fault(
        kind=found["kind"],  # pyright: ignore[reportArgumentType]
        at=pick.randint(first, last),
        rank=None if found["rank"] is None else int(found["rank"]),
        seconds=None if found["seconds"] is None else float(found["seconds"]),
        replica=replica or None,
        always=found["always"] is not None,
    )


def _unit(kind: str) -> str:
    return "write" if kind == "disk full" else "step"
