"""Time from the launch of a program to the first answer of all its process nodes.

The script (`launched_script`) imports jax, flax and optax at its top and then launches;
its own imports are over when the clock starts. Its fork server has to import the same,
so `seconds_1` is little more than that; `imports` stands beside it, as both are slower
on a busy machine. The median of a few rounds.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping

from absl import app, flags

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Launches of each number of nodes.")
_NODES = flags.DEFINE_multi_integer("nodes", [1, 8, 32], "Numbers of nodes, in turn.")
_LAUNCHER = flags.DEFINE_string("launcher", "processes", "Where nodes run.")
_TIMEOUT_S = 300.0


def launch_once(nodes: int, launcher: str) -> Mapping[str, float]:
    """Run the script; return its times, in seconds.

    Raises:
      RuntimeError: It failed.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.runs.launched_script",
        str(nodes),
        launcher,
    ]
    done = subprocess.run(
        command,
        env={"JAX_PLATFORMS": "cpu", **os.environ},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the script ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    del argv
    launch_once(1, _LAUNCHER.value)  # whose bytecode may have to be written
    rounds = [
        {nodes: launch_once(nodes, _LAUNCHER.value) for nodes in _NODES.value}
        for _ in range(_ROUNDS.value)
    ]
    imports_s = [each["imports"] for one in rounds for each in one.values()]
    result = {"imports": round(statistics.median(imports_s), 2)}
    for nodes in _NODES.value:
        times_s = [one[nodes]["seconds"] for one in rounds]
        print(f"{nodes} nodes: {', '.join(f'{time_s:.2f}' for time_s in times_s)} s")
        result[f"seconds_{nodes}"] = round(statistics.median(times_s), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
