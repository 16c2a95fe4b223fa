"""A machine: its devices, and the links that join them, level by level.

Links are described by a latency and a speed (Hockney 1994, "The communication challenge
for MPP"). A level joins the members of the one before it: devices to a host, hosts to a
cluster; chips to a torus, tori over a network.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicator.base.mesh import jax_devices, listed_devices
from replicator.base.types import Device
from replicator.errors import ArgumentError, check_count, check_text
from replicator.strategies.calibration import Calibration, kept_calibration
from replicator.strategies.cluster_file import Host, read_cluster
from replicator.strategies.hardware import (
    Hardware,
    entry_of,
    hardware_from,
    hardware_of,
    published,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Links of one level.

    Attributes:
      level: `"host"`: inside a host. `"chip"` and `"torus"`: inside a TPU's chip, and
        between the chips of a slice. `"network"`: between hosts, or slices.
      devices: Number of devices that one group of this level joins; devices of a group
        are side by side in the machine's order.
      bytes_per_s: Bytes that one member of a group sends a second, over all its links;
        infinite where it is not known.
      latency_s: Seconds from one member to the next, for a message without bytes.
      shared_by: Number of devices in a member, which share its links.
      torus: Sizes of the torus that the members form; empty where a switch joins them.
      wraps: For each dimension of the torus, whether it is closed to a ring.
    """

    level: str
    devices: int
    bytes_per_s: float
    latency_s: float = 0.0
    shared_by: int = 1
    torus: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices, hosts and links of a machine, there or not.

    Attributes:
      name: Its topology, or the kind of its devices.
      num_devices: Number of its devices.
      links: Its levels, the innermost first.
      hardware: Figures of one device; None if they are not known.
      hosts: Its hosts, in the order of their devices; empty for a topology.
    """

    name: str
    num_devices: int
    links: tuple[Link, ...]
    hardware: Hardware | None = None
    hosts: tuple[Host, ...] = ()

    @classmethod
    def from_yaml(cls, text: str) -> "Machine":
        """Return the machine that a cluster's file describes.

        With `device`, the kind of its devices, it has published figures;
        `with_figures_of` gives it measured ones.

        Args:
          text: YAML with the keys of AutoDist's `resource_spec.yml`; the docstring of
            `strategies/cluster_file.py` shows them.

        Raises:
          ArgumentError: As `read_cluster` does.

        >>> text = '''
        ... device: Tesla T4
        ... nodes:
        ...   - {address: 10.0.0.1, chief: true, gpus: [0, 1], network_bandwidth: 50}
        ...   - {address: 10.0.0.2, gpus: [0, 1], network_bandwidth: 50}
        ... '''
        >>> [(link.level, link.devices) for link in Machine.from_yaml(text).links]
        [('host', 2), ('network', 4)]
        """
        hosts, kind = read_cluster(text)
        entry = entry_of(kind) or {}
        if kind and not entry:
            raise ArgumentError(
                f"`device` must be of a kind with published figures, got {kind!r}. "
                "Leave it out, and take measured ones: "
                "`machine.with_figures_of(other)`."
            )
        return cls(
            name=kind or "cluster",
            num_devices=sum(host.num_devices for host in hosts),
            links=_host_links(
                [host.num_devices for host in hosts],
                host=entry.get("host", {}),
                network_bytes_per_s=min(host.network_bytes_per_s for host in hosts),
            ),
            hardware=hardware_from(entry) if entry else None,
            hosts=hosts,
        )

    @classmethod
    def from_devices(cls, devices: Sequence[Device] | None = None) -> "Machine":
        """Return the machine of JAX's devices.

        Its figures are those that `replicator devices --calibrate` measured for as many
        devices of this kind, or else the published ones. Several hosts with GPUs are
        joined as in the vendor's own systems, others by 1 Gbit/s; where yours have
        other links, describe them in a file: `from_yaml`.

        Args:
          devices: Devices of one kind; all by default.

        Raises:
          ArgumentError: `devices` is not a list of devices of one kind.

        >>> Machine.from_devices().num_devices
        8
        """
        found = jax_devices() if devices is None else listed_devices(devices)
        kinds = sorted({device.device_kind for device in found})
        if len(kinds) > 1:
            raise ArgumentError(
                f"`devices` must be of one kind, got {', '.join(kinds)}. Pass those of "
                "one."
            )
        entry = entry_of(kinds[0]) or {}
        by_process = [device.process_index for device in found]
        counts = [by_process.count(process) for process in sorted({*by_process})]
        links = _torus_of(found, entry) if "torus" in entry else None
        machine = cls(
            name=kinds[0],
            num_devices=len(found),
            links=links or _host_links(counts, **_between(entry, counts)),
            hardware=hardware_of(kinds[0]),
            hosts=tuple(Host(address="", num_devices=count) for count in counts),
        )
        kept = kept_calibration(kinds[0], counts[0])
        return machine if kept is None else machine.calibrated(kept)

    @classmethod
    def from_topology(cls, topology: str, *, slices: int = 1) -> "Machine":
        """Return a machine that need not be there, with its published figures.

        Args:
          topology: `"v5e:16x16"`: a slice of TPUs, by its chips. `"h100:4x8"`: hosts,
            and GPUs in each. Names are those of `hardware.toml`.
          slices: Number of such slices, or clusters, joined by the network.

        Raises:
          ArgumentError: There is no such device or topology, or no figure of its links
            is published.

        >>> machine = Machine.from_topology("v5e:16x16")
        >>> machine.num_devices, machine.links[0].level
        (256, 'torus')
        """
        check_text("topology", topology)
        check_count("slices", slices)
        name, _, shape = topology.partition(":")
        entry = _known(name, topology)
        sizes = _sizes(shape)
        if "torus" in entry:
            links = _torus_links(entry, _checked_slice(entry, sizes, topology))
        else:
            counts = _checked_hosts(entry, sizes, topology)
            links = _host_links(counts, **_between(entry, counts))
        devices = links[-1].devices if links else 1
        if slices > 1:
            links = (*links, _between_slices(entry, devices, slices, topology))
        return cls(
            name=topology if slices == 1 else f"{slices} x {topology}",
            num_devices=devices * slices,
            links=links,
            hardware=hardware_from(entry),
        )

    @property
    def devices_per_host(self) -> int:
        """Number of devices side by side that faster links than the network join.

        >>> Machine.from_topology("h100:4x8").devices_per_host
        8
        """
        inside = [link.devices for link in self.links if link.level != "network"]
        return max(inside, default=1)

    def with_figures_of(self, other: "Machine") -> "Machine":
        """Return this machine with devices as those of another, inside a host, too.

        Args:
          other: For example `Machine.from_devices()` on one of its hosts.
        """
        inside = {link.level: link for link in other.links if link.level == "host"}
        links = tuple(
            replace(
                link,
                bytes_per_s=inside[link.level].bytes_per_s,
                latency_s=inside[link.level].latency_s,
            )
            if link.level in inside
            else link
            for link in self.links
        )
        return replace(self, links=links, hardware=other.hardware)

    def calibrated(self, measured: Calibration) -> "Machine":
        """Return this machine with what was measured on one of its hosts."""
        links = tuple(
            replace(
                link,
                bytes_per_s=measured.host_bytes_per_s or link.bytes_per_s,
                latency_s=measured.host_latency_s,
            )
            if link.level == "host"
            else link
            for link in self.links
        )
        hardware = Hardware(
            name=self.name,
            flops_per_s=measured.flops_per_s,
            memory_bytes=self.hardware.memory_bytes if self.hardware else None,
            memory_bytes_per_s=measured.memory_bytes_per_s,
            source="replicator devices --calibrate",
        )
        return replace(self, links=links, hardware=hardware)


Entry = Mapping[str, Any]
"""An entry of the file of figures."""


def _host_links(
    counts: Sequence[int], *, host: Entry, network_bytes_per_s: float
) -> tuple[Link, ...]:
    """Return the links of hosts with so many devices each."""
    links = []
    latency_s = published()["latency_s"]
    # Where hosts are unequal, blocks of this size lie inside one.
    inside = math.gcd(*counts)
    if inside > 1:
        links.append(
            Link(
                level="host",
                devices=inside,
                bytes_per_s=host.get("bytes_per_s", math.inf),
                latency_s=latency_s["host"] if host else 0.0,
            )
        )
    if len(counts) > 1:
        links.append(
            Link(
                level="network",
                devices=sum(counts),
                bytes_per_s=network_bytes_per_s,
                latency_s=latency_s["network"],
                shared_by=max(counts),
            )
        )
    return tuple(links)


def _between(entry: Entry, counts: Sequence[int]) -> dict[str, Any]:
    share = entry.get("network", {}).get("bytes_per_s")
    default = Host(address="", num_devices=1).network_bytes_per_s
    return {
        "host": entry.get("host", {}),
        "network_bytes_per_s": default if share is None else share * min(counts),
    }


def _torus_links(entry: Entry, chips: tuple[int, ...]) -> tuple[Link, ...]:
    torus, cores = entry["torus"], entry.get("devices_per_chip", 1)
    closed = [size >= torus["wraps_from"] for size in chips]
    # A 3-D slice below a whole cube is closed in no dimension.
    is_open = torus["dimensions"] == 3 and not all(closed)
    link = Link(
        level="torus",
        devices=math.prod(chips) * cores,
        bytes_per_s=torus["bytes_per_s"],
        latency_s=published()["latency_s"]["torus"],
        shared_by=cores,
        torus=chips,
        wraps=tuple(one and not is_open for one in closed),
    )
    if cores == 1:
        return (link,)
    # Cores of a chip pass values through its memory.
    inside = Link(level="chip", devices=cores, bytes_per_s=entry["memory_bytes_per_s"])
    return (inside, link) if math.prod(chips) > 1 else (inside,)


def _between_slices(entry: Entry, inner: int, slices: int, topology: str) -> Link:
    if "network" not in entry:
        raise ArgumentError(
            f"`slices` must be 1 for {topology}, whose network has no published "
            f"figure, got {slices}. Describe the hosts in a file: `Machine.from_yaml`."
        )
    return Link(
        level="network",
        devices=inner * slices,
        bytes_per_s=entry["network"]["bytes_per_s"] * inner,
        latency_s=published()["latency_s"]["network"],
        shared_by=inner,
    )


def _torus_of(devices: Sequence[Device], entry: Entry) -> tuple[Link, ...] | None:
    """Return the links of TPUs that are there; None if they form no whole torus."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    coords = {
        (getattr(each, "slice_index", 0), tuple(each.coords))
        for each in devices
        if getattr(each, "coords", None) is not None
    }
    if not coords:
        return None
    columns = list(zip(*(place for _, place in coords), strict=True))
    extents = [max(column) - min(column) + 1 for column in columns]
    dimensions = entry["torus"]["dimensions"]
    # JAX lists devices by x first: it is the last dimension.
    chips = tuple(reversed(extents[:dimensions]))
    cores = entry.get("devices_per_chip", 1)
    if math.prod(extents) * len(slices) * cores != len(devices):
        return None
    links = _torus_links(entry, chips)
    if len(slices) > 1:
        inner = links[-1].devices
        links = (*links, _between_slices(entry, inner, len(slices), "these TPUs"))
    return links


def _known(name: str, topology: str) -> Entry:
    entries = {each["name"]: each for each in published()["device"]}
    linked = {n: e for n, e in entries.items() if "torus" in e or "host" in e}
    if name not in linked:
        raise ArgumentError(
            "`topology` must begin with a device whose links are published, got "
            f"{topology!r}. Use one of {', '.join(linked)}: `v5e:4x4`, `h100:2x8`."
        )
    return linked[name]


def _sizes(shape: str) -> tuple[int, ...]:
    parts = shape.split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        return ()
    return tuple(int(part) for part in parts)


def _checked_slice(
    entry: Entry, sizes: tuple[int, ...], topology: str
) -> tuple[int, ...]:
    torus = entry["torus"]
    known = [_sizes(each) for each in torus["slices"]]
    if sizes in known:
        return sizes
    largest = torus.get("largest", 0)
    is_cube = len(sizes) == 3 and all(size and size % 4 == 0 for size in sizes)
    if largest and is_cube and math.prod(sizes) <= largest:
        return sizes
    cubes = f", or AxBxC of multiples of 4, up to {largest} chips" if largest else ""
    raise ArgumentError(
        f"`topology` must be a slice of {entry['name']} that exists, got "
        f"{topology!r}. Use one of {', '.join(torus['slices'])}{cubes}."
    )


def _checked_hosts(entry: Entry, sizes: tuple[int, ...], topology: str) -> list[int]:
    """Return the number of devices of each host."""
    most = entry["host"]["most"]
    if len(sizes) not in (1, 2) or not all(sizes) or sizes[-1] > most:
        raise ArgumentError(
            "`topology` must be a number of hosts and of GPUs in each, at most "
            f"{most}, got {topology!r}. Write `{entry['name']}:{most}` or "
            f"`{entry['name']}:2x{most}`."
        )
    if math.prod(sizes[:-1]) > 1 and "network" not in entry:
        raise ArgumentError(
            f"`topology` must be one host of {entry['name']}, whose network has no "
            f"published figure, got {topology!r}. Describe the hosts in a file: "
            "`Machine.from_yaml`."
        )
    return [sizes[-1]] * math.prod(sizes[:-1])
