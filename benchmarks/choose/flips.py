"""Pairs of cases between which the choice must turn over, and why."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.choose.machines import cluster
from benchmarks.choose.models import Model
from benchmarks.choose.searches import Case, search
from replicator.strategies import Machine

FEW = Model(width=512, examples=64)  # weights of 33.5 MB
MANY = Model(width=128, examples=16_384)  # of 2.1 MB
LARGE = Model(width=2_048, examples=16_384)  # of 537 MB
HUGE = Model(width=16_384, examples=65_536)  # of 34 GB, as much for the optimizer
LOOKUPS = Model(width=64, rows=65_536, examples=4_096)
MANY_LOOKUPS = Model(width=64, rows=65_536, examples=1 << 20)

Expected = Callable[[str], bool]


class Flip(NamedTuple):
    """Two cases, and what is right for each: a test of the chosen name."""

    name: str
    one: Case
    is_right_for_one: Expected
    other: Case
    is_right_for_other: Expected


def begins(*beginnings: str) -> Expected:
    """Return the test of the beginning of a name."""
    return lambda name: name.startswith(beginnings)


def flips() -> list[Flip]:
    """Return the eight of them."""
    fast, slow = Machine.from_topology("h100:2x8"), cluster(4, 4, 1)
    return [*_of_models(fast, slow), *_of_machines(fast, slow)]


def _of_models(fast: Machine, slow: Machine) -> list[Flip]:
    tensor = begins("tensor_parallel")
    return [
        # Activations are sent in place of weights, where they are fewer.
        Flip(
            "big batch",
            Case(model=FEW, machine=slow),
            tensor,
            Case(model=MANY, machine=slow),
            lambda name: not tensor(name),
        ),
        # A whole copy does not fit.
        Flip(
            "big weights",
            Case(model=LARGE, machine=fast, tensor=False),
            begins("data_parallel"),
            Case(model=HUGE, machine=fast, tensor=False),
            begins("fsdp", "hybrid"),
        ),
        # Rows that were looked up, in place of the table.
        Flip(
            "embeddings",
            Case(model=MANY_LOOKUPS, machine=slow),
            lambda name: "rows" not in name,
            Case(model=LOOKUPS, machine=slow),
            lambda name: name == "data_parallel(rows)",
        ),
        # Nothing but dimensions of weights is left to cut.
        Flip(
            "fewer examples than devices",
            Case(model=MANY, machine=fast),
            lambda name: not tensor(name),
            Case(model=Model(width=128, examples=8), machine=fast),
            tensor,
        ),
    ]


def _of_machines(fast: Machine, slow: Machine) -> list[Flip]:
    torus = Machine.from_topology("v5e:4x4")
    large = Case(model=LARGE, machine=fast, tensor=False)
    by_hosts = begins("hybrid(shard=4)", "data_parallel(hierarchical)")
    return [
        # A whole copy does not fit.
        Flip(
            "memory cap",
            large,
            begins("data_parallel"),
            Case(model=LARGE, machine=fast, tensor=False, memory_bytes=2e9),
            begins("zero", "fsdp", "hybrid"),
        ),
        # Less is sent between hosts.
        Flip(
            "1 Gbit/s between hosts",
            large,
            lambda name: name == "data_parallel",
            Case(model=LARGE, machine=slow, tensor=False),
            by_hosts,
        ),
        Flip(
            "narrow numbers allowed",
            Case(model=LARGE, machine=slow, tensor=False),
            by_hosts,
            Case(model=LARGE, machine=slow, tensor=False, lossy=True),
            lambda name: "int8" in name,
        ),
        # No level of links is slower than another, so copies on each host save nothing.
        Flip(
            "a torus in place of hosts",
            Case(model=LARGE, machine=fast, tensor=False, memory_bytes=2e9),
            begins("zero1(shards", "zero2(shards", "hybrid"),
            Case(model=LARGE, machine=torus, tensor=False, memory_bytes=2e9),
            lambda name: name in ("fsdp", "zero2"),
        ),
    ]


def is_right(flip: Flip) -> bool:
    """Return whether both choices are right; print them."""
    one, other = (_chosen(case) for case in (flip.one, flip.other))
    right = flip.is_right_for_one(one) and flip.is_right_for_other(other)
    print(f"{flip.name}: {one}, then {other}{'' if right else ': WRONG'}", flush=True)
    return right


def _chosen(case: Case) -> str:
    found = search(case).all_of("chosen")
    return found[0].name if found else "nothing"
