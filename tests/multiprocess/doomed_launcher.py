"""A launcher that is going to be killed: `doomed_launcher.py FOLDER WORKERS START`."""

import os
import sys
import time
from pathlib import Path

from replicator.launchpad_bridge.launchers.processes import Processes
from tests.multiprocess import worker_nodes as nodes
from tests.multiprocess.worker_processes import Opened


def main(folder, workers, start):
    folder = Path(folder)
    functions = {
        f"w/{number}": nodes.have_children(
            folder / f"pids-{number}", then=nodes.sleep()
        )
        for number in range(int(workers))
    }
    launcher = Processes(start=start, preload=(), terminal="output_to_files")
    run = Opened(folder, launcher, functions)
    nodes.tell(folder / "run_id", run.run_id)
    run.start_all()
    nodes.tell(folder / "started", os.getpid())
    time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
