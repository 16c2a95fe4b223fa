"""Decide from the environment which process of which group this is, or refuse.

Each launcher's variables are a claim (`detectors.py`). A launcher of one process is no
group: the one around it counts. Where several name more, they agree, or the variables
show which of them started this process last, or it is an error: a process that guessed
would train alone, or on another one's data.
"""

from collections.abc import Mapping, Sequence

from replicator.distributed.clusters import Cluster
from replicator.distributed.launchers.detectors import DETECTORS, Claim
from replicator.errors import ArgumentError

_ALONE = {
    "SLURM_JOB_ID": "slurm: a batch script is one process; `srun` starts each task's",
    "JOB_COMPLETION_INDEX": "kubernetes: JOB_COMPLETION_INDEX numbers this pod; "
    "nothing says of how many, and where the first one is",
}
"""Why a process is alone where these are set and no launcher read them."""


def detect(
    environ: Mapping[str, str], *, coordinator: str | None = None
) -> Cluster | None:
    """Return the group that the environment describes; None if it describes none.

    Args:
      environ: Environment variables, for example `os.environ`.
      coordinator: `host:port` of process 0, before what the environment says of it.

    Raises:
      ArgumentError: Variables name more than one process and are malformed, half set or
        contradictory, or say nowhere which host process 0 is on.

    >>> cluster = detect({"MASTER_ADDR": "node1", "RANK": "1", "WORLD_SIZE": "4"})
    >>> cluster.coordinator, cluster.num_processes, cluster.process_id
    ('node1:8482', 4, 1)
    """
    claims = read_claims(environ)
    chosen = _choose(claims)
    if chosen is None or chosen.number is None or chosen.size is None:
        return None
    # An address that is meant for us, then the launcher's own, then another one's.
    told = [claim.address for claim in claims if claim.kind == "replicator"]
    told += [chosen.address]
    told += [claim.address for claim in claims if claim.agrees_with(chosen)]
    address = coordinator or next(filter(None, told), None)
    if address is None and chosen.size == 1:
        return None
    if address is None:
        raise _half_set(chosen) if chosen.missing else _nowhere(chosen)
    return Cluster(
        kind=chosen.kind,
        coordinator=address,
        num_processes=chosen.size,
        process_id=chosen.number,
        local_devices=chosen.local_devices,
    )


def read_claims(environ: Mapping[str, str]) -> list[Claim]:
    """Return what each launcher says that has set anything.

    Raises:
      ArgumentError: A number is malformed, or beyond the number of processes.
    """
    read = (row.read(kind, environ) for kind, row in DETECTORS.items())
    return [claim for claim in read if claim is not None]


def explain(environ: Mapping[str, str]) -> list[str]:
    """Say of each launcher what was found of it, or what was looked for.

    Raises:
      ArgumentError: A number is malformed, or beyond the number of processes.
    """
    claims = read_claims(environ)
    try:
        chosen = _choose(claims)
    except ArgumentError:
        chosen = None
    lines = [f"{claim.kind}: {_told(claim, chosen)}" for claim in claims]
    lines += [
        line
        for name, line in _ALONE.items()
        if environ.get(name) and not any(name in claim.given for claim in claims)
    ]
    said = {claim.kind for claim in claims}
    unset = [
        f"{kind} ({row.levels[-1][-1].replace('|', ' or ')})"
        for kind, row in DETECTORS.items()
        if kind not in said
    ]
    return [*lines, f"not set: {', '.join(unset)}"]


def _choose(claims: Sequence[Claim]) -> Claim | None:
    """Return the claim that counts; None if there is one process.

    Raises:
      ArgumentError: Which one counts is not to be told.
    """
    ours = [claim for claim in claims if claim.kind == "replicator"]
    others = [claim for claim in claims if claim.kind != "replicator"]
    # Ours are meant for this library alone: they count, whatever else is set. An
    # address alone is for the group that the others name.
    placed = {"REPLICATOR_NUM_PROCESSES", "REPLICATOR_PROCESS_ID"}
    if ours and (not others or placed & {*ours[0].given}):
        others = ours
    unsettled = [claim for claim in others if claim.size != 1]
    whole = [claim for claim in others if None not in (claim.number, claim.size)]
    several = [claim for claim in whole if claim.size != 1] or whole
    if not several:
        if unsettled:
            raise _half_set(unsettled[0])
        return None
    apart = [claim for claim in unsettled if not claim.agrees_with(several[0])]
    inmost = [claim for claim in several if claim.is_inmost]
    if apart and not inmost:
        raise _contradiction(several[0], apart[0])
    return inmost[0] if apart else several[0]


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


def _nowhere(claim: Claim) -> ArgumentError:
    return ArgumentError(
        f"`coordinator` must be given where the launcher ({claim.kind}) tells no host, "
        f"got {_place(claim)} by {_names(claim.given)}. Call `initialize(coordinator="
        '"HOST:8482")` with the host of process 0.'
    )


def _names(variables: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in variables).replace("|", "` or `")


def _place(claim: Claim) -> str:
    number = "a process" if claim.number is None else f"process {claim.number}"
    return f"{number} of {'no size' if claim.size is None else claim.size}"


def _told(claim: Claim, chosen: Claim | None) -> str:
    by = ", ".join(claim.given)
    if claim.size == 1:
        return f"one process ({by})"
    if None in (claim.number, claim.size):
        missing = ", ".join(claim.missing).replace("|", " or ")
        return f"half set: {by}, and no {missing}"
    told = f"{_place(claim)} at {claim.address or 'no known address'} ({by})"
    if chosen is None or claim.agrees_with(chosen):
        return told
    return f"{told}, left out for {chosen.kind}"
