"""Read a cluster's file: nodes, their devices and how ssh reaches them.

The keys are those of AutoDist's `resource_spec.yml` (Petuum 2020), and one more, the
kind of the devices. Nothing in the file is executed; errors name the line.

    device: NVIDIA A100-SXM4-40GB      # as in `jax.Device.device_kind`; may be left out
    nodes:
      - address: 10.0.0.1              # host name or IP address
        chief: true                    # one of them, unless there is only one
        gpus: [0, 1, 2, 3]             # or `cpus`, where a node has no GPU
        network_bandwidth: 50          # Gbit/s; 1 by default
      - address: 10.0.0.2
        gpus: [0, 1, 2, 3]
        network_bandwidth: 50
        ssh_config: workers            # a group below; the user's own settings without
    ssh:
      workers:
        username: ubuntu
        port: 22
        key_file: ~/.ssh/id_ed25519
        python_venv: source ~/env/bin/activate
        shared_envs: {NCCL_DEBUG: WARN}
"""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from replicator.errors import ArgumentError, check_text
from replicator.strategies.text import line_of, mapping_of

_BITS_PER_S = 1e9 / 8  # bytes of a Gbit
# No blank, no quote, no option: these words stand in a command line of ssh.
_WORD = re.compile(r"[A-Za-z0-9._:@\[\]][A-Za-z0-9._:@\[\]-]*")
_NODE = ("address", "chief", "cpus", "gpus", "ssh_config", "network_bandwidth")
_SSH = ("username", "port", "key_file", "python_venv", "shared_envs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ssh:
    """Settings with which ssh reaches a host; empty ones are the user's own.

    Attributes:
      username: Name of the user there.
      port: Port of its ssh server; None for the user's own setting.
      key_file: Path of the private key.
      python_venv: Shell command that comes before Python: it activates an environment.
      shared_envs: Environment variables of its processes.
    """

    username: str = ""
    port: int | None = None
    key_file: str = ""
    python_venv: str = ""
    shared_envs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host of a machine.

    Attributes:
      address: Its name or IP address; empty if it is not known.
      num_devices: Number of its devices that run a replica.
      gpus: Numbers of the GPUs that it gives; empty for all, or for other devices.
      cpus: Numbers of the CPUs that are devices where it has no GPU.
      is_chief: Whether the first process runs there, whose address all others meet at.
      ssh: Settings with which ssh reaches it; None for the user's own.
      network_bytes_per_s: Bytes that it sends to other hosts a second.
    """

    address: str
    num_devices: int
    gpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    is_chief: bool = False
    ssh: Ssh | None = None
    network_bytes_per_s: float = _BITS_PER_S


def read_cluster(text: str) -> tuple[tuple[Host, ...], str]:
    """Return the hosts of a cluster's file, and the kind of their devices.

    Args:
      text: YAML, as above.

    Returns:
      The hosts in their order; the kind is empty if the file does not name it.

    Raises:
      ArgumentError: It is not YAML, a key is unknown, a value breaks its rule, there is
        not exactly one chief, several nodes share an address or one of several is the
        loopback, or an ssh group is not there; the line is named.

    >>> hosts, kind = read_cluster("nodes: [{address: localhost, gpus: [0, 1]}]")
    >>> hosts[0].num_devices, hosts[0].is_chief
    (2, True)
    """
    check_text("text", text)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        yaml.safe_load(text)  # refuses tags of Python's
    except (yaml.YAMLError, RecursionError) as failure:
        raise ArgumentError(
            f"`text` must be YAML, got text that is not: {failure}. Mend that line."
        ) from failure
    found = mapping_of(root, ("nodes", "ssh", "device"), "cluster", ("nodes",))
    groups = _groups(found.get("ssh"))
    nodes = found["nodes"]
    if not isinstance(nodes, yaml.SequenceNode) or not nodes.value:
        _refuse("nodes", "list the nodes", nodes, "Write `- address: ...` below it.")
    rows = [mapping_of(each, _NODE, "node", ("address",)) for each in nodes.value]
    _check_addresses(rows)
    chief = _chief(rows, nodes)
    hosts = tuple(
        _host(row, groups, is_chief=number == chief) for number, row in enumerate(rows)
    )
    return hosts, _text("device", found["device"]) if "device" in found else ""


def write_cluster(hosts: Sequence[Host], kind: str) -> str:
    """Write hosts and the kind of their devices as `read_cluster` reads them.

    How ssh reaches them is left out: it is the launcher's affair alone.

    >>> text = write_cluster([Host(address="a", num_devices=2, gpus=(0, 1))], "")
    >>> text
    '{"nodes": [{"address": "a", "chief": false, "network_bandwidth": 1.0, \
"gpus": [0, 1]}]}'
    """
    nodes = []
    for host in hosts:
        bandwidth = host.network_bytes_per_s / _BITS_PER_S
        node: dict[str, Any] = {"address": host.address, "chief": host.is_chief}
        node["network_bandwidth"] = bandwidth
        for name in ("gpus", "cpus"):
            if numbers := getattr(host, name):
                node[name] = list(numbers)
        nodes.append(node)
    # JSON is YAML.
    return json.dumps({"nodes": nodes} | ({"device": kind} if kind else {}))


_Row = dict[str, yaml.Node]


def _host(row: _Row, groups: Mapping[str, Ssh], *, is_chief: bool) -> Host:
    gpus, cpus = (
        _numbers(name, row[name]) if name in row else () for name in ("gpus", "cpus")
    )
    ssh = None
    if (named := row.get("ssh_config")) is not None:
        if (group := _text("ssh_config", named)) not in groups:
            remedy = f"Use one of {', '.join(groups)}." if groups else "Add it."
            _refuse("ssh_config", "name a group below `ssh`", named, remedy)
        ssh = groups[group]
    bandwidth = 1.0
    if (given := row.get("network_bandwidth")) is not None:
        bandwidth = _number("network_bandwidth", given, "be a speed in Gbit/s above 0")
    return Host(
        address=_word("address", row["address"]),
        # A node without any device named has one: its CPU.
        num_devices=len(gpus) or len(cpus) or 1,
        gpus=gpus,
        cpus=cpus,
        is_chief=is_chief,
        ssh=ssh,
        network_bytes_per_s=bandwidth * _BITS_PER_S,
    )


def _groups(node: yaml.Node | None) -> dict[str, Ssh]:
    if node is None:
        return {}
    return {
        name: _ssh(mapping_of(each, _SSH, "group", ()))
        for name, each in mapping_of(node, None, "group", ()).items()
    }


def _ssh(row: _Row) -> Ssh:
    texts = {
        name: _text(name, row[name])
        for name in ("key_file", "python_venv")
        if name in row
    }
    if "username" in row and _text("username", row["username"]):
        texts["username"] = _word("username", row["username"])
    port = None
    if "port" in row:
        [port] = _whole("port", [row["port"]])
        if not 1 <= port <= 65535:
            _refuse("port", "be between 1 and 65535", row["port"], "Use 22.")
    variables = ()
    if "shared_envs" in row:
        named = mapping_of(row["shared_envs"], None, "environment", ())
        # As it is written: `0644`, `yes` and `1.0` stay what they are.
        variables = tuple((name, _text(name, each)) for name, each in named.items())
    return Ssh(port=port, shared_envs=variables, **texts)


def _check_addresses(rows: list[_Row]) -> None:
    seen: dict[str, yaml.Node] = {}
    for row in rows:
        node = row["address"]
        address = _word("address", node)
        if len(rows) > 1 and _is_loopback(address):
            _refuse(
                "address",
                "be one that the other nodes reach",
                node,
                "Write its name or IP address in the network.",
            )
        if address in seen:
            _refuse(
                "address",
                f"be another for each node, as that of line {line_of(seen[address])}",
                node,
                "Leave one of the nodes out.",
            )
        seen[address] = node


def _is_loopback(address: str) -> bool:
    name = address.rpartition("@")[2].strip("[].").lower().removeprefix("::ffff:")
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        # `127.1` is no address in Python, but one to a resolver.
        return bool(re.fullmatch(r"(.+\.)?localhost|127(\.\d+)*", name))
    return found.is_loopback or found.is_unspecified


def _chief(rows: list[_Row], nodes: yaml.Node) -> int:
    chiefs = [
        number
        for number, row in enumerate(rows)
        if "chief" in row and _flag("chief", row["chief"])
    ]
    if len(chiefs) > 1:
        node = rows[chiefs[1]]["chief"]
        first = line_of(rows[chiefs[0]]["chief"])
        _refuse("chief", f"be true once, as in line {first}", node, "Leave it out.")
    if not chiefs and len(rows) > 1:
        raise ArgumentError(
            f"`nodes` must have one chief, got {len(rows)} nodes without one in line "
            f"{line_of(nodes)}. Write `chief: true` below the one that launches."
        )
    return chiefs[0] if chiefs else 0


def _text(name: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        _refuse(name, "be a text", node, "Put it in quotes.")
    return "" if node.tag.endswith(":null") else node.value


def _word(name: str, node: yaml.Node) -> str:
    if not _WORD.fullmatch(word := _text(name, node)):
        rule = "be of letters, digits and . _ : @ [ ] -, and begin with no -"
        _refuse(name, rule, node, "Write for example `10.0.0.1`.")
    return word


def _flag(name: str, node: yaml.Node) -> bool:
    if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(":bool"):
        _refuse(name, "be true or false", node, "Write `true`.")
    return node.value.lower() in ("true", "yes", "on")


def _number(name: str, node: yaml.Node, rule: str) -> float:
    remedy = "Write for example `50`."
    if not isinstance(node, yaml.ScalarNode):
        _refuse(name, rule, node, remedy)
    try:
        number = float(node.value)
    except ValueError:
        _refuse(name, rule, node, remedy)
    if not 0 < number < float("inf"):
        _refuse(name, rule, node, remedy)
    return number


def _numbers(name: str, node: yaml.Node) -> tuple[int, ...]:
    if not isinstance(node, yaml.SequenceNode):
        _refuse(name, "list numbers of devices", node, "Write `[0, 1]`.")
    found = _whole(name, node.value)
    if len(set(found)) < len(found):
        _refuse(name, "name each device once", node, "Leave one out.")
    return found


def _whole(name: str, nodes: list[yaml.Node]) -> tuple[int, ...]:
    for node in nodes:
        is_scalar = isinstance(node, yaml.ScalarNode)
        if not is_scalar or not re.fullmatch(r"\d{1,9}", node.value):
            _refuse(name, "be of whole numbers", node, "Write for example `0`.")
    return tuple(int(node.value) for node in nodes)


def _refuse(name: str, rule: str, node: yaml.Node, remedy: str) -> NoReturn:
    is_scalar = isinstance(node, yaml.ScalarNode)
    value = repr(node.value) if is_scalar else "something else"
    raise ArgumentError(
        f"`{name}` must {rule}, got {value} in line {line_of(node)}. {remedy}"
    )
