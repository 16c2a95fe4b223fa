"""Attacks of another user of this host; they need root, who becomes that user."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.rpc_attack.attack import Untried, hold
from benchmarks.rpc_attack.other_user import NOBODY
from benchmarks.rpc_attack.programs import Launched, refused_courier
from benchmarks.rpc_attack.target import Target, private_folder


def as_another(name: str, *words: str) -> str:
    """Return what came of a try of another user."""
    if os.geteuid() != 0:
        raise Untried("only root can become another user")
    command = [sys.executable, "-m", "benchmarks.rpc_attack.other_user", name, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def another_user_connects(target: Target, launched: Launched) -> None:
    """Connect to the Unix socket."""
    found = as_another("connect", target.path)
    hold(not found, found)


def another_user_with_the_secret(target: Target, launched: Launched) -> None:
    """Connect, knowing the secret, where somebody has opened the folder."""
    folder = Path(target.path).parent
    key = target.secret._key.hex()
    folder.chmod(0o755)
    os.chmod(target.path, 0o666)
    try:
        found = as_another("prove", target.path, key)
    finally:
        os.chmod(target.path, 0o600)
        folder.chmod(0o700)
    hold(not found, found)


def another_user_reads(target: Target, launched: Launched) -> None:
    """Read what lies in the folder of a run, and of a server."""
    told = launched.wait().told
    folder = Path(told["folder"])
    names = [str(folder), told["logs"], *map(str, folder.rglob("*"))]
    names += [str(Path(target.path).parent)]
    hold(as_another("read", os.path.abspath(__file__)), "another user reads nothing")
    found = as_another("read", *names)
    hold(not found, found)


def another_user_reads_memory(target: Target, launched: Launched) -> None:
    """Read the environment and the memory of processes."""
    launched.wait()
    for path in launched.processes():
        found = as_another("read", f"{path}/environ", f"{path}/mem", f"{path}/fd")
        hold(not found, found)


def another_user_is_first(target: Target, launched: Launched) -> None:
    """Make the folder of `courier` before its user does."""
    parent, mine = private_folder(), private_folder()
    parent.chmod(0o1777)
    place = parent / f"courier-{os.geteuid()}"
    for how, *words in (("folder",), ("link", str(mine))):
        as_another(how, str(place), *words)
        hold(os.path.lexists(place), "it was not made")
        refused_courier(parent)
        hold(not list(mine.iterdir()), "the victim wrote to where a link leads")
        os.unlink(place) if place.is_symlink() else os.rmdir(place)


def another_users_log(target: Target, launched: Launched) -> None:
    """Give a log to the victim: a file that somebody else can read."""
    if os.geteuid() != 0:
        raise Untried("only root can become another user")
    shared = private_folder()
    shared.chmod(0o1777)
    for name in ("echo.log", "say.log", "fork-server.log"):
        (shared / name).write_text("")
        os.chown(shared / name, NOBODY, NOBODY)
        (shared / name).chmod(0o666)
    with Launched(logs=str(shared)) as victim:
        victim.process.wait(60)
        hold(b"files of this user's only" in victim.words(), "nobody was told")
    hold(not (shared / "say.log").read_text(), "its output is somebody else's")


ATTACKS: dict[str, Callable[[Target, Launched], None]] = {
    attack.__name__: attack
    for attack in (
        another_user_connects,
        another_user_with_the_secret,
        another_user_reads,
        another_user_reads_memory,
        another_user_is_first,
        another_users_log,
    )
}
