"""Nodes of a machine's file, and the arguments of `launch` beside it."""

import json

import pytest

from replicator.cli.main import main
from replicator.distributed.given_machine import MACHINE_VARIABLE
from replicator.distributed.remote.machine_file import read_hosts
from replicator.errors import ArgumentError
from replicator.strategies import Machine

FAKE = "REPLICATOR_FAKE_DEVICES"


@pytest.fixture
def read(tmp_path):
    """Write a file, and read its nodes."""

    def write(cluster, **options):
        path = tmp_path / "cluster.yml"
        path.write_text(cluster if isinstance(cluster, str) else json.dumps(cluster))
        return read_hosts(str(path), **options)

    return write


def given(host):
    """Return the environment that a file gives a process, without the nodes."""
    return {n: v for n, v in host.environment.items() if n != MACHINE_VARIABLE}


def test_the_chief_is_process_0(read):
    nodes = [{"address": "a"}, {"address": "b", "chief": True}, {"address": "c"}]
    assert [host.address for host in read({"nodes": nodes})] == ["b", "a", "c"]


def test_a_group_of_ssh_is_taken_over(read):
    group = {
        **{"username": "jane", "port": 2222, "key_file": "~/.ssh/key"},
        **{"python_venv": "~/env", "shared_envs": {"A": "$x\n'"}},
    }
    nodes = [{"address": "a", "ssh_config": "g"}]
    [host] = read({"nodes": nodes, "ssh": {"g": group}})
    assert (host.user, host.port, host.key_file) == ("jane", 2222, "~/.ssh/key")
    assert host.python == "~/env/bin/python"
    assert given(host) == {"A": "$x\n'"}


def test_what_the_file_leaves_out_is_left_to_ssh(read):
    [host] = read({"nodes": [{"address": "a"}]})
    assert (host.user, host.port, host.key_file, host.python) == (None,) * 4
    assert given(host) == {}


@pytest.mark.parametrize(
    "text", ["/env", "source /env/bin/activate", ". /env/bin/activate;"]
)
def test_an_environment_is_its_folder_or_what_activates_it(read, text):
    ssh = {"g": {"python_venv": text}}
    [host] = read({"nodes": [{"address": "a", "ssh_config": "g"}], "ssh": ssh})
    assert host.python == "/env/bin/python"


@pytest.mark.parametrize(
    "text", ["conda activate x", "source /a; reboot", "source $(x)/bin/activate"]
)
def test_no_other_command_of_a_shell_is_an_environment(read, text):
    ssh = {"g": {"python_venv": text}}
    with pytest.raises(ArgumentError, match="python_venv"):
        read({"nodes": [{"address": "a", "ssh_config": "g"}], "ssh": ssh})


def test_gpus_are_shown_to_the_process_and_cpus_are_fake_devices(read):
    nodes = [
        {"address": "a", "chief": True, "gpus": [0, 2], "cpus": [0]},
        {"address": "b", "cpus": [0, 1, 2]},
    ]
    first, second = read({"nodes": nodes})
    assert given(first) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert given(second) == {FAKE: "3"}


def test_devices_that_are_asked_for_count_before_the_file(read):
    [host] = read({"nodes": [{"address": "a", "cpus": [0]}]}, devices=4)
    assert given(host) == {FAKE: "4"}


@pytest.mark.parametrize(("devices", "of_a_host"), [(None, 2), (3, 3)])
def test_each_process_can_read_the_nodes_in_the_order_of_their_devices(
    read, devices, of_a_host
):
    nodes = [{"address": "a", "cpus": [0, 1]}, {"address": "b", "cpus": [0, 1]}]
    nodes[1] |= {"chief": True, "network_bandwidth": 0.1}
    for host in read({"nodes": nodes}, devices=devices):
        machine = Machine.from_yaml(host.environment[MACHINE_VARIABLE])
        assert [host.address for host in machine.hosts] == ["b", "a"]
        assert machine.devices_per_host == of_a_host
        assert machine.links[-1].bytes_per_s == 1e8 / 8


def test_how_ssh_reaches_the_nodes_stays_with_the_launcher(read):
    ssh = {"g": {"username": "jane", "shared_envs": {"TOKEN": "abc"}}}
    node = {"address": "a", "ssh_config": "g"}
    [host] = read({"nodes": [node], "ssh": ssh, "device": "NVIDIA A100-SXM4-40GB"})
    described = host.environment[MACHINE_VARIABLE]
    assert "abc" not in described
    assert "jane" not in described
    assert Machine.from_yaml(described).hardware is not None


@pytest.mark.parametrize("where", ["{}", "nodes: {}", "nodes: [{{address: {}}}]"])
def test_tags_of_python_are_refused(read, tmp_path, where):
    tag = f"!!python/object/apply:os.system ['touch {tmp_path}/won']"
    with pytest.raises(ArgumentError, match="YAML"):
        read(where.format(tag))
    assert not (tmp_path / "won").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--machine", "m.yml", "--ready"], "`ready` must not be given"),
        (["--machine", "m.yml", "--copy-bytes", "8"], "`copy_bytes` must not be given"),
        (["--machine", "m.yml", "--lost-after", "0"], "`lost_after` must be above 0"),
        (["--machine", "no.yml"], "`machine` must be a file of nodes"),
        (["--machine", "m.yml", "--via", "ssh gate"], "`via` must be a command"),
        (["--processes", "1", "--via", "x"], "`via` must come with `machine`"),
        (["--processes", "1", "--lost-after", "9"], "`lost_after` must come with"),
        (["--processes", "1", "--machine", "m.yml"], "not allowed with"),
        ([], "--processes --machine is required"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    words, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yml").write_text("nodes: [{address: a}]")
    (tmp_path / "train.py").write_text("")
    try:
        code = main(["launch", *words, "train.py"])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert named in capsys.readouterr().err
