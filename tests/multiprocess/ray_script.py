"""A script whose program runs on a Ray of its own: `ray_script.py FOLDER`."""

import os
import subprocess
import sys
from pathlib import Path

import replicator.launchpad_bridge as lp
from tests.multiprocess.worker_nodes import SLEEPER, tell


def sleep(folder, number):
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    tell(Path(folder) / f"pids-{number}", f"{os.getpid()} {child.pid}")
    lp.wait_for_stop()


if __name__ == "__main__":
    program = lp.Program("doomed")
    with program.group("sleeper"):
        for number in range(2):
            program.add_node(lp.PyNode(sleep, sys.argv[1], number))
    lp.launch(program, launch_type="ray", log_dir=Path(sys.argv[1]) / "logs")
