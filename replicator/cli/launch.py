"""`replicator launch`: run a script as several processes, here or on hosts."""

import argparse
import functools
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from replicator.checkpoint.copies.keeper import serve_keeper
from replicator.distributed.processes.group import launch
from replicator.distributed.processes.policy import LaunchPolicy
from replicator.distributed.remote.hosts import Hosts
from replicator.distributed.remote.machine_file import read_hosts
from replicator.errors import ArgumentError, check_count, check_positive

SUMMARY = "Run a script as several processes; restart them when one dies"

_EPILOG = """\
The script joins the group by `replicator.distributed.initialize()`. When one process
dies, all are started again, at most --max-restarts times without progress (a checkpoint
is progress), but not after a NaN. Exit codes: 0; 75 where the run was preempted and can
go on; 128 + n after signal n; otherwise the first failure's.

With --machine a process starts on each node of the file, by ssh, in this folder, which
all nodes have. It asks for no password and no key of a host.

  replicator launch --processes 4 --devices-per-process 2 train.py --lr 0.1
  replicator launch --machine cluster.yml train.py --lr 0.1
"""
_PRELOADED = (
    *("jax", "optax", "tensorstore", "replicator.replicator"),
    *("replicator.distributed", "replicator.rpc"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    defaults = LaunchPolicy(processes=1)
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_places(parser)
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="fake CPU devices for each; by default those that it finds",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=defaults.max_restarts,
        metavar="N",
        help="restarts without progress before giving up (default %(default)s)",
    )
    parser.add_argument(
        "--stop-grace",
        type=float,
        default=defaults.stop_grace_s,
        metavar="SECONDS",
        help="time to save and end after SIGTERM or Ctrl-C (default %(default)g)",
    )
    parser.add_argument(
        "--copy-bytes",
        type=int,
        metavar="N",
        help="most bytes of copies in memory, for runs with memory_copy_every "
        "(default: half of this host's)",
    )
    parser.add_argument(
        "--copies-host",
        metavar="HOST",
        help="this host's name for the launchers of others: copies in memory go to the "
        "next host, too",
    )
    parser.add_argument(
        "--ready",
        action="store_true",
        help="keep a process ready for each, which has imported jax and replicator: "
        "restarts are seconds faster (JAX's variables must not be set in the script)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument("script", metavar="SCRIPT", help="what each process runs")
    own = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own"
    )
    own.required = (
        False  # else argparse would name it in messages about what is missing
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    places = parser.add_mutually_exclusive_group(required=True)
    places.add_argument(
        "--processes", type=int, metavar="N", help="how many processes on this host"
    )
    places.add_argument(
        "--machine", metavar="FILE", help="YAML of nodes, each of which gets a process"
    )
    parser.add_argument(
        "--via",
        metavar="COMMAND",
        help="with --machine: what runs a shell's command on {host}, instead of ssh",
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        metavar="SECONDS",
        help="with --machine: a host without contact ends its process (default 300)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the group, and return its exit code."""
    hosts = _hosts(arguments)
    if hosts is None:
        check_count("processes", arguments.processes)
    if arguments.devices_per_process is not None:
        check_count("devices_per_process", arguments.devices_per_process)
    check_count(
        "max_restarts", arguments.max_restarts, "Use 0 to never restart.", least=0
    )
    check_positive("stop_grace", arguments.stop_grace, "Use 300.")
    if arguments.copy_bytes is not None:
        check_count("copy_bytes", arguments.copy_bytes)
    if not arguments.module and not Path(arguments.script).is_file():
        raise ArgumentError(
            f"`script` must be a file, got {arguments.script!r}. Give the path of a "
            "Python script, or `-m` and a module's name."
        )
    if arguments.module and not _is_module(arguments.script):
        raise ArgumentError(
            f"`module` must be one that Python finds, got {arguments.script!r}. Run "
            "`replicator launch` in the folder that holds it, or set PYTHONPATH."
        )
    policy = LaunchPolicy(
        processes=arguments.processes if hosts is None else len(hosts),
        max_restarts=arguments.max_restarts,
        stop_grace_s=arguments.stop_grace,
    )
    module = ["-m"] if arguments.module else []
    command = [sys.executable, *module, arguments.script, *arguments.arguments]
    if hosts is not None:
        return launch(command, policy, hosts=hosts)
    return launch(
        command,
        policy,
        devices_per_process=arguments.devices_per_process,
        beside=functools.partial(
            serve_keeper,
            most_bytes=arguments.copy_bytes,
            host=arguments.copies_host,
        ),
        preload=_PRELOADED if arguments.ready else (),
    )


def _hosts(arguments: argparse.Namespace) -> Hosts | None:
    """Return the hosts of `--machine`; None without it."""
    given = vars(arguments)
    of_hosts, of_this_host = ("via", "lost_after"), ("copy_bytes", "copies_host")
    if arguments.machine is None:
        for name in of_hosts:
            if given[name] is not None:
                raise ArgumentError(
                    f"`{name}` must come with `machine`, got {given[name]!r} alone. "
                    "Add `--machine cluster.yml`."
                )
        return None
    for name in (*of_this_host, "ready"):
        if given[name]:
            raise ArgumentError(
                f"`{name}` must not be given with `machine`, got {given[name]!r}. "
                "Leave it out: it is for processes of this host."
            )
    lost_after_s = 300.0 if arguments.lost_after is None else arguments.lost_after
    check_positive("lost_after", lost_after_s, "Use 300.")
    hosts = read_hosts(arguments.machine, devices=arguments.devices_per_process)
    return Hosts(hosts, via=arguments.via, lost_after_s=lost_after_s)


def _is_module(name: str) -> bool:
    # Only the outermost part: to look for the others would run what is in it.
    top = name.partition(".")[0]
    in_this_folder = PathFinder.find_spec(top, [str(Path.cwd())])
    return bool(top) and bool(in_this_folder or importlib.util.find_spec(top))
