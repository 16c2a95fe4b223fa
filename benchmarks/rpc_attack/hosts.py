"""Attacks on `replicator launch --machine`: by its file, its words, a false host."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.rpc_attack.attack import LONG_S, Untried, hold, within
from benchmarks.rpc_attack.target import Target, private_folder
from benchmarks.rpc_attack.users import as_another
from benchmarks.runs.ssh_server import SshServer, Unavailable
from replicator.distributed.remote.machine_file import read_hosts
from replicator.distributed.remote.remote_host import RemoteHost, connection
from replicator.errors import ArgumentError

_AWKWARD = (
    *("", "-oProxyCommand=touch {}", "$(touch {})", "`touch {}`", "; touch {}"),
    *("'; touch {}; '", '"; touch {}; "', "\ntouch {}\n", "| touch {}", "& touch {}"),
    *("\\", "*", "~", "${{IFS}}touch {}", "\r", "é\udcff"),
)
_REPORT = """
import json, os, sys
names = [f"NAME{i}" for i in range(len(sys.argv) - 2)]
with open(sys.argv[1], "w") as file:
    json.dump([sys.argv[2:], [os.environ[name] for name in names]], file)
"""
_STAY = """
import os, signal, sys
with open(sys.argv[1], "w") as file:
    file.write(os.environ["REPLICATOR_RPC_SECRET_FILE"])
signal.pause()
"""


def names_of_hosts(target: Target) -> None:
    """Name a host, or a user, so that ssh or a shell does more than to connect."""
    for text in _AWKWARD:
        name = text.format("won")
        for address, user in ((name, None), ("a", name)):
            try:
                host = RemoteHost(address=address, user=user)
            except ArgumentError:
                continue
            hold(False, f"{name!r} is taken: {connection(host, 'true')}")


def words_of_a_command(target: Target) -> None:
    """Have a shell on the way read an argument, or a variable."""
    folder = private_folder()
    words = [text.format(folder / "won") for text in _AWKWARD]
    variables = {f"NAME{at}": word for at, word in enumerate(words)}
    (folder / "report.py").write_text(_REPORT)
    machine = _machine(folder, ["a"], variables)
    done = _launch(folder, machine, "report.py", str(folder / "got"), *words)
    hold(done.wait(4 * LONG_S) == 0, "it did not run")
    got = json.loads((folder / "got").read_text())
    hold(got == [words, words], f"other words arrived: {got}")
    hold(not (folder / "won").exists(), "a shell has read them")


def commands_in_place_of_ssh(target: Target) -> None:
    """Have a shell read what stands for ssh."""
    words = connection(RemoteHost(address="a"), "true", via="run {host}; touch won")
    hold(words == ["run", "a;", "touch", "won", "true"], f"it is {words}")


def yaml_with_tags(target: Target) -> None:
    """Have the machine's file call a function, or take all memory."""
    folder = private_folder()
    won = folder / "won"
    tagged = f"!!python/object/apply:os.system ['touch {won}']"
    bomb = "\n".join(
        f"l{at}: &l{at} [{', '.join([f'*l{at - 1}'] * 9) if at else 'x'}]"
        for at in range(12)
    )
    for text in (tagged, f"nodes: {tagged}", f"nodes: [{{address: {tagged}}}]", bomb):
        (folder / "cluster.yml").write_text(text)
        try:
            read_hosts(f"{folder}/cluster.yml")
        except ArgumentError:
            hold(not won.exists(), "it was executed")
            continue
        hold(False, f"it is taken: {text[:80]}")


def another_key_of_a_host(target: Target) -> None:
    """Stand in for a host, with another key, to get the secret of the run."""
    folder = private_folder()
    try:
        with SshServer(folder / "sshd") as server:
            server.write_client("a", "b")
            server.know((server.folder / "user_key.pub").read_text())
            (folder / "stay.py").write_text(_STAY)
            machine = _machine(folder, ["a", "b"], {})
            path = server.environ["PATH"]
            words = ("stay.py", str(folder / "got"))
            run = _launch(folder, machine, *words, via=None, path=path)
            printed = run.communicate(timeout=4 * LONG_S)[0]
            log = (server.folder / "sshd.log").read_text()
            hold(
                b"Somebody may stand in for it" in printed,
                f"the error is another: {printed!r}",
            )
            hold("Accepted" not in log, "the launcher has logged in")
            hold(not (folder / "got").exists(), "it runs there")
    except Unavailable as reason:
        raise Untried(str(reason)) from reason


def another_user_of_a_host(target: Target) -> None:
    """Read the secret on a host, as another user of it."""
    folder = private_folder()
    (folder / "stay.py").write_text(_STAY)
    machine = _machine(folder, ["a", "b"], {})
    run = _launch(folder, machine, "stay.py", str(folder / "got"))
    try:
        got = folder / "got"
        hold(within(4 * LONG_S, lambda: got.exists() and got.read_text()), "it is off")
        secret = Path(got.read_text())
        found = as_another("read", str(secret), str(secret.parent))
        hold(not found, found)
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=4 * LONG_S)
    hold(not secret.exists(), "the secret is left there")


def _machine(folder: Path, hosts: list[str], variables: dict[str, str]) -> Path:
    shared = {"PYTHONPATH": os.getcwd(), **variables}
    nodes = [
        {"address": host, "chief": not at, "ssh_config": "all"}
        for at, host in enumerate(hosts)
    ]
    cluster = {"nodes": nodes, "ssh": {"all": {"shared_envs": shared}}}
    path = folder / "cluster.yml"
    path.write_text(json.dumps(cluster))
    return path


def _launch(
    folder: Path,
    machine: Path,
    *words: str,
    via: str | None = "env HOST={host} sh -c",
    path: str = os.environ["PATH"],
) -> subprocess.Popen[bytes]:
    """Launch on hosts; by default on this one, through a shell."""
    command = [sys.executable, "-m", "replicator.cli", "launch"]
    command += ["--machine", str(machine), *(["--via", via] if via else [])]
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


ATTACKS: dict[str, Callable[[Target], None]] = {
    attack.__name__: attack
    for attack in (
        names_of_hosts,
        words_of_a_command,
        commands_in_place_of_ssh,
        yaml_with_tags,
        another_key_of_a_host,
        another_user_of_a_host,
    )
}
