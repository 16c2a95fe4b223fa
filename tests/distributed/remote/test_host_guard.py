"""The guard on a host: whatever ends it, or its launcher, nothing is left."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from replicator.distributed.remote.bundle import remote_command, source_line
from replicator.distributed.remote.frames import (
    ENDED,
    ORDER,
    PREAMBLE,
    SIGNAL,
    Frames,
    frame,
)
from tests.distributed.remote.one_host import LONG_S, parent, state_of, wait_gone
from tests.multiprocess.worker_processes import wait_until


def test_a_signal_that_comes_with_the_exit_hides_no_exit_code(host):
    with host.without_launcher() as connected:
        process, guard, _ = host.here()
        os.kill(guard, signal.SIGSTOP)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: state_of(process) == "Z")
        connected.stdin.write(frame(SIGNAL, b"15"))
        connected.stdin.flush()
        os.kill(guard, signal.SIGCONT)
        received = connected.stdout.read()
    assert (ENDED, b"-9") in Frames(PREAMBLE).feed(received)


def test_an_order_may_come_late_on_a_socket_both_ways(host):
    ours, its = socket.socketpair()
    with (
        ours,
        subprocess.Popen(
            shlex.split(remote_command(sys.executable)), stdin=its, stdout=its
        ) as connected,
    ):
        its.close()
        ours.sendall(source_line())
        received = ours.recv(len(PREAMBLE), socket.MSG_WAITALL)
        # Nothing more is sent until it waits for it.
        wait_until(lambda: state_of(connected.pid) in "SZ")
        times = {"lost_after_s": LONG_S, "beat_s": LONG_S}
        order = json.dumps(host.order("raise SystemExit(7)", **times)).encode()
        ours.sendall(frame(ORDER, order))
        while data := ours.recv(1 << 16):
            received += data
    assert (ENDED, b"7") in Frames(PREAMBLE).feed(received)


@pytest.mark.parametrize("victim", ["host guard", "its watcher"])
def test_a_killed_guard_leaves_nothing_behind(host, victim):
    with host.without_launcher():
        process, guard, child = host.here()
        os.kill(guard if victim == "host guard" else parent(guard), signal.SIGKILL)
        wait_gone([process, guard, child])


@pytest.mark.slow
def test_a_guard_that_is_stopped_outlives_no_launcher(host):
    with host.without_launcher() as connected:
        pids = host.here()
        os.kill(pids[1], signal.SIGSTOP)
        connected.stdin.close()
        wait_gone(pids)


def test_a_host_ends_all_when_its_launcher_is_silent(host):
    with host.without_launcher(lost_after_s=1.0) as connected:
        pids = host.here()
        assert connected.wait(LONG_S) == 0
        wait_gone(pids)


def test_a_host_ends_all_when_its_launcher_is_gone(host):
    with host.without_launcher() as connected:
        pids = host.here()
        connected.stdin.close()
        wait_gone(pids)
