"""Wait, with modules imported, for the moment to become one process of a group.

Imports are half of what a process does before its first step after a restart. So a
launcher may keep, for each process, one that has done them. This program, with the
standard library only, waits until the group has settled, imports, and waits until its
input has one line of JSON, the variables that it still lacks. Then it runs the script
as Python would have. If its input ends without a line, so does it.

It is a process of its own rather than a fork: its guard watches it as all others.
"""

import importlib
import json
import os
import runpy
import select
import sys

_SETTLE_S = 10.0


def command(
    python: str,
    modules: tuple[str, ...],
    script: list[str],
    *,
    settle_s: float = _SETTLE_S,
) -> list[str]:
    """Return the command line of a process that will run a script.

    Args:
      python: The interpreter.
      modules: Names of modules to import; one that is missing is left out.
      script: A path, or `-m` and a module, and its arguments.
      settle_s: Seconds before it imports: those of a start are busy enough.
    """
    # -P: the folder of this program is no place to import from.
    order = json.dumps({"modules": modules, "settle_s": settle_s})
    return [python, "-P", __file__, order, *script]


def main(arguments: list[str]) -> None:
    """Wait, then run the script in this process."""
    order, script = json.loads(arguments[0]), arguments[1:]
    if not select.select([0], [], [], order["settle_s"])[0]:
        for name in order["modules"]:
            try:
                importlib.import_module(name)
            except ImportError:  # the script raises it if it needs the module
                continue
    # Not by `sys.stdin`, which would keep for the script what is behind the line.
    with open(0, "rb", buffering=0, closefd=False) as order_input:
        line = order_input.readline()
    if not line:
        return
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    is_module = script[0] == "-m"
    sys.argv = script[is_module:]
    name = sys.argv[0]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, "" if is_module else os.path.dirname(os.path.realpath(name)))
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
