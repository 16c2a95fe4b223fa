"""A pair of processes on two hosts with a slow link, which time what they are told to.

The first process answers; the other makes the same steps.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.namespaces import Namespaces
from benchmarks.slow_links.models import DEVICES_PER_HOST, HOSTS
from replicator.base.host.fake_devices import ENVIRONMENT_VARIABLE as FAKE_DEVICES
from replicator.strategies import Features, Machine, Traffic
from replicator.strategies.calibration import Calibration

ANSWER = "answer "
"""What answers begin with: gloo writes lines of its own."""
_PORT = 8490


class Pair:
    """Two processes that hold the compiled steps of a model's candidates.

    Args:
      network: Their hosts.
      model: Name of the model.
      mbit_per_s: Speed of the link between them, which `network` has.

    Attributes:
      machine: The machine that they are, as measured there.
      features: By candidate, what a step computes and sends.
    """

    def __init__(self, network: Namespaces, model: str, mbit_per_s: int) -> None:
        arguments = [
            f"--model={model}",
            f"--coordinator={network.addresses[0]}:{_PORT}",
        ]
        module = "benchmarks.slow_links.worker"
        with contextlib.ExitStack() as stack:
            self._processes = []
            for rank in range(HOSTS):
                command = [
                    sys.executable,
                    "-m",
                    module,
                    *arguments,
                    f"--process={rank}",
                ]
                process = subprocess.Popen(
                    network.command(rank, command),
                    env={**os.environ, FAKE_DEVICES: str(DEVICES_PER_HOST)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                self._processes.append(process)
            found = self._answer()
            self._stack = stack.pop_all()
        self.machine = _machine(network, mbit_per_s, found)
        self.features = {
            name: _features(plain) for name, plain in found["features"].items()
        }

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def seconds(self, candidate: str) -> float:
        """Return the seconds of the fastest of three steps of a candidate, made now."""
        for process in self._processes:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(f"{candidate}\n")
            process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._processes[0].stdout is not None, "it is a pipe"
        for line in self._processes[0].stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError("a process of the pair has ended; see above")


def _machine(network: Namespaces, mbit_per_s: int, found: Mapping[str, Any]) -> Machine:
    nodes = [
        {
            "address": address,
            "chief": rank == 0,
            "cpus": list(range(DEVICES_PER_HOST)),
            "network_bandwidth": mbit_per_s / 1000,
        }
        for rank, address in enumerate(network.addresses)
    ]
    # JSON is YAML.
    machine = Machine.from_yaml(json.dumps({"nodes": nodes}))
    machine = machine.calibrated(Calibration(**found["measured"]))
    inside, between = machine.links
    between = dataclasses.replace(between, latency_s=found["latency_s"])
    return dataclasses.replace(machine, links=(inside, between))


def _features(plain: dict[str, Any]) -> Features:
    traffic = (
        Traffic(**{**each, "axes": tuple(each["axes"])}) for each in plain["traffic"]
    )
    return Features(**{**plain, "traffic": tuple(traffic)})
