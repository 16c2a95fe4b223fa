"""Programs on Ray: what only Ray can get wrong. The rest is the conformance suite's."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from tests.multiprocess import worker_nodes as nodes
from tests.multiprocess.processes import ROOT
from tests.multiprocess.worker_processes import (
    is_alive,
    of_run,
    wait_file,
    wait_gone,
    wait_until,
)

ray = pytest.importorskip("ray")

from replicator.launchpad_bridge.launchers.on_ray import ray_session  # noqa: E402
from replicator.launchpad_bridge.launchers.on_ray.ray_cluster import Ray  # noqa: E402

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def session():
    session = ray_session.connect(None, {"num_cpus": 4}, insecure=False)
    yield session
    session.close()


class Mirror:
    def turn(self, array):
        return array[::-1].copy()


def tell_then_wait(path):
    print("last words")
    nodes.tell(path, f"{os.getpid()} {os.getppid()}")
    lp.wait_for_stop()


def launch(nodes_by_label, tmp_path, launcher=None, **options):
    program = lp.Program("tried")
    for label, node in nodes_by_label.items():
        program.add_node(node, label=label)
    return lp.launch(program, launcher or Ray(), log_dir=tmp_path / "logs", **options)


def test_a_killed_node_is_named_with_its_signal_and_last_lines(session, tmp_path):
    node = lp.PyNode(tell_then_wait, tmp_path / "pids")
    run = launch({"node": node}, tmp_path)
    pid = int(wait_file(tmp_path / "pids").split()[0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        lp.NodeFailedError, match="`node` was killed by SIGKILL"
    ) as told:
        run.wait(TIMEOUT_S)
    assert "    last words" in str(told.value)


def actor_above(pid):
    """Return the process of Ray above a worker, its guard and its fork server."""
    while not command(pid).startswith("ray::"):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid


def command(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def test_a_node_whose_actor_dies_is_named_and_dies_with_it(session, tmp_path):
    run = launch({"node": lp.PyNode(tell_then_wait, tmp_path / "pids")}, tmp_path)
    pid = int(wait_file(tmp_path / "pids").split()[0])
    actor = actor_above(pid)
    os.kill(actor, signal.SIGKILL)
    words = rf"`node` is lost, as its actor died \(process {actor} on .*: Worker unexp"
    with pytest.raises(lp.NodeFailedError, match=words) as told:
        run.wait(TIMEOUT_S)
    assert len(str(told.value).splitlines()) == 2
    wait_until(lambda: not is_alive(pid))


def test_an_actor_that_cannot_start_its_node_says_why(session, tmp_path):
    run = launch({"node": lp.PyNode(print)}, tmp_path)
    (tmp_path / "logs").rmdir()  # before the actor, whose process starts for seconds
    (tmp_path / "logs").write_text("no folder")
    with pytest.raises(lp.NodeFailedError, match="`node` could not be started") as told:
        run.wait(TIMEOUT_S)
    assert "FileExistsError" in str(told.value)
    assert "\x1b" not in str(told.value)


def test_stopping_a_program_leaves_others_of_the_cluster_alone(session, tmp_path):
    @ray.remote(num_cpus=0)
    class Other:
        def pid(self):
            return os.getpid()

    other = Other.remote()
    pid = ray.get(other.pid.remote())
    with launch({"node": lp.PyNode(nodes.wait_in_program)}, tmp_path):
        pass
    assert ray.get(other.pid.remote()) == pid
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))
    ray.kill(other)


def is_private(path):
    return not path.stat().st_mode & 0o077


def mirror_over_network(mirror):
    """Call a server as from another host: its socket is not on this one."""
    for part in mirror.address.split(","):
        if part.startswith("unix:"):
            path = Path(part[5:])
            # Its server makes it private when it is there, just before it listens.
            wait_until(lambda path=path: path.exists() and is_private(path))
            path.unlink()
    return mirror.turn(np.arange(3)), lp.stop()


def test_nodes_on_other_hosts_are_called_over_the_network(session, tmp_path):
    program = lp.Program("wide")
    mirror = program.add_node(lp.CourierNode(Mirror), label="mirror")
    program.add_node(lp.PyNode(mirror_over_network, mirror), label="caller")
    run = lp.launch(program, Ray(across_hosts=True), log_dir=tmp_path / "logs")
    run.wait(TIMEOUT_S)
    np.testing.assert_array_equal(run.results["caller"][0], [2, 1, 0])


def test_more_than_any_host_has_is_refused_by_name(session, tmp_path):
    with pytest.raises(lp.LaunchError, match=r"`resources` of `node` must fit.*'CPU'"):
        launch(
            {"node": lp.PyNode(print)},
            tmp_path,
            resources={"node": lp.Resources(cpus=1000)},
        )


def test_a_worker_for_which_there_is_no_room_is_given_up_in_time(session, tmp_path):
    program = lp.Program("crowded")
    with program.group("node", resources=lp.Resources(cpus=3)):
        for _ in range(2):
            program.add_node(lp.PyNode(nodes.wait_in_program))
    run = lp.launch(program, Ray(start_timeout_s=5), log_dir=tmp_path / "logs")
    with pytest.raises(lp.NodeFailedError, match="found no room in the cluster"):
        run.wait(TIMEOUT_S)


def test_a_program_none_of_which_finds_room_is_given_up_in_time(session, tmp_path):
    @ray.remote(num_cpus=4)
    class Holder:
        def is_here(self):
            return True

    holder = Holder.remote()
    try:
        assert ray.get(holder.is_here.remote())
        run = launch(
            {"node": lp.PyNode(nodes.wait_in_program)},
            tmp_path,
            Ray(start_timeout_s=5),
            resources={"node": lp.Resources(cpus=3)},
        )
        with pytest.raises(lp.NodeFailedError, match="found no room in the cluster"):
            run.wait(TIMEOUT_S)
    finally:
        ray.kill(holder)


def test_a_cluster_without_tokens_is_refused(session, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(lp.LaunchError, match="must have token authentication"):
        launch({"node": lp.PyNode(print)}, tmp_path)


def listening(pids):
    """Return the hosts at which any of these processes listens."""
    inodes = set()
    for pid in pids:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            inodes.add(os.readlink(entry.path).removeprefix("socket:[")[:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for fields in map(str.split, file.readlines()[1:]):
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(fields[1].rpartition(":")[0])
    return found


LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}


@pytest.fixture
def script(tmp_path):
    command = [sys.executable, "-m", "tests.multiprocess.ray_script", str(tmp_path)]
    # All that descends from it inherits its environment.
    environment = {**os.environ, "MARK_OF_TEST": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, env=environment
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def test_a_ray_of_our_own_goes_with_a_killed_launcher(script, tmp_path):
    told = [wait_file(tmp_path / f"pids-{number}") for number in range(2)]
    pids = [int(pid) for line in told for pid in line.split()]
    actors = [actor_above(pid) for pid in pids[::2]]
    script.kill()
    script.wait()
    wait_until(lambda: not any(map(is_alive, pids + actors)))


@pytest.mark.parametrize("delay_s", [0.5, 2.0, 4.0])
def test_a_launcher_killed_while_its_ray_starts_leaves_nothing(
    script, tmp_path, delay_s
):
    wait_until(lambda: len(of_run(str(tmp_path))) > 1)
    time.sleep(delay_s)  # whatever is happening then
    script.kill()
    script.wait()
    assert wait_gone(str(tmp_path)) == []


def test_a_ray_of_our_own_listens_to_this_host_only(script, tmp_path):
    pid = int(wait_file(tmp_path / "pids-0").split()[0])
    with open(f"/proc/{actor_above(pid)}/stat") as file:
        raylet = int(file.read().rpartition(")")[2].split()[1])
    assert listening([script.pid, raylet, actor_above(pid)]) <= LOOPBACK


def test_where_all_is_on_one_host_ray_never_has_the_secret(session, tmp_path):
    node = lp.PyNode(tell_then_wait, tmp_path / "pids")
    run = launch({"node": node}, tmp_path)
    wait_file(tmp_path / "pids")
    secret = (run.plan.folder / "secret").read_bytes()
    recipe_of = run.plan.run_id.encode()  # what Ray does hold, of the same task
    found = [memory_holds(pid, secret, recipe_of) for pid in ray_processes()]
    run.stop()
    run.wait(TIMEOUT_S)
    assert not any(has_secret for has_secret, _ in found)
    assert any(has_task for _, has_task in found)


def ray_processes():
    """List what stores and carries the objects of Ray, but for workers."""
    names = [(path, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [
        int(path.parent.name)
        for path, words in names
        if words.split(b"\0")[0].rpartition(b"/")[2] in (b"gcs_server", b"raylet")
    ]


def memory_holds(pid, *sought):
    """Tell which bytes lie in the memory that a process writes to."""
    found = [False] * len(sought)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(each, 16) for each in place.split("-"))
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(start)
                    data = memory.read(end - start)
                    found = [
                        was or each in data
                        for was, each in zip(found, sought, strict=True)
                    ]
    return found
