"""Machines of sixteen devices, by name; none of them is there."""

from replicator.strategies import Machine


def cluster(hosts: int, each: int, gbit_per_s: float, *, device: str = "Tesla T4"):
    """Return hosts with so many GPUs each, joined by a network of such a speed."""
    lines = [
        f"  - {{address: 10.0.0.{n + 1}, gpus: {list(range(each))}, "
        f"network_bandwidth: {gbit_per_s}, chief: {str(n == 0).lower()}}}"
        for n in range(hosts)
    ]
    return Machine.from_yaml("\n".join([f"device: {device}", "nodes:", *lines]))


def machines() -> dict[str, Machine]:
    """Return twelve machines by name."""
    topologies = (
        *("h100:2x8", "a100:4x4", "v100:2x8", "t4:4x4", "b200:2x8"),
        *("v5e:4x4", "v6e:4x4", "v5p:2x2x4", "v4:2x2x4"),
    )
    found = {each: Machine.from_topology(each) for each in topologies}
    found["2 slices of v5e:2x4"] = Machine.from_topology("v5e:2x4", slices=2)
    found["4 hosts of 4 T4, 1 Gbit/s"] = cluster(4, 4, 1)
    found["2 hosts of 8 A100, 10 Gbit/s"] = cluster(
        2, 8, 10, device="NVIDIA A100-SXM4-40GB"
    )
    return found
