"""`replicator doctor`: check an installation, and print remedies."""

import argparse
import importlib.metadata
import os
import platform
import time
from pathlib import Path

import jax

from replicator.base.host.compilation_cache import (
    ENVIRONMENT_VARIABLE as CACHE_VARIABLE,
)
from replicator.base.host.paths import expanded
from replicator.cli.checks import judge, measure
from replicator.cli.checks.judge import Finding
from replicator.cli.tables import make_console, print_table

SUMMARY = "Check versions, devices, disk, ports and limits, and print remedies"
_DISTRIBUTION = "jax-replicator"
_PROBE_TIMEOUT_S = 120.0
_NOT_INSTALLED = Finding(
    "packages",
    "warn",
    detail="not compared: this is a checkout that was not installed",
    remedy="Run `pip install --editable .` in it.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--directory",
        type=expanded,
        default=Path(),
        metavar="DIR",
        help="where runs will write; the current directory by default",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=_PROBE_TIMEOUT_S,
        metavar="SECONDS",
        help="seconds that JAX may take to start and to add (default: %(default)g)",
    )
    parser.epilog = "Exit code 1 if a check fails; warnings are not failures."


def main(arguments: argparse.Namespace) -> int:
    """Check everything, and print one table."""
    coordinator = measure.coordinator_facts()
    findings = [
        *package_findings(),
        *jax_findings(arguments.timeout, coordinator),
        *machine_findings(arguments.directory.absolute(), coordinator),
    ]
    rows = [(each.name, each.status, _detail(each)) for each in findings]
    print_table(("check", "status", "found"), rows)
    statuses = [each.status for each in findings]
    failed, warned = statuses.count("fail"), statuses.count("warn")
    make_console().print(
        f"{len(findings)} checks: {failed} failed, {warned} warned", highlight=False
    )
    return 1 if failed else 0


def package_findings() -> list[Finding]:
    """Compare Python and the packages with what our metadata asks for."""
    installed = measure.installed_versions()
    try:
        metadata = importlib.metadata.metadata(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return [_NOT_INSTALLED]
    python = platform.python_version()
    checked = [
        judge.check_package(requirement, installed)
        for requirement in metadata.get_all("Requires-Dist") or []
    ]
    return [
        judge.check_python(python, wanted=metadata["Requires-Python"]),
        judge.check_jaxlib(jax.__version__, installed),
        *[finding for finding in checked if finding is not None],
    ]


def jax_findings(
    timeout_s: float, coordinator: measure.CoordinatorFacts
) -> list[Finding]:
    """Start JAX in a process of its own, and judge what it saw."""
    found = _probed(timeout_s)
    devices = judge.check_devices(
        found,
        accelerators=measure.accelerators(),
        installed=measure.installed_versions(),
    )
    if isinstance(found, str):
        return [devices]
    return [
        devices,
        judge.check_cpu_pool(found),
        judge.check_dispatch(found, several_processes=coordinator.several_processes),
        judge.check_cache(
            found,
            write_problem=measure.write_problem(found.cache_directory),
            chosen_off=os.environ.get(CACHE_VARIABLE) == "0",
        ),
    ]


def machine_findings(
    directory: Path, coordinator: measure.CoordinatorFacts
) -> list[Finding]:
    """Judge the machine, and the directory that runs will write to."""
    disk = measure.disk_facts(directory)
    installed_s = measure.installed_at_s()
    return [
        judge.check_disk(disk),
        judge.check_loopback(measure.loopback_problem()),
        judge.check_coordinator(coordinator),
        judge.check_launchers(coordinator),
        judge.check_shared_memory(measure.shared_memory_bytes()),
        judge.check_open_files(*measure.open_files()),
        judge.check_clock(time.time(), installed_s=installed_s, disk=disk),
    ]


def _probed(timeout_s: float) -> measure.Probe | str:
    try:
        return measure.probe(timeout_s=timeout_s)
    except (TimeoutError, RuntimeError) as failure:
        return str(failure)


def _detail(finding: Finding) -> str:
    return "\n→ ".join(part for part in (finding.detail, finding.remedy) if part)
