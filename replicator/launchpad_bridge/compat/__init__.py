"""Run programs that were written for Launchpad, unmodified.

    python -m replicator.launchpad_bridge.compat script.py --lp_launch_type=local_mp

A folder with packages named `launchpad` and `courier` is put first where modules are
looked for, here and in all workers; what they hold is `replicator.launchpad_bridge`.

    installing      the folder, and where it is put
    packages/       `launchpad`, `courier`: what a script imports
    fallbacks/      `pybind11_abseil`, for the error that programs catch
    submodules      which names the modules of these have, and what stands for each
    courier_node    what others may call of a node: more than here
    own_classes     a program's named tuples, dataclasses and enums, which may travel
    launch_flags    `--lp_launch_type` and other absl flags, which are nowhere else
    courier_client, courier_server   servers at a port of this host, without a program
    scripts         run a script as Python does

`install()` does the same for a notebook, or a test, before `import launchpad`.
"""

from replicator.launchpad_bridge.compat.installing import PACKAGES, install
from replicator.launchpad_bridge.compat.scripts import run_module, run_script

__all__ = ["PACKAGES", "install", "run_module", "run_script"]
