"""Choose the group of this process from its environment, or refuse.

The variables of each launcher are a claim (`detectors.py`). A launcher of one process
is not a group: the one around it counts. Where several launchers name more processes,
they must agree, or variables must show which of them started this process last.
Anything else is an error: a process that guessed would train alone, or on the data of
another one.
"""

import json
from collections.abc import Mapping, Sequence

from replicator.distributed.clusters import Cluster
from replicator.distributed.launchers.detectors import DETECTORS, Claim
from replicator.errors import ArgumentError

_ALONE = {
    "SLURM_JOB_ID": "slurm: a batch script is one process; `srun` starts each task's",
    "JOB_COMPLETION_INDEX": "kubernetes: JOB_COMPLETION_INDEX numbers this pod; no "
    "variable counts the pods or names the host of the first one",
}
"""Explanations, by variable, of a process that is alone although it is set."""

_OTHER_COUNTS = (
    "CLUSTER_SPEC",  # Vertex AI
    "JSM_NAMESPACE_SIZE",  # IBM's jsrun
    "PET_NNODES",  # what Kubeflow hands to torchrun
    "SKYPILOT_NUM_NODES",
    "SM_HOSTS",  # SageMaker
    "TF_CONFIG",  # TensorFlow's operators
    "VC_WORKER_NUM",  # Volcano
)
"""Counts of processes or hosts, set by launchers that have no row in `DETECTORS`."""


def detect(
    environ: Mapping[str, str], *, coordinator: str | None = None
) -> Cluster | None:
    """Return the group that the environment describes; None for a single process.

    Args:
      environ: Environment variables, for example `os.environ`.
      coordinator: `host:port` of process 0, instead of that of the environment.

    Raises:
      ArgumentError: Variables name more than one process and are malformed, half set,
        contradictory, of an unknown launcher, or do not name the host of process 0.

    >>> cluster = detect({"MASTER_ADDR": "node1", "RANK": "1", "WORLD_SIZE": "4"})
    >>> cluster.coordinator, cluster.num_processes, cluster.process_id
    ('node1:8482', 4, 1)
    """
    claims = read_claims(environ)
    chosen = _choose(claims)
    if chosen is None or chosen.number is None or chosen.size in (None, 1):
        if not any(claim.kind == "replicator" for claim in claims):
            _check_other_counts(environ)
        return None
    # An address meant for this library, then the launcher's own, then another one's.
    addresses = [claim.address for claim in claims if claim.kind == "replicator"]
    addresses += [chosen.address]
    addresses += [claim.address for claim in claims if claim.agrees_with(chosen)]
    address = coordinator or next(filter(None, addresses), None)
    if address is None:
        raise _half_set(chosen) if chosen.missing else _no_host(chosen)
    return Cluster(
        kind=chosen.kind,
        coordinator=address,
        num_processes=chosen.size,
        process_id=chosen.number,
        local_devices=chosen.local_devices,
    )


def read_claims(environ: Mapping[str, str]) -> list[Claim]:
    """Return the claim of each launcher that has set a variable.

    Raises:
      ArgumentError: A number is malformed, or beyond the number of processes.
    """
    read = (row.read(kind, environ) for kind, row in DETECTORS.items())
    return [claim for claim in read if claim is not None]


def explain(environ: Mapping[str, str]) -> list[str]:
    """Describe what was found of each launcher, one line each.

    Raises:
      ArgumentError: A number is malformed, or beyond the number of processes.
    """
    claims = read_claims(environ)
    try:
        chosen = _choose(claims)
    except ArgumentError:
        chosen = None
    lines = [f"{claim.kind}: {_describe(claim, chosen)}" for claim in claims]
    read = {name for claim in claims for name in claim.given}
    lines += [
        line for name, line in _ALONE.items() if environ.get(name) and name not in read
    ]
    unset = ", ".join(
        f"{kind} ({row.levels[-1][-1].replace('|', ' or ')})"
        for kind, row in DETECTORS.items()
        if kind not in {claim.kind for claim in claims}
    )
    return [*lines, f"not set: {unset}"]


def _choose(claims: Sequence[Claim]) -> Claim | None:
    """Return the claim that counts; None if nothing names a process.

    Raises:
      ArgumentError: A claim is half set, or two disagree.
    """
    ours = [claim for claim in claims if claim.kind == "replicator"]
    others = [claim for claim in claims if claim.kind != "replicator"]
    # Variables of this library count before all others. Its address alone is for the
    # group that the others name.
    placed = {"REPLICATOR_NUM_PROCESSES", "REPLICATOR_PROCESS_ID"}
    if ours and (not others or placed & {*ours[0].given}):
        others = ours
    whole = [claim for claim in others if None not in (claim.number, claim.size)]
    several = [claim for claim in whole if claim.size != 1] or whole
    groups = [claim for claim in others if claim.size != 1]
    if not several:
        if groups:
            raise _half_set(groups[0])
        return None
    apart = [claim for claim in groups if not claim.agrees_with(several[0])]
    if not apart:
        return several[0]
    inmost = [claim for claim in several if claim.is_inmost]
    if not inmost:
        raise _contradiction(several[0], apart[0])
    return inmost[0]


def _check_other_counts(environ: Mapping[str, str]) -> None:
    """Raise if an unknown launcher started several processes, of which this is one."""
    for name in _OTHER_COUNTS:
        if _count(value := environ.get(name, "")) > 1:
            raise ArgumentError(
                f"`{name}` must not count several processes where no launcher that is "
                f"known numbers them, got {value!r}. Call `initialize` with all three "
                "arguments, or set REPLICATOR_NUM_PROCESSES=1 to train alone."
            )


def _count(value: str) -> int:
    """Read a number, the length of a list, or that of all lists of a cluster."""
    try:
        read = json.loads(value)
        if isinstance(read, dict):
            return sum(len(hosts) for hosts in read["cluster"].values())
        return len(read) if isinstance(read, list) else int(read)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def _half_set(claim: Claim) -> ArgumentError:
    return ArgumentError(
        f"{_names(claim.missing)} must be set beside {_names(claim.given)} "
        f"({claim.kind}), got nothing. Set all of them in each process, or none."
    )


def _contradiction(first: Claim, second: Claim) -> ArgumentError:
    return ArgumentError(
        f"{_names(first.given[:2])} ({first.kind}) and {_names(second.given[:2])} "
        f"({second.kind}) must name one place in one group, got {_place(first)} and "
        f"{_place(second)}. Unset those of the one that did not start this process."
    )


def _no_host(claim: Claim) -> ArgumentError:
    return ArgumentError(
        f"`coordinator` must be given where the launcher ({claim.kind}) names no host, "
        f"got {_place(claim)} from {_names(claim.given)}. Call `initialize(coordinator="
        '"HOST:8482")` with the host of process 0.'
    )


def _names(variables: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in variables).replace("|", "` or `")


def _place(claim: Claim) -> str:
    number = "a process" if claim.number is None else f"process {claim.number}"
    return f"{number} of {'no size' if claim.size is None else claim.size}"


def _describe(claim: Claim, chosen: Claim | None) -> str:
    given = ", ".join(claim.given)
    if claim.size == 1:
        return f"one process ({given})"
    line = f"{_place(claim)} at {claim.address or 'no known address'} ({given})"
    if claim.missing:
        line += f", without {_names(claim.missing)}"
    if chosen is not None and not claim.agrees_with(chosen):
        line += f", left out for {chosen.kind}"
    return line
