"""Disturb runs on two hosts in twelve ways: the bits stay, and nothing is left behind.

Hosts are network namespaces with an sshd each; `replicator launch --machine` runs on
the first and starts a process on both. A case kills a process on the way to one of
them, stops the launcher or cuts the cable in the middle of a training. Then what ran is
gone within `--lost-after` and 5 s, also on the host that was cut off, and the run, or
the next launcher of it, ends with the bits of a run that nobody disturbed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import app, flags

from benchmarks.namespaces import Namespaces
from benchmarks.runs.ssh_server import SshServer

_ONLY = flags.DEFINE_multi_string("only", [], "Cases whose name holds this.")
_STEPS = flags.DEFINE_integer("steps", 400, "Steps of each run.")

_LOST_AFTER_S = 2.0
_LEFT_AFTER_S = 5.0
_LONG_S = 120.0
_POLL_S = 0.02
_SCRIPT = "benchmarks.runs.killed_run"


class Failed(Exception):
    """A case did not come about as it must."""


class Hosts:
    """Two hosts, with an sshd each, and a folder that both see."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.network = stack.enter_context(Namespaces(2))
        self.servers = []
        for number, address in enumerate(self.network.addresses):
            folder = self.folder / f"sshd-{number}"
            folder.mkdir()
            inside = self.network.command(number, [])
            server = SshServer(folder, address, inside=inside)
            self.servers.append(stack.enter_context(server))
        nodes = [
            {"address": server.address, "chief": not at, "ssh_config": f"host{at}"}
            for at, server in enumerate(self.servers)
        ]
        groups = {f"host{at}": _group(each) for at, each in enumerate(self.servers)}
        cluster = {"nodes": nodes, "ssh": groups}
        (self.folder / "cluster.yml").write_text(json.dumps(cluster))
        # One `ssh` knows both hosts: it asks for the keys of either.
        known = [each.folder / "known_hosts" for each in self.servers]
        known[0].write_text("".join(each.read_text() for each in known))

    def launcher(self, directory: Path) -> "Launcher":
        """Start the training in a directory, or go on with it."""
        words = ["--machine", f"{self.folder}/cluster.yml", "--max-restarts", "8"]
        words += ["--lost-after", f"{_LOST_AFTER_S:g}", "-m", _SCRIPT, "--task=mlp"]
        words += [f"--directory={directory}", f"--steps={_STEPS.value}"]
        words += [f"--interval={_STEPS.value // 10}", "--devices=1"]
        command = [sys.executable, "-m", "replicator.cli", "launch", *words]
        environ = {**os.environ, **self.servers[0].environ}
        return Launcher(self.network.command(0, command), environ)

    def processes(self, host: int) -> list[int]:
        """List all that runs on a host in sessions of its sshd, sshd's own left out."""
        server = self.servers[host]
        return [pid for pid in server.descendants() if pid not in server.sessions()]

    def training(self, host: int) -> int:
        """Return the process that trains on a host.

        Raises:
          Failed: There is none.
        """
        for pid in self.processes(host):
            if _SCRIPT in _command(pid) and "-I" not in _command(pid).split():
                return pid
        raise Failed(f"no training on host {host}")


def _group(server: SshServer) -> dict[str, object]:
    return {
        "port": server.port,
        "key_file": f"{server.folder}/user_key",
        "shared_envs": {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.getcwd(),
            "JAX_COMPILATION_CACHE_DIR": f"{server.folder}/xla",
        },
    }


class Launcher:
    """A `replicator launch` that runs, and what it has printed."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines: list[str] = []
        # Alone reads what is printed; it ends with the launcher.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for_step(self, step: int) -> None:
        """Wait until both processes have made an update."""
        for rank in range(2):
            _wait(lambda rank=rank: self._has(rank, step), f"step {step} of {rank}")

    def _has(self, rank: int, step: int) -> bool:
        if self.process.poll() is not None:
            raise Failed(f"the run has ended: {self.lines[-20:]}")
        return any(
            each["what"] == "step" and each["step"] >= step
            for each in self.records(rank)
        )

    def records(self, rank: int) -> Iterator[dict]:
        """Yield what a process has reported."""
        label = f"[{rank}] {{"
        for line in list(self.lines):
            if line.startswith(label):
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line.removeprefix(f"[{rank}] "))

    def bits(self) -> list[str]:
        """Wait for the end; return the digest of each process's final state.

        Raises:
          Failed: It did not end well.
        """
        code = self.process.wait(_LONG_S)
        self._reader.join()
        if code != 0:
            raise Failed(f"exit code {code}: {self.lines[-20:]}")
        result = [list(self.records(rank))[-1] for rank in range(2)]
        return [each["digest"] for each in result]

    def ssh(self, host: int) -> int:
        """Return the ssh that reaches a host."""
        found = [pid for pid in _below(self.process.pid) if _name(pid) == "ssh"]
        found = [pid for pid in found if f"sshd-{host}/" in _command(pid)]
        if not found:
            raise Failed(f"no ssh to host {host}")
        return found[0]

    def close(self) -> None:
        """Kill it, if it runs; its guards end all else."""
        self.process.kill()
        self.process.wait()


def _kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# What is done in the middle of a run.
CASES: dict[str, Callable[[Hosts, Launcher], None]] = {
    "process 0": lambda hosts, run: _kill(hosts.training(0)),
    "process 1": lambda hosts, run: _kill(hosts.training(1)),
    "both processes": lambda hosts, run: _kill(hosts.training(0), hosts.training(1)),
    "sshd's child of host 0": lambda hosts, run: _kill(*hosts.servers[0].sessions()),
    "sshd's child of host 1": lambda hosts, run: _kill(*hosts.servers[1].sessions()),
    "the host guard": lambda hosts, run: _kill(_parent(hosts.training(1))),
    "its watcher": lambda hosts, run: _kill(_parent(_parent(hosts.training(1)))),
    "ssh": lambda hosts, run: _kill(run.ssh(1)),
    "ssh's guard": lambda hosts, run: _kill(_parent(run.ssh(1))),
    "the launcher": lambda hosts, run: _kill(run.process.pid),
    "the launcher, stopped": lambda hosts, run: os.kill(
        run.process.pid, signal.SIGSTOP
    ),
    "the cable": lambda hosts, run: hosts.network.cut(1),
}


def disturb(name: str, hosts: Hosts) -> list[str]:
    """Disturb a run; return its bits.

    Raises:
      Failed: Something was left, or it did not go on.
    """
    directory = hosts.folder / name.replace(" ", "-").replace("'", "")
    run = hosts.launcher(directory)
    try:
        run.wait_for_step(_STEPS.value // 3)
        before = [pid for host in range(2) for pid in hosts.processes(host)]
        CASES[name](hosts, run)
        _wait_gone(before, _LOST_AFTER_S + _LEFT_AFTER_S)
        hosts.network.mend(1)
        if name == "the launcher":
            run.process.wait()
            run = hosts.launcher(directory)
        run.process.send_signal(signal.SIGCONT)
        bits = run.bits()
    finally:
        run.close()
        hosts.network.mend(1)
    left = [pid for host in range(2) for pid in hosts.processes(host)]
    _wait_gone(left, _LEFT_AFTER_S)
    return bits


def _wait_gone(pids: list[int], within_s: float) -> None:
    gone = lambda: not any(map(_is_alive, pids))  # noqa: E731
    with contextlib.suppress(Failed):
        _wait(gone, "", within_s)
    if left := [_command(pid) for pid in pids if _is_alive(pid)]:
        raise Failed(f"left after {within_s:g} s: {left}")


def _wait(condition: Callable[[], bool], what: str, within_s: float = _LONG_S) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            raise Failed(f"not within {within_s:g} s: {what}")
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _below(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_below(child)]
    return found


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return data.replace(b"\0", b" ").decode(errors="replace")[:400]
    return ""


def main(argv: list[str]) -> None:
    del argv
    began_s = time.monotonic()
    failed = []
    names = [
        name
        for name in CASES
        if not _ONLY.value or any(word in name for word in _ONLY.value)
    ]
    with contextlib.ExitStack() as stack:
        hosts = Hosts(stack)
        undisturbed = hosts.launcher(hosts.folder / "undisturbed").bits()
        for name in names:
            case_s = time.monotonic()
            try:
                bits = disturb(name, hosts)
                outcome = "held" if bits == undisturbed else "OTHER BITS"
            except Failed as reason:
                outcome = f"FAILED: {reason}"
            if outcome != "held":
                failed.append(name)
            print(f"{name}: {outcome} ({time.monotonic() - case_s:.1f} s)", flush=True)
    result = {"failures": len(failed), "cases": len(names), "failed": failed}
    print(json.dumps({**result, "seconds": round(time.monotonic() - began_s)}))


if __name__ == "__main__":
    app.run(main)
