"""Launch what is attacked: `python -m benchmarks.rpc_attack.launched FILE [LOGS]`.

The file says where the run is, once its nodes run; the program ends with the input.
"""

import json
import sys
from pathlib import Path

import replicator.launchpad_bridge as lp
from benchmarks.rpc_attack.programs import COMMANDS


class Echo:
    """A node that others call."""

    def echo(self, value: object) -> object:
        """Return what came."""
        return value


def say(echo: Echo) -> None:
    """Print commands for a terminal, and stay."""
    print(f"{echo.echo(COMMANDS)} said", flush=True)
    lp.wait_for_stop()


def main(file: str, logs: str = "") -> None:
    program = lp.Program("attacked")
    echo = program.add_node(lp.CourierNode(Echo), label="echo")
    program.add_node(lp.PyNode(say, echo), label="say")
    launcher = lp.Processes(preload=())
    with lp.launch(program, launcher, dashboard=True, log_dir=logs or None) as run:
        folder = run.plan.folder
        told = {
            "folder": str(folder),
            "logs": str(run.plan.logs),
            "run_id": run.run_id,
            "link": (folder / "dashboard.url").read_text(),
        }
        draft = Path(f"{file}.new")
        draft.write_text(json.dumps(told))
        draft.rename(file)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
