"""Rows of plans, of outcomes that are written down."""

from replicator.strategies import Features, Machine, Traffic, fsdp, predict
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.plan import PlanRow

GIB = 2**30


def row(
    strategy="fsdp",
    *,
    topology="v5e:4x4",
    status="compiled",
    state=2,
    needs=8,
    limit=16,
    wire=10**9,
    reason="",
):
    """Return a row of 1,024 examples; sizes are in GiB."""
    machine = Machine.from_topology(topology)
    devices = machine.num_devices
    sent = Traffic(
        kind="all-gather", axes=("shard",), wire_bytes=wire, stride=1, span=devices
    )
    features = Features(
        num_devices=devices, flops={"bfloat16": 2e15 / devices}, traffic=(sent,)
    )
    if status not in ("compiled", "forecast"):
        features = None
    outcome = CompileOutcome(
        status=status,
        reason=reason,
        strategy=strategy,
        mesh={"replica": 1, "shard": devices, "model": 1},
        examples=1024,
        state_bytes=state * GIB,
        memory_bytes=None if status == "forecast" else needs * GIB,
        flops=2e15,
        features=features,
    )
    return PlanRow(
        topology=topology,
        num_devices=devices,
        strategy=strategy,
        outcome=outcome,
        time=None if features is None else predict(features, machine),
        limit_bytes=limit * GIB,
        placed=fsdp(),
    )
