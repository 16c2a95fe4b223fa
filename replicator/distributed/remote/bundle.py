"""The source of the end on a host, as one line that its Python reads and runs.

A host then runs the launcher's own version, needs no copy of the library for that, and
imports nothing slow: it starts in the time of a bare Python.
"""

import inspect
import json
import shlex

from replicator.distributed.processes import guard, sweep
from replicator.distributed.remote import frames, host_guard

# Byte by byte, as what follows the line is not this reader's. The alarm ends it if the
# line, or the order that follows, does not come: the host guard takes it off.
_BOOT = (
    "import json,signal;signal.alarm(60);"
    'exec(json.loads(open(0,"rb",0,closefd=False).readline()))'
)
# Imports of these modules find them in `sys.modules`, without their packages.
_PROGRAM = """\
import sys, types
if sys.version_info < (3, 11):
    sys.exit("Python must be 3.11 or newer, got " + sys.version.split()[0])
for name, source in {sources!r}.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), sys.modules[name].__dict__)
sys.modules[{main!r}].main()
"""
_PACKAGES = ("replicator.distributed.processes", "replicator.distributed.remote")


def remote_command(python: str) -> str:
    """Return the command line of a host's shell that runs what it is sent.

    Args:
      python: The interpreter on the host; `~/` is its user's home.
    """
    # Quoted, a shell leaves `~` as it is; but ssh begins in the home.
    return shlex.join([python.removeprefix("~/"), "-I", "-S", "-c", _BOOT])


def source_line() -> bytes:
    """Return the line to send first."""
    modules = (guard, sweep, frames, host_guard)
    sources = {name: "" for name in _PACKAGES}
    sources |= {module.__name__: inspect.getsource(module) for module in modules}
    program = _PROGRAM.format(sources=sources, main=host_guard.__name__)
    return json.dumps(program).encode() + b"\n"
