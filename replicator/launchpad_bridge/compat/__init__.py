"""Run programs that were written for Launchpad, unmodified.

    python -m replicator.launchpad_bridge.compat script.py --lp_launch_type=local_mp

A folder with packages named `launchpad` and `courier` is put first on the path of
modules, here and in all workers; their names are those of
`replicator.launchpad_bridge`.

    installing      the folder, and its place on the path
    packages/       `launchpad`, `courier`: the packages that a script imports
    fallbacks/      `pybind11_abseil`, for the error that programs catch; `reverb`
    submodules      names of their modules, and the object of each
    courier_node    nodes whose public methods can all be called
    own_classes     a program's named tuples, dataclasses and enums, which may be sent
    launch_flags    `--lp_launch_type` and other absl flags, which only this uses
    courier_client, courier_server   servers at a port of this host, without a program
    reverb_node, reverb_words, reverb_server     Reverb, on our replay tables
    scripts         run a script as Python does

`install()` does the same for a notebook, or a test, before `import launchpad`.
"""

from replicator.launchpad_bridge.compat.installing import PACKAGES, install
from replicator.launchpad_bridge.compat.scripts import run_module, run_script

__all__ = ["PACKAGES", "install", "run_module", "run_script"]
