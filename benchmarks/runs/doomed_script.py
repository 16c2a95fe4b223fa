"""A script whose program is going to lose its launcher: `orphans` kills it.

`python -m benchmarks.runs.doomed_script LAUNCHER FOLDER` runs nodes that never end,
each with a child in a session of its own. A file in the folder says that a node is
there.
"""

import subprocess
import sys
import time
from pathlib import Path

import replicator.launchpad_bridge as lp

NODES = 3
_SLEEP = "import time; time.sleep(1000)"


def sleep(folder: str, number: int) -> None:
    """Start a child, say so, and stay."""
    subprocess.Popen([sys.executable, "-c", _SLEEP], start_new_session=True)
    (Path(folder) / f"node-{number}").touch()
    time.sleep(1000)


def main(launcher: str, folder: str) -> None:
    program = lp.Program("doomed")
    with program.group("sleeper"):
        for number in range(NODES):
            program.add_node(lp.PyNode(sleep, folder, number))
    (Path(folder) / "launching").touch()
    lp.launch(program, launch_type=launcher, log_dir=Path(folder) / "logs")


if __name__ == "__main__":
    main(*sys.argv[1:])
