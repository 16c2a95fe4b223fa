"""Two hosts: network namespaces with a link between them, each with its own name."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid

import pytest

from replicator.distributed.processes.ports import free_port
from tests.distributed.processes.launched import LONG_S
from tests.multiprocess.test_launch_jax import JOIN

pytestmark = pytest.mark.slow

WHERE = """
import os, subprocess, sys, time
attempt, rank = 0, int(os.environ["REPLICATOR_PROCESS_ID"])
"""
LISTENERS = """
listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout
port = ":" + str(group.port)
ours = [line.split()[3] for line in listening.splitlines() if port in line]
print("coordinator listens on", ours, flush=True)
distributed.barrier("looked")
"""


class Hosts:
    """Namespaces `a` and `b`, 10.231.77.1 and .2; gone when the test ends."""

    def __init__(self, folder):
        self._folder = folder
        self._tag = f"rt{uuid.uuid4().hex[:6]}"
        self._started = []

    def __enter__(self):
        a, b = f"{self._tag}a", f"{self._tag}b"
        try:
            ip("netns", "add", a)
            ip("netns", "add", b)
            ip("link", "add", a, "netns", a, "type", "veth", "peer", b, "netns", b)
            for number, name in enumerate((a, b), start=1):
                ip("-n", name, "address", "add", f"10.231.77.{number}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        return self

    def __exit__(self, *error):
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for letter in "ab":
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", self._tag + letter)

    def _on(self, letter):
        return (
            "ip",
            "netns",
            "exec",
            self._tag + letter,
            "unshare",
            "--uts",
            "--mount",
        )

    def cut_the_cable(self):
        ip("-n", f"{self._tag}a", "link", "set", f"{self._tag}a", "down")

    def start(self, letter, script, environ):
        """Run a script on a host, whose own name stands for its own address."""
        names = self._folder / f"hosts-{letter}"
        lines = "127.0.0.1 localhost\n10.231.77.1 host-a\n10.231.77.2 host-b\n"
        names.write_text(lines)
        inside = f'hostname host-{letter}; mount --bind {names} /etc/hosts; exec "$@"'
        process = subprocess.Popen(
            [*self._on(letter), "sh", "-c", inside, "sh", sys.executable, str(script)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path):
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, `ip` and `unshare`")
    with Hosts(tmp_path) as hosts:
        yield hosts


def start_pair(hosts, tmp_path, code):
    """Start one process on each host, which meet at host-a."""
    script = tmp_path / "train.py"
    script.write_text(WHERE + code)
    group = {
        "REPLICATOR_COORDINATOR": f"host-a:{free_port()}",
        "REPLICATOR_NUM_PROCESSES": "2",
    }
    return [
        hosts.start(letter, script, group | {"REPLICATOR_PROCESS_ID": str(rank)})
        for rank, letter in enumerate("ab")
    ]


def outcome(process):
    text, _ = process.communicate(timeout=LONG_S)
    return process.returncode, text


def test_two_hosts_meet_and_add(hosts, tmp_path):
    pair = start_pair(hosts, tmp_path, JOIN + LISTENERS)
    (code, zero), (other_code, one) = map(outcome, pair)
    assert (code, other_code) == (0, 0), zero + one
    assert "joined 0 3.0" in zero
    assert "joined 0 3.0" in one
    [line] = [line for line in zero.splitlines() if "coordinator listens" in line]
    assert line.count("10.231.77.1") == 1
    assert line.count(",") == 0


MISSING = """
from replicator import distributed
try:
    distributed.initialize(timeout_s=8)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_host_behind_a_cut_cable_is_missed_by_both(hosts, tmp_path):
    hosts.cut_the_cable()
    (_, zero), (_, one) = map(outcome, start_pair(hosts, tmp_path, MISSING))
    assert "process 1 of 2 did not; here are 0 (on host-a)" in zero
    assert "Process 0 must answer at host-a:" in one
    assert "process 1 of 2 on host-b" in one
