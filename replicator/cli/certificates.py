"""`replicator certificates`: the TLS files of a program that spans hosts."""

import argparse
import datetime
from pathlib import Path

from replicator.base.host.paths import expanded
from replicator.errors import ArgumentError

SUMMARY = "Make the TLS certificates of one program: for its servers, for its clients"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "folder",
        type=expanded,
        metavar="DIR",
        help="where to write them; made if it is not there",
    )
    parser.add_argument(
        "--hosts",
        nargs="+",
        default=[],
        metavar="HOST",
        help="names and addresses of the servers, besides this host's loopback",
    )
    parser.add_argument(
        "--days", type=float, default=30.0, help="how long they are valid (30)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the files, and print which of them servers and clients need."""
    try:
        from replicator.rpc.security import certificates  # `cryptography` is optional
    except ModuleNotFoundError as missing:
        raise ArgumentError(
            "`replicator certificates` must have the package `cryptography`, got "
            f"none ({missing}). Install `jax-replicator[grpc]`."
        ) from missing
    folder: Path = arguments.folder
    certificates.make_certificates(
        folder,
        hosts=[*certificates.LOOPBACK_HOSTS, *arguments.hosts],
        lifetime=datetime.timedelta(days=arguments.days),
    )
    print(f"Valid for {arguments.days:g} days, in {folder}; keys are 0600:")
    print("  servers need  ca.pem server.pem server.key")
    print("  clients need  ca.pem client.pem client.key")
    print("The authority's key is gone: nobody can add a third.")
    return 0
