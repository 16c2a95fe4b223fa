"""A user's script: `program_script.py KIND READY_FOLDER LAUNCHER`; it has own nodes.

Nothing waits for the run: a script that only launches goes on until its program ends.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import replicator.launchpad_bridge as lp
from replicator.rpc.codec.registry import register


@register
class Point(NamedTuple):
    x: int
    y: int


class Server:
    def mirror(self, point):
        assert isinstance(point, Point)
        return Point(point.y, point.x)

    def stop_all(self):
        lp.stop()


def call(server):
    return server.mirror(Point(1, 2))


def ready(folder, name):
    (Path(folder) / name).write_text(str(os.getpid()))


def heed(folder, name):
    ready(folder, name)
    lp.wait_for_stop()


def be_deaf(folder, name):
    ready(folder, name)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    while True:
        time.sleep(1)


def ask(server):
    server.stop_all()


def die(folder):
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def always_fail(folder):
    with open(Path(folder) / "tries", "a") as file:
        file.write("x")
        number = file.tell()
    raise RuntimeError(f"bug {number} at step 17")


def make_program(kind, folder):
    program = lp.Program(kind)
    server = program.add_node(lp.CourierNode(Server), label="server")
    match kind:
        case "heeds":
            for name in ("a", "b"):
                program.add_node(lp.PyNode(heed, folder, name), label=name)
        case "deaf":
            for name in ("a", "b"):
                program.add_node(lp.PyNode(be_deaf, folder, name), label=name)
        case "asks":
            program.add_node(lp.PyNode(ask, server), label="asker")
        case "calls":
            program.add_node(lp.PyNode(call, server), label="caller")
        case "dies":
            program.add_node(lp.PyNode(heed, folder, "a"), label="a")
            program.add_node(lp.PyNode(heed, folder, "b"), label="b")
            program.add_node(lp.PyNode(die, folder), label="doomed")
        case "loops":
            restart = lp.Restart(attempts=3, backoff_s=0.1)
            with program.group("looping", restart=restart):
                program.add_node(lp.PyNode(always_fail, folder))
    return program


if __name__ == "__main__":
    program = make_program(*sys.argv[1:3])
    run = lp.launch(program, launch_type=sys.argv[3], stop_grace_s=100.0)
    if sys.argv[1] == "calls":
        run.wait(60, labels=["caller"])
        point = run.results["caller"]
        print("result", point, isinstance(point, Point))
        run.stop()
