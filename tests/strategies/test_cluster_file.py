"""Cluster files of AutoDist's kind: all keys, and each mistake with its line."""

import pytest

from replicator.errors import ArgumentError
from replicator.strategies.cluster_file import Ssh, read_cluster, write_cluster

WHOLE = """
nodes:
  - address: 10.0.0.1
    gpus: [0, 1, 3]
    chief: true
    cpus: [0]
    network_bandwidth: 12.5
  - address: node-2.cluster
    gpus: [2, 0]
    ssh_config: workers
ssh:
  workers:
    username: ubuntu
    port: 2222
    key_file: /keys/id with blank
    python_venv: source ~/env/bin/activate
    shared_envs: {A: 'x y', B: 0644, C: yes, D: "$HOME\\n"}
"""


def test_all_keys_of_autodist_are_read():
    [first, second], kind = read_cluster(WHOLE)
    assert kind == ""
    assert (first.address, first.gpus, first.is_chief) == ("10.0.0.1", (0, 1, 3), True)
    assert (first.num_devices, first.cpus, first.ssh) == (3, (0,), None)
    assert first.network_bytes_per_s == 12.5e9 / 8
    assert (second.is_chief, second.network_bytes_per_s) == (False, 1e9 / 8)
    assert second.ssh == Ssh(
        username="ubuntu",
        port=2222,
        key_file="/keys/id with blank",
        python_venv="source ~/env/bin/activate",
        shared_envs=(("A", "x y"), ("B", "0644"), ("C", "yes"), ("D", "$HOME\n")),
    )


def test_the_only_node_is_the_chief_and_may_be_the_loopback():
    [host], _ = read_cluster("nodes: [{address: localhost, cpus: [0, 1]}]")
    assert host.is_chief
    assert host.num_devices == 2


def test_a_node_without_devices_has_one():
    [host], _ = read_cluster("nodes: [{address: a}]")
    assert host.num_devices == 1


def test_the_kind_of_the_devices_is_read():
    assert read_cluster("device: Tesla T4\nnodes: [{address: a}]")[1] == "Tesla T4"


TWO = "nodes:\n- {address: a, chief: true}\n- {address: b, "


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nodes: [", "must be YAML"),
        ("nodes: &a [*a]", "got something else in line 1"),
        ("!!python/object/apply:os.system ['true']", "must be YAML"),
        ("nodes:\n- address: !!python/name:os.system ''", "must be YAML"),
        ("{" * 1100, "must be YAML"),
        ("", "fields of a cluster, got something else in line 1"),
        ("nodes: []", "`nodes` must list the nodes"),
        ("nodes: {address: a}", "`nodes` must list the nodes"),
        ("nodes:\n- {address: a, gpu: [0]}", "got 'gpu' in line 2"),
        ("nodes:\n- {[a]: b}", "found unhashable key"),
        ("nodes:\n- {address: a}\nnode: 1", "got 'node' in line 3"),
        ("nodes:\n- {gpus: [0]}", "'address', got a node without it in line 2"),
        (TWO + "chief: true}", "be true once, as in line 2, got 'true' in line 3"),
        ("nodes:\n- address: a\n- address: b", "one chief, got 2 nodes without one"),
        (TWO.replace("b", "localhost") + "}", "got 'localhost' in line 3"),
        (TWO.replace("b", "127.0.0.2") + "}", "got '127.0.0.2' in line 3"),
        (TWO.replace("b", "127.1") + "}", "got '127.1' in line 3"),
        (TWO.replace("b", "localhost.") + "}", "got 'localhost.' in line 3"),
        (TWO.replace("b", "'::ffff:127.0.0.1'") + "}", "got '::ffff:127.0.0.1' in"),
        (TWO.replace("b", "'::1'") + "}", "got '::1' in line 3"),
        (TWO.replace("b", "0.0.0.0") + "}", "got '0.0.0.0' in line 3"),
        (TWO.replace("b", "a") + "}", "as that of line 2, got 'a' in line 3"),
        (TWO + "ssh_config: c}", "group below `ssh`, got 'c' in line 3. Add it."),
        (TWO + "ssh_config: c}\nssh: {d: }", "something else in line 4"),
        (TWO + "ssh_config: c}\nssh: {d: {port: 1}}", "Use one of d."),
        (TWO + "chief: maybe}", "be true or false, got 'maybe' in line 3"),
        (TWO + "network_bandwidth: 0}", "above 0, got '0' in line 3"),
        (TWO + "network_bandwidth: .nan}", "above 0, got '.nan' in line 3"),
        (TWO + "network_bandwidth: [1]}", "above 0, got something else in line 3"),
        (TWO + "gpus: 2}", "list numbers of devices, got '2' in line 3"),
        (TWO + "gpus: [-1]}", "be of whole numbers, got '-1' in line 3"),
        (TWO + "gpus: [1, 1]}", "name each device once"),
        (TWO.replace("b", "'-oProxyCommand=x'") + "}", "begin with no -"),
        (TWO.replace("b", "'b; reboot'") + "}", "begin with no -, got 'b; reboot'"),
        (TWO.replace("b", "") + "}", "begin with no -"),
        (TWO + "}\nssh: {w: {port: 0}}", "between 1 and 65535, got '0' in line 4"),
        (TWO + "}\nssh: {w: {port: a}}", "whole numbers, got 'a' in line 4"),
        (TWO + "}\nssh: {w: {username: -l x}}", "begin with no -, got '-l x'"),
        (TWO + "}\nssh: {w: {user: x}}", "got 'user' in line 4"),
        (TWO + "}\nssh: {w: {key_file: [x]}}", "be a text"),
        (TWO + "}\nssh: {w: {shared_envs: {A: [1]}}}", "be a text"),
        (TWO + "}\nssh: {w: {port: 1, port: 2}}", "got 'port' again"),
    ],
)
def test_a_mistake_is_refused_with_its_line(text, names):
    with pytest.raises(ArgumentError) as caught:
        read_cluster(text)
    assert names in str(caught.value)


def test_what_is_written_is_read_back():
    text = """
    device: Tesla T4
    nodes:
      - {address: "[fe80::1]", chief: true, gpus: [0, 2], network_bandwidth: 12.5}
      - {address: b, cpus: [0, 1, 2]}
      - {address: c}
    """
    hosts, kind = read_cluster(text)
    assert read_cluster(write_cluster(hosts, kind)) == (hosts, kind)
