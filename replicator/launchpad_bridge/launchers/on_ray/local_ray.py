"""A Ray of a run's own, on this host, that nobody else reaches and that ends with it.

Its processes descend from a guard (`replicator.distributed.processes.guard`), which
kills all of them, whatever their names, once this process is gone or closes it.
Ray's own workers would notice that late, and some write over the environment by which
they could be found.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicator.base.host.held_folder import hold_folder
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.errors import LaunchError

OF_HEAD = {"num_cpus", "num_gpus", "resources", "labels", "object_store_memory"}
"""Arguments of `ray.init` that describe a Ray, not its use."""

CLUSTERS = "ENABLE_RAY_CLUSTER"
"""Name of Ray's constant for whether this system may be part of a cluster.

Where it may, as on Linux, Ray 2.60 replaces the loopback address by the host's own, and
then listens at all addresses.
"""

_HEAD = f"""
import json, sys, threading
import ray
from ray._private import ray_constants
ray_constants.{CLUSTERS} = False
context = ray.init(**json.loads(sys.argv[1]))
print(context.address_info["address"], flush=True)
threading.Event().wait()
"""
_READY_S = 120.0
_END_S = 15.0


class LocalRay:
    """A Ray that runs.

    Args:
      arguments: Arguments of `ray.init`, those of `OF_HEAD`.

    Raises:
      LaunchError: It does not start.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        # Sockets lie deep in it, and their paths must be short.
        parent = "/tmp" if os.path.isdir("/tmp") else None
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir=parent))
        # Released when this process ends, however that is; a guard deletes the folder.
        self._held = hold_folder(self._folder)
        options = {
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(self._folder),
            "include_dashboard": False,
            "log_to_driver": False,
            **arguments,
        }
        head = [sys.executable, "-c", _HEAD, json.dumps(options)]
        output = self._folder / "head.log"
        with output.open("wb") as log:
            self._head = GuardedProcess(
                head,
                owner=self._folder.name,
                environ=os.environ,
                folder=self._folder,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        # Nobody has this object to close if the address does not come.
        try:
            self.address = self._read_address(output)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it, and all that it has started."""
        # Ray's processes take a while to end; what is left then, the kernel kills.
        self._head.close(_END_S)
        os.close(self._held)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_address(self, output: Path) -> str:
        pipe = self._head.stdout
        assert pipe is not None, "it is one"
        ready = select.poll()  # `select` knows no descriptors past 1,023
        ready.register(pipe, select.POLLIN)
        is_ready = ready.poll(_READY_S * 1e3)
        # Ready, too, where the head has died: the line is empty then.
        line = pipe.readline().decode().strip() if is_ready else ""
        if not line:
            text = output.read_text(errors="replace")[-2000:]
            raise LaunchError(f"Ray did not start within {_READY_S:g} s: {text}")
        return line
