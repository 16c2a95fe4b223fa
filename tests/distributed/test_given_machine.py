"""The machine of a replicator: what strategies take from it, and where it is from."""

import jax.numpy as jnp
import pytest

from replicator import Replicator, strategies
from replicator.base.mesh import replica_mesh
from replicator.distributed.given_machine import MACHINE_VARIABLE, find_machine
from replicator.engine.make_step import rules_of
from replicator.strategies import Machine, Rule
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.search import Choosing, ChoosingOptions
from replicator.tuning.choosing.subject import Subject

NODE = "{{address: {}, cpus: [0, 1, 2, 3], chief: {}}}"
CLUSTER = f"nodes: [{NODE.format('a', 'yes')}, {NODE.format('b', 'no')}]"
BY_HOSTS = [Rule(pattern="*", synchronise="hierarchical")]


def devices_per_host(rep):
    """Return the size of hosts by which a replicator adds up gradients."""
    rules = rules_of(rep.layout)
    assert rules is not None
    return rules.devices_per_host


def test_hybrid_has_its_pieces_on_the_devices_of_a_host():
    rep = Replicator(strategy=strategies.hybrid(), machine=CLUSTER)
    assert dict(rep.mesh.shape) == {"replica": 2, "shard": 4, "model": 1}


def test_a_number_of_ones_own_counts_before_the_machine():
    rep = Replicator(strategy=strategies.hybrid(shard=2), machine=CLUSTER)
    assert rep.mesh.shape["shard"] == 2
    summed = strategies.data_parallel(BY_HOSTS, devices_per_host=2)
    rep = Replicator(strategy=summed, machine=CLUSTER)
    assert devices_per_host(rep) == 2


def test_sums_by_hosts_have_the_devices_of_a_host():
    summed = strategies.data_parallel(BY_HOSTS)
    rep = Replicator(strategy=summed, machine=CLUSTER)
    assert devices_per_host(rep) == 4


def test_a_builder_of_ones_own_may_leave_the_number_open():
    def mine(variables, devices):
        return strategies.hybrid(whole_below_bytes=0)

    rep = Replicator(strategy=mine, machine=Machine.from_yaml(CLUSTER))
    rep.init(lambda key: {"w": jnp.zeros(8)})
    assert rep.mesh.shape["shard"] == 4


def test_a_host_has_no_more_than_the_devices_that_are_used():
    rep = Replicator(2, strategy=strategies.hybrid(), machine=CLUSTER)
    assert rep.mesh.shape["shard"] == 2


def test_a_file_is_read_as_its_text(tmp_path):
    path = tmp_path / "cluster.yml"
    path.write_text(CLUSTER)
    wanted = Machine.from_yaml(CLUSTER)
    assert find_machine(path, 8) == find_machine(str(path), 8) == wanted
    assert find_machine(CLUSTER, 8) == find_machine(wanted, 8) == wanted


def test_without_one_it_is_what_the_launcher_was_given(monkeypatch):
    assert find_machine(None, 8) is None
    monkeypatch.setenv(MACHINE_VARIABLE, CLUSTER)
    assert find_machine(None, 8) == Machine.from_yaml(CLUSTER)


def test_nodes_whose_devices_a_file_does_not_list_describe_nothing(monkeypatch):
    monkeypatch.setenv(MACHINE_VARIABLE, "nodes: [{address: a}]")
    assert find_machine(None, 8) is None


@pytest.mark.parametrize(
    ("machine", "devices"),
    [
        (Machine.from_topology("h100:8"), 8),
        (Machine.from_topology("h100:4x8"), 8),
        (Machine.from_topology("v5e:4x4", slices=2), 16),
        (Machine.from_yaml("nodes: [{address: a}]"), 1),
    ],
)
def test_devices_of_a_host_are_joined_by_faster_links_than_the_network(
    machine, devices
):
    assert machine.devices_per_host == devices


def machine_of_a_choice(devices, **options):
    mesh = replica_mesh(devices)
    decision = Decision(mesh, "auto", "fast", machine=CLUSTER)
    subject = Subject(
        step_fn=lambda s, b: (s, {}), init_fn=None, batch={}, decision=decision
    )
    return Choosing(subject, mesh, ChoosingOptions(**options)).machine


@pytest.mark.parametrize(
    ("devices", "levels"),
    [
        (8, [("host", 4), ("network", 8)]),
        (6, [("host", 2), ("network", 6)]),
        (4, [("host", 4)]),
        (1, []),
    ],
)
def test_a_choice_has_the_levels_of_the_machine_that_join_its_devices(devices, levels):
    found = machine_of_a_choice(devices)
    assert found.num_devices == devices
    assert [(link.level, link.devices) for link in found.links] == levels


def test_a_machine_of_the_choice_counts_before_that_of_the_replicator():
    mine = Machine.from_devices()
    assert machine_of_a_choice(8, machine=mine) == mine
