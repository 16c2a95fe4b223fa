"""`python -m replicator.launchpad_bridge.compat script.py [args]`, or `-m module`."""

import sys
from collections.abc import Sequence

from replicator.base.host.standard_streams import lossy
from replicator.launchpad_bridge.compat.scripts import run_module, run_script

_USAGE = """\
usage: python -m replicator.launchpad_bridge.compat script.py [args ...]
       python -m replicator.launchpad_bridge.compat -m module [args ...]

Runs a program that was written for Launchpad, as it is. Of the arguments, which are
the script's, these are Launchpad's:
  --lp_launch_type=TYPE   local_mt or threads (the default), local_mp or processes,
                          test_mt or test, test_mp, ray
  --lp_termination_notice_secs=N   how long nodes may take to stop (10); 0: not at all,
                          less: as long as they like
"""


def main(arguments: Sequence[str]) -> int:
    """Run the script or module of a command line; return an exit status.

    Args:
      arguments: Arguments after the program's own name.
    """
    match arguments:
        case ["-h" | "--help"]:
            print(_USAGE, end="", file=lossy(sys.stdout))
        case ["-m", name, *args]:
            run_module(name, args)
        case [path, *args] if not path.startswith("-"):
            run_script(path, args)
        case _:
            print(_USAGE, end="", file=lossy(sys.stderr))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
