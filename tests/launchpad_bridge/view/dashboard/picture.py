"""Make the pictures that READMEs show, of programs that really run.

    python -m tests.launchpad_bridge.view.dashboard.picture docs/dashboard.png
    python -m tests.launchpad_bridge.view.dashboard.picture docs/impala.png impala

A parameter server learns from six workers, each a process, and an evaluator looks on;
or IMPALA learns catch from three actors. It needs Chromium:
`tests/install_chromium.sh`.
"""

import dataclasses
import functools
import sys
import tempfile
from pathlib import Path

import numpy as np

import replicator.launchpad_bridge as lp
from experiments import agent_program, impala_catch
from experiments.programs.parameter_server import (
    ParameterServer,
    Worker,
    true_weights,
)
from tests.browser import BROWSER, MISSING, Page

FEATURES = 4096
WORKERS = 6
UPDATES = 1_000_000  # more than there is time for
LOOKS = 6
SIZE = (1280, 750)


def evaluate(server):
    """Look, twice a second, how far the weights are from the true ones."""
    distances = []
    while not lp.wait_for_stop(0.5):
        weights = server.pull()["weights"]
        distances.append(float(np.linalg.norm(weights - true_weights(FEATURES))))
    return distances


def parameter_server():
    """Return the program of the bridge's README."""
    program = lp.Program("parameter_server")
    node = lp.CourierNode(ParameterServer, FEATURES, 1e-4, 64)
    server = program.add_node(node, label="server")
    cacher = program.add_node(lp.CacherNode(server, 20, 200), label="cacher")
    with program.group("workers", restart=lp.Restart(attempts=3)):
        for seed in range(WORKERS):
            worker = lp.PyClassNode(Worker, server, cacher, seed, UPDATES, FEATURES)
            program.add_node(worker)
    program.add_node(lp.PyNode(evaluate, server), label="evaluator")
    return program


def impala():
    """Return that of the learner's."""
    config = dataclasses.replace(impala_catch.Config(), actors=3, environments=24)
    program, _ = agent_program.make_program(
        impala_catch.make_agent(config),
        functools.partial(impala_catch.make_boards, 8),
        actors=3,
        batch_size=24,
        unroll_length=config.unroll_length,
        steps=None,
        name="impala",
    )
    return program


PROGRAMS = {"parameter_server": parameter_server, "impala": impala}


def main(target, name="parameter_server"):
    """Run the program, look at its page for some seconds, and write the picture."""
    if BROWSER is None:
        raise SystemExit(MISSING)
    with (
        tempfile.TemporaryDirectory() as profile,
        lp.launch(
            PROGRAMS[name](), launch_type="processes", dashboard=True, stop_grace_s=2.0
        ) as run,
    ):
        link = (run.plan.folder / "dashboard.url").read_text()
        with Page(link, profile, size=SIZE) as page:
            page.wait_for(
                "[...document.querySelectorAll('.worker')].every("
                "(g) => g.dataset.state === 'running') && "
                "[...document.querySelectorAll('.traffic')].every((t) => t.textContent)"
            )
            looks = page.evaluate("Number(document.body.dataset.updates)")
            page.wait_for(f"Number(document.body.dataset.updates) >= {looks + LOOKS}")
            Path(target).write_bytes(page.screenshot())
    print(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
