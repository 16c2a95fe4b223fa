"""`replicator launch --machine` over a real sshd, and over a cable that is cut."""

import json
import pathlib
import queue
import signal
import socket
import sys

import pytest

from benchmarks import namespaces
from benchmarks.runs import ssh_server
from benchmarks.runs.ssh_server import SshServer
from replicator.distributed.processes.ports import free_port
from replicator.distributed.remote.bundle import remote_command
from replicator.distributed.remote.member import HostMember
from replicator.distributed.remote.remote_host import RemoteHost, connection
from tests.distributed.processes.launched import LONG_S, Launched, kill, script
from tests.multiprocess.test_launch_jax import JOIN
from tests.multiprocess.worker_processes import wait_dead

pytestmark = pytest.mark.slow

FOREVER = "\nprint('ready', attempt)\nwhile True: signal.pause()\n"
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An sshd of this host, which the names `a` and `b` lead to."""
    try:
        with SshServer(tmp_path_factory.mktemp("sshd")) as server:
            yield server
    except ssh_server.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def configured(server):
    server.write_client("a", "b", socket.gethostname())
    server.know((server.folder / "host_key.pub").read_text())


def machine(folder, addresses=("a", "b"), **variables):
    """Write a machine's file, the first of whose nodes is the chief."""
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables}
    nodes = [
        {"address": address, "chief": not at, "ssh_config": "all"}
        for at, address in enumerate(addresses)
    ]
    path = folder / "cluster.yml"  # JSON is YAML
    path.write_text(
        json.dumps({"nodes": nodes, "ssh": {"all": {"shared_envs": variables}}})
    )
    return path


def launched(server, cluster, *words, **environ):
    environ = {**server.environ, **environ}
    return Launched("--machine", cluster, *words, environ=environ)


def wait_gone(pids):
    """Wait, on a busy machine, too, until none of these processes is there."""
    wait_dead(pids, within_s=LONG_S)


def test_a_process_that_dies_on_a_host_restarts_all_on_all_hosts(tmp_path, server):
    train = script(tmp_path, "print('line', rank, file=sys.stderr)" + FOREVER)
    with launched(server, machine(tmp_path), train) as group:
        group.wait_for("ready 0", count=2)
        pids = [group.pid_of(rank) for rank in range(2)]
        kill(pids[1], signal.SIGKILL)
        group.wait_for("ready 1", count=2)
        wait_gone(pids)
        again = [group.pid_of(rank, attempt=1) for rank in range(2)]
        group.tell(signal.SIGTERM)
        assert group.wait() == 128 + signal.SIGTERM
        wait_gone(again)
    assert "process 0 on a, process 1 on b" in group.text
    assert "[1] line 1" in group.text
    assert "process 1 was killed by SIGKILL" in group.text


def test_of_the_environment_only_shared_envs_arrive(tmp_path, server):
    awkward = {"JSON": '{"a": "$HOME"}', "LINES": "a\n'b'", "EMPTY": ""}
    train = script(
        tmp_path,
        "import json\n"
        "path = os.path.join(sys.argv[1], f'got-{rank}')\n"
        "json.dump([sys.argv[2:], dict(os.environ)], open(path, 'w'))",
    )
    words = ["", "--flag=$x", "a\nb", "'\""]
    cluster = machine(tmp_path, **awkward)
    with launched(server, cluster, train, tmp_path, *words, CANARY="x") as group:
        assert group.wait() == 0
    for rank in range(2):
        arguments, environ = json.loads((tmp_path / f"got-{rank}").read_text())
        assert arguments == words
        assert "CANARY" not in environ
        assert {name: environ[name] for name in awkward} == awkward


@pytest.mark.parametrize("victim", ["the launcher", "sshd's processes"])
def test_a_kill_leaves_nothing_on_any_host(tmp_path, server, victim):
    train = script(
        tmp_path,
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('child', subprocess.run(['pgrep', '-P', str(os.getpid())],"
        " capture_output=True, text=True).stdout.split()[0])" + FOREVER,
    )
    words = ("--max-restarts", 0, train)
    with launched(server, machine(tmp_path), *words) as group:
        group.wait_for("ready 0", count=2)
        children = [int(line.split()[-1]) for _, line in group.wait_for("child")]
        pids = [group.pid_of(rank) for rank in range(2)] + children
        if victim == "the launcher":
            kill(group.pid, signal.SIGKILL)
        else:
            for pid in server.sessions():
                kill(pid, signal.SIGKILL)
            assert group.wait() == 1
            assert "is lost: cut off" in group.text
        wait_gone(pids)
        group.wait_until_none_is_left()


@pytest.mark.parametrize("shared", ["", "  ControlMaster auto\n  ControlPath {}/%C"])
def test_the_end_of_one_run_leaves_another_on_its_hosts_alone(tmp_path, server, shared):
    config = server.folder / "config"
    config.write_text(config.read_text() + shared.format(server.folder))
    train = script(tmp_path, FOREVER)
    cluster = machine(tmp_path)
    with launched(server, cluster, train) as one:
        one.wait_for("ready 0", count=2)
        with launched(server, cluster, train) as two:
            two.wait_for("ready 0", count=2)
            one.tell(signal.SIGTERM)
            one.wait()
            wait_gone([one.pid_of(rank) for rank in range(2)])
            two.tell(signal.SIGTERM)
            assert two.wait() == 128 + signal.SIGTERM
    assert "is lost" not in two.text


@pytest.mark.parametrize("trouble", ["no key", "another key", "no login", "no sshd"])
def test_what_ssh_would_ask_for_is_an_error(tmp_path, server, trouble, monkeypatch):
    allowed = server.folder / "authorized_keys"
    key = allowed.read_text()
    if trouble == "no key":
        server.know("")
    elif trouble == "another key":
        server.know((server.folder / "user_key.pub").read_text())
    elif trouble == "no login":
        allowed.write_text("")
    else:
        config = server.folder / "config"
        text = config.read_text()
        config.write_text(text.replace(f"Port {server.port}", f"Port {free_port()}"))
    monkeypatch.setenv("PATH", server.environ["PATH"])
    ends = queue.SimpleQueue()
    HostMember(
        1,
        "b",
        connection(RemoteHost(address="b"), remote_command(sys.executable)),
        {},
        lost_after_s=LONG_S,
        was_used=False,
        folder=tmp_path,
        progress=ends.put,
        signal_asked=lambda: signal.SIGTERM,
        report=ends.put,
    )
    try:
        end = ends.get(timeout=LONG_S)
    finally:
        allowed.write_text(key)
    remedy = {
        "no key": b"compare the fingerprint",
        "another key": b"Somebody may stand in for it",
        "no login": b"Use `ssh-copy-id`",
        "no sshd": b"Start it and its sshd",
    }
    assert remedy[trouble] in end.last_lines[0]
    assert end.comes_again


def test_processes_on_hosts_meet_and_add(tmp_path, server):
    name = socket.gethostname()
    train = script(tmp_path, JOIN)
    with launched(server, machine(tmp_path, (name, "b")), train) as group:
        assert group.wait() == 0
    assert group.text.count("joined 0 3.0") == 2


def test_another_command_may_stand_for_ssh(tmp_path, server):
    train = script(tmp_path, "print('via', os.environ['HOST_NAME'])")
    words = ("--via", "env HOST_NAME={host} sh -c", train)
    with launched(server, machine(tmp_path), *words) as group:
        assert group.wait() == 0
    assert "[0] via a" in group.text
    assert "[1] via b" in group.text


def test_a_host_that_was_cut_off_ends_all_and_takes_part_again(tmp_path):
    train = script(tmp_path, "if attempt: sys.exit()" + FOREVER)
    try:
        with namespaces.Namespaces() as hosts:
            inside = hosts.command(1, [])
            with SshServer(tmp_path, hosts.addresses[1], inside=inside) as server:
                cluster = machine(tmp_path, [hosts.addresses[1]])
                words = [sys.executable, "-m", "replicator.cli", "launch"]
                words += ["--machine", cluster, "--lost-after", 5, train]
                command = hosts.command(0, [*map(str, words)])
                with Launched(command=command, environ=server.environ) as group:
                    pid = group.pid_of(0)
                    group.wait_for("ready 0")
                    hosts.cut(1)
                    wait_gone([pid])
                    group.wait_for("is lost: timed out, silent for 5 s")
                    group.wait_for("starting all processes again")
                    hosts.mend(1)
                    assert group.wait() == 0
    except (namespaces.Unavailable, ssh_server.Unavailable) as reason:
        pytest.skip(str(reason))
    assert "here 1" in group.text
