"""A TPU VM's metadata, from a real server on loopback, becomes GKE's variables."""

import http.server
import threading

import pytest

from replicator.distributed.launchers import tpu_metadata
from replicator.distributed.launchers.detection import detect
from replicator.distributed.launchers.tpu_metadata import variables, with_tpu_metadata
from replicator.errors import DistributedError

ATTRIBUTES = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
    "tpu-env": "ZONE: 'a'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '0'\n"
    "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2:8080'\n",
}


@pytest.fixture
def metadata_server():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            asked_right = self.headers["Metadata-Flavor"] == "Google"
            known = name in ATTRIBUTES and asked_right
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(ATTRIBUTES.get(name, "").encode() if known else b"")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_worker_its_peers_and_its_slice_are_read(metadata_server):
    assert variables(metadata_server) == {
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "0",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.2:8080",
    }


def test_a_tpu_vm_is_found_by_its_metadata(metadata_server):
    cluster = detect(with_tpu_metadata({"GCE_METADATA_IP": metadata_server}))
    assert cluster is not None
    assert (cluster.coordinator, cluster.num_processes, cluster.process_id) == (
        "10.0.0.2:8482",
        4,
        1,
    )


def test_a_machine_without_tpus_asks_nobody():
    assert with_tpu_metadata({"PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["TPU_WORKER_ID", "REPLICATOR_NUM_PROCESSES"])
def test_where_variables_describe_the_group_nobody_is_asked(monkeypatch, name):
    monkeypatch.setattr(tpu_metadata, "_is_tpu_vm", lambda: True)
    environ = {name: "0", "GCE_METADATA_IP": "127.0.0.1:1"}
    assert with_tpu_metadata(environ) is environ


def test_a_server_that_is_not_there_says_nothing():
    assert variables("127.0.0.1:1") == {}


def test_a_tpu_vm_whose_server_is_not_there_is_not_alone(monkeypatch):
    monkeypatch.setattr(tpu_metadata, "_is_tpu_vm", lambda: True)
    with pytest.raises(DistributedError, match="got no answer from 127"):
        with_tpu_metadata({"GCE_METADATA_IP": "127.0.0.1:1"})


def test_a_tpu_vm_whose_server_names_no_others_is_one(monkeypatch, metadata_server):
    monkeypatch.setattr(tpu_metadata, "_is_tpu_vm", lambda: True)
    monkeypatch.setitem(ATTRIBUTES, "agent-worker-number", "")
    environ = {"GCE_METADATA_IP": metadata_server}
    assert with_tpu_metadata(environ) == environ
