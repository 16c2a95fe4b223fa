"""Attack a running server and a running program; count the attacks that succeed.

A server in a process of its own, reached by its Unix socket, by gRPC on loopback and by
gRPC with TLS, a program of nodes with its page, and every object of the library that a
network can call, are attacked by strangers of this host, by another user, by a process
of the program, and by a server that a client trusts; `replicator launch` by what it is
given, and by a host that stands in for another. After each attack on the server it
must serve its own, in time. What cannot be tried here (another user, without root) is
said, and counts as no attack.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable

from absl import app, flags

from benchmarks.rpc_attack import (
    crowds,
    doors,
    frames,
    hosts,
    methods,
    programs,
    servers,
    tls,
    users,
)
from benchmarks.rpc_attack.attack import Untried, Won
from benchmarks.rpc_attack.programs import Launched
from benchmarks.rpc_attack.services import Offered
from benchmarks.rpc_attack.target import Target

_ONLY = flags.DEFINE_multi_string("only", [], "Attacks whose name holds this.")

Tried = Callable[[], None]


def try_one(name: str, attack: Tried, check: Tried) -> bool | None:
    """Attack; tell whether it succeeded, or None: it could not be tried."""
    start_s = time.monotonic()
    try:
        attack()
        check()
        found, told = False, "held"
    except Untried as reason:
        found, told = None, f"not tried: {reason}"
    except Won as how:
        found, told = True, f"SUCCEEDED: {how}"
    except Exception:
        # What an attack does not expect is no defence: somebody has to look.
        found, told = True, f"BROKE: {traceback.format_exc()}"
    print(f"{name}: {told} ({time.monotonic() - start_s:.1f} s)", flush=True)
    return found


def attacks_on(
    target: Target, launched: Launched, offered: Offered
) -> list[tuple[str, Tried, Tried]]:
    """List all attacks: name, what it does, how to look whether all still serve."""
    on_server = doors.ATTACKS | crowds.ATTACKS | frames.ATTACKS | hosts.ATTACKS
    found = [
        (name, lambda attack=attack: attack(target), target.check)
        for name, attack in on_server.items()
    ]
    found += [
        (name, lambda attack=attack: attack(target, launched), launched.check)
        for name, attack in (users.ATTACKS | programs.ATTACKS).items()
    ]
    found += [
        (name, attack, target.check)
        for name, attack in (servers.ATTACKS | tls.ATTACKS).items()
    ]
    found += [
        (name, lambda attack=attack: attack(offered), offered.check)
        for name, attack in methods.ATTACKS.items()
    ]
    return found


def main(argv: list[str]) -> None:
    del argv
    failed, tried = [], 0
    with Target() as target, Launched() as launched, Offered() as offered:
        for name, attack, check in attacks_on(target, launched, offered):
            if _ONLY.value and not any(word in name for word in _ONLY.value):
                continue
            succeeded = try_one(name, attack, check)
            tried += succeeded is not None
            if succeeded:
                failed.append(name)
                target.renew()  # it may have been hurt
                offered.renew()
    print(json.dumps({"failures": len(failed), "total": tried, "failed": failed}))
    sys.exit(0)


if __name__ == "__main__":
    app.run(main)
