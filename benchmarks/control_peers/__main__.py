"""Compare SAC as a program with SAC of Stable-Baselines3, and of `sbx-rl` in JAX.

    python -m benchmarks.control_peers                 # three minutes each
    python -m benchmarks.control_peers --returns       # fifteen, and what each learned

All learn HalfCheetah by networks of 256 × 256 from batches of 256, one update for each
step of an environment, on all cores. The peers act and learn in turn, in one process,
with one environment; ours are actors, a replay table and a learner in processes, which
makes eight updates by one call. Each runs alone, one after the other; a window begins
once all is compiled and learns.

- `sb3_speedup`, `sbx_ratio`: steps a second, each with its update, of ours / of the
  peer. Null where it cannot be installed.
- `steps_per_s`, `updates_per_s`: of ours; the slower of the two counts.
- `returns`: with `--returns`, the mean of ten episodes without exploration.

Ours needs `jax-replicator[control]`; the peers get a virtual environment, 6 GB.
"""

import functools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from absl import app, flags

import replicator.launchpad_bridge as lp
from benchmarks.peer_venv import install, peer_python
from experiments import agent_program
from experiments.environments import control
from experiments.evaluator import play, player
from experiments.off_policy import OffPolicy
from models.sac import Sac

_ENV = flags.DEFINE_string("env", "HalfCheetah-v5", "A task of gymnasium.")
_SECONDS = flags.DEFINE_float("seconds", 0.0, "Of each window; 0 for 150, or 870.")
_RETURNS = flags.DEFINE_bool("returns", False, "Fifteen minutes, then ten episodes.")
_PEERS = flags.DEFINE_multi_enum(
    "peers", ["sb3", "sbx"], ["sb3", "sbx", "none"], "Whom to compare with."
)
_WARM = flags.DEFINE_integer("warm", 1_000, "Updates before the window.")
_STEPS_PER_CALL = flags.DEFINE_integer("steps_per_call", 8, "Updates in one, of ours.")
_VENV = flags.DEFINE_string("venv", "runs/control_peers_venv", "Where the peers are.")
_PACKAGES = "stable-baselines3==2.9.*", "gymnasium[mujoco]==1.4.*", "mujoco==3.17.*"
_SBX = ("sbx-rl==0.28.*",)  # on top of these: the other is measured without it, too
_BATCH, _HIDDEN = 256, 256
_ACTORS, _ENVIRONMENTS, _UNROLL = 2, 4, 8
_WAIT_S = 300.0  # longest time until a program is warm, or a peer beyond its window
_EPISODES = 10


def main(argv: list[str]) -> None:
    """Measure ours, then each peer, and print the ratios."""
    del argv
    started_s = time.monotonic()
    window_s = _SECONDS.value or (870.0 if _RETURNS.value else 150.0)
    ours = measure_ours(window_s)
    rate = min(ours["steps_per_s"], ours["updates_per_s"])
    result: dict[str, Any] = {"sb3_speedup": None, "sbx_ratio": None, **ours}
    returns = {"ours": ours.get("return")}
    peers = [name for name in _PEERS.value if name != "none"]
    python = peer_python(Path(_VENV.value), _PACKAGES) if peers else None
    if python and "sbx" in peers and not install(python, (*_PACKAGES, *_SBX)):
        peers.remove("sbx")
    for name in peers if python else []:
        found = measure_peer(str(python), name, window_s)
        peer_rate = found["steps"] / found["seconds"]
        print(f"{name}: {peer_rate:.1f} steps a second")
        key = "sb3_speedup" if name == "sb3" else "sbx_ratio"
        result[key] = round(rate / peer_rate, 2)
        if _RETURNS.value:
            returns[name] = found["return"]
    result["returns"] = returns if _RETURNS.value else None
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def measure_ours(window_s: float) -> dict[str, float]:
    """Return steps and updates a second of a program, and the return it got to."""
    shape, action_size = control.sizes_of(_ENV.value)
    agent = OffPolicy(
        net=Sac(action_size=action_size, hidden=_HIDDEN, is_normed=False),
        observation_shape=shape,
        optimizer=optax.adam(3e-4),
    )
    each = _ENVIRONMENTS // _ACTORS
    program, table = agent_program.make_program(
        agent,
        functools.partial(control.make_tasks, _ENV.value, each),
        actors=_ACTORS,
        batch_size=_BATCH,
        unroll_length=_UNROLL,
        steps=None,
        replay={
            "capacity": 1_000_000,
            "limiter": lp.RateLimiter(
                min_size=_BATCH,
                samples_per_insert=_BATCH,
                error=4 * _BATCH * each * _UNROLL,
            ),
        },
        items=lp.n_step(1, discount=agent.discount),
        steps_per_call=_STEPS_PER_CALL.value,
        name="sac",
    )
    with lp.launch(program, "processes") as run:
        client = table.dereference()
        _wait_until_taken(client, _WARM.value)
        began, began_s = client.statistics(), time.perf_counter()
        time.sleep(window_s)
        ended, ended_s = client.statistics(), time.perf_counter()
        run.stop_and_wait()
        (learned,) = run.results_of("learner")
    passed_s = ended_s - began_s
    found = {
        "steps_per_s": round((ended["inserted"] - began["inserted"]) / passed_s, 1),
        "updates_per_s": round(
            (ended["taken"] - began["taken"]) / _BATCH / passed_s, 1
        ),
    }
    print(f"ours: {found}")
    if _RETURNS.value:
        tasks = control.make_tasks(_ENV.value, _EPISODES)
        choose = player(
            *(agent.greedy, agent.initial_core, learned["variables"]["params"]),
            size=_EPISODES,
            seed=0,
        )
        found["return"] = float(np.mean(play(tasks, choose, seed=0)))
    return found


def _wait_until_taken(table: Any, batches: int) -> None:
    until_s = time.monotonic() + _WAIT_S
    while table.statistics()["taken"] < batches * _BATCH:
        if time.monotonic() > until_s:
            raise TimeoutError(
                f"{batches} batches were not taken in {_WAIT_S:.0f} s; the table "
                f"counts {table.statistics()}."
            )
        time.sleep(0.1)


def measure_peer(python: str, name: str, window_s: float) -> dict[str, float]:
    """Return what `peer.py` printed."""
    settings = {
        "env": _ENV.value,
        "seconds": window_s,
        "warm_steps": _WARM.value,
        "hidden": _HIDDEN,
        "batch_size": _BATCH,
        "episodes": _EPISODES if _RETURNS.value else 0,
    }
    done = subprocess.run(
        [python, str(Path(__file__).with_name("peer.py")), name, json.dumps(settings)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=window_s + 2 * _WAIT_S,
        env={**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore"},
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    app.run(main)
