"""Variables of a TPU VM, read from its metadata server.

On a TPU VM no variable numbers the workers: the metadata server does. Its answers get
the names of GKE's variables, which `detect` reads, so that detection stays pure.
"""

import importlib.util
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from replicator.errors import DistributedError

_TIMEOUT_S = 5.0
_DESCRIBED = {"TPU_WORKER_ID", "TPU_SKIP_MDS_QUERY", "REPLICATOR_NUM_PROCESSES"}


def with_tpu_metadata(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return `environ`, on a TPU VM with the variables of its metadata.

    Elsewhere, and where variables describe the group already, no request is sent.

    Args:
      environ: Environment variables.

    Raises:
      DistributedError: The server of a TPU VM, which may have peers, does not answer.
    """
    if _DESCRIBED & environ.keys():
        return environ
    server = environ.get("GCE_METADATA_IP")
    if not server and not _is_tpu_vm():
        return environ
    server = server or "metadata.google.internal"
    found = variables(server)
    if not found and _is_tpu_vm() and not _answers(server):
        raise DistributedError(
            f"A TPU VM's metadata server must number its hosts, got no answer from "
            f"{server}. Set TPU_SKIP_MDS_QUERY=1 if there is one host, or give "
            "`initialize` its arguments."
        )
    return {**found, **environ}


def variables(server: str) -> dict[str, str]:
    """Return the worker's number, its peers, and its slice; empty if it has none.

    Args:
      server: Host, or host:port, of the metadata server.
    """
    worker = _attribute(server, "agent-worker-number")
    endpoints = _attribute(server, "worker-network-endpoints")
    if not worker or not endpoints:
        return {}
    found = {
        "TPU_WORKER_ID": worker,
        "TPU_WORKER_HOSTNAMES": ",".join(map(_host, endpoints.split(","))),
    }
    # Lines such as: MEGASCALE_NUM_SLICES: '2'
    for line in (_attribute(server, "tpu-env") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip().startswith("MEGASCALE_"):
            found[name.strip()] = value.strip().strip("'")
    return found


def _host(endpoint: str) -> str:
    """Take the host from `host`, or from the older `name:id:ip`."""
    return endpoint.strip().split(":")[-1]


def _attribute(server: str, name: str) -> str | None:
    try:
        return _ask(server, f"attributes/{name}")
    except OSError:  # also one that has no such attribute
        return None


def _answers(server: str) -> bool:
    try:
        _ask(server, "")
    except OSError as failure:
        return isinstance(failure, urllib.error.HTTPError)
    return True


def _ask(server: str, name: str) -> str:
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    # No proxy: the server is link-local, and a proxy would see the question.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        return response.read(1 << 20).decode()


def _is_tpu_vm() -> bool:
    devices = ("/dev/accel0", "/dev/vfio/0")
    return (
        importlib.util.find_spec("libtpu") is not None
        and any(map(os.path.exists, devices))
        and "Google" in _product_name()
    )


def _product_name() -> str:
    try:
        return Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return ""
