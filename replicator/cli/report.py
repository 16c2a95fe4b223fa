"""`replicator report DIR`: write one HTML page about a run."""

import argparse

from replicator.base.host.paths import expanded
from replicator.cli.report_page.page import write_report

SUMMARY = "Write a page of a run's curves, events and environment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory", type=expanded, metavar="DIR", help="what `run(directory=...)` got"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=expanded,
        metavar="FILE",
        help="the page (default: report.html in the run's directory)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    target = arguments.output or arguments.directory / "report.html"
    write_report(arguments.directory, target)
    print(target)
    return 0
