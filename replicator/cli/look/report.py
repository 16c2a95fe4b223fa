"""`replicator report DIR`: write one HTML page about a run."""

import argparse
import tempfile
from pathlib import Path

from replicator.base.host.paths import expanded
from replicator.checkpoint.buckets.url import is_bucket_url, parse_url
from replicator.cli.look.report_page.page import write_report
from replicator.training.reports.uploads import download_run

SUMMARY = "Write a page of a run's curves, events and environment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="what `run(directory=...)` got, or the URL of a bucket",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=expanded,
        metavar="FILE",
        help="the page (default: report.html in the run's directory, or in this one "
        "for a bucket)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    if is_bucket_url(arguments.directory):
        target = arguments.output or expanded("report.html")
        url = parse_url("DIR", arguments.directory)
        # Named as the run: the page shows it.
        name = url.path.rpartition("/")[2] or url.bucket
        with tempfile.TemporaryDirectory(prefix="replicator-report-") as above:
            folder = Path(above) / name
            download_run(url, folder)
            write_report(folder, target)
    else:
        directory = expanded(arguments.directory)
        target = arguments.output or directory / "report.html"
        write_report(directory, target)
    print(target)
    return 0
