"""Each kind of cluster is found from the variables that it really sets."""

import pytest

from replicator.distributed.clusters import (
    DETECTORS,
    Cluster,
    check_address,
    detect,
    first_host,
    join_address,
    split_address,
)
from replicator.errors import ArgumentError

FOUND = {
    "replicator": (
        {
            "REPLICATOR_COORDINATOR": "10.0.0.1:5000",
            "REPLICATOR_NUM_PROCESSES": "4",
            "REPLICATOR_PROCESS_ID": "3",
        },
        ("10.0.0.1:5000", 4, 3),
    ),
    "replicator, numbered by an indexed Job": (
        {
            "REPLICATOR_COORDINATOR": "train-0.train:5000",
            "REPLICATOR_NUM_PROCESSES": "4",
            "JOB_COMPLETION_INDEX": "2",
        },
        ("train-0.train:5000", 4, 2),
    ),
    "torchrun": (
        {
            "MASTER_ADDR": "node1",
            "MASTER_PORT": "29500",
            "RANK": "1",
            "WORLD_SIZE": "2",
        },
        ("node1:29500", 2, 1),
    ),
    "tpu": (
        {"TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3", "TPU_WORKER_ID": "1"},
        ("10.0.0.2:8482", 2, 1),
    ),
    "tpu of two slices": (
        {
            "TPU_WORKER_HOSTNAMES": "b-0.b,b-1.b",
            "TPU_WORKER_ID": "1",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
            "MEGASCALE_COORDINATOR_ADDRESS": "a-0.a:8080",
        },
        ("a-0.a:8482", 4, 3),
    ),
    "jobset": (
        {
            "JOBSET_COORDINATOR": "train-workers-0-0.train",
            "JOBSET_JOBS": "2",
            "JOBSET_JOB_INDEX": "1",
            "JOBSET_PODS_PER_JOB": "4",
            "JOB_COMPLETION_INDEX": "2",
        },
        ("train-workers-0-0.train:8482", 8, 6),
    ),
    "slurm": (
        {
            "SLURM_JOB_ID": "1000",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "node[007-010,20]",
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_PROCID": "4",
        },
        ("node007:65344", 5, 4),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), FOUND.values(), ids=FOUND)
def test_a_cluster_is_found_from_its_variables(environ, expected):
    found = detect({"PATH": "/bin", **environ})
    assert found is not None
    assert (found.coordinator, found.num_processes, found.process_id) == expected


def test_every_kind_of_cluster_is_in_the_table_above():
    found = [detect(environ) for environ, _ in FOUND.values()]
    assert {cluster.kind for cluster in found if cluster} == set(DETECTORS)


def test_an_environment_without_a_cluster_has_none():
    assert detect({"PATH": "/bin", "JOB_COMPLETION_INDEX": "1"}) is None


def test_a_batch_script_outside_its_job_step_is_one_process():
    assert detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is (
        None
    )


def test_our_own_variables_come_before_the_scheduler_s():
    environ = FOUND["slurm"][0] | FOUND["replicator"][0]
    found = detect(environ)
    assert found is not None
    assert found.kind == "replicator"


@pytest.mark.parametrize(
    ("environ", "own"),
    [
        ({}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_LOCALID": "3"}, (3,)),
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "SLURM_LOCALID": "3",
                "CUDA_VISIBLE_DEVICES": "0",
            },
            None,
        ),
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "SLURM_LOCALID": "3",
                "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            },
            (3,),
        ),
    ],
)
def test_processes_that_share_a_host_share_out_its_accelerators(environ, own):
    found = detect(FOUND["slurm"][0] | environ)
    assert found is not None
    assert found.local_devices == own


def test_two_job_steps_at_once_take_two_ports():
    environ = FOUND["slurm"][0]
    ports = {detect(environ | {"SLURM_STEP_ID": str(step)}).port for step in range(8)}
    assert len(ports) == 8


REFUSED = {
    "a number is missing": (
        {"REPLICATOR_COORDINATOR": "a:1", "REPLICATOR_NUM_PROCESSES": "2"},
        "`REPLICATOR_PROCESS_ID` must be a whole number in the environment, but is "
        "not set. Set it for every process.",
    ),
    "a number is none": (
        FOUND["torchrun"][0] | {"RANK": "first"},
        "`RANK` must be a whole number in the environment, got 'first'. Set it for "
        "every process.",
    ),
    "a process beyond the last": (
        FOUND["torchrun"][0] | {"RANK": "2"},
        "`process_id` must be 0 to 1, got 2 (from torchrun). Number processes from 0.",
    ),
    "no port": (
        FOUND["replicator"][0] | {"REPLICATOR_COORDINATOR": "node1"},
        "`coordinator` must be host:port, got 'node1'. Use for example "
        "`10.0.0.1:8482`.",
    ),
    "every interface": (
        FOUND["replicator"][0] | {"REPLICATOR_COORDINATOR": "0.0.0.0:8482"},
        "`coordinator` must name one host, got '0.0.0.0:8482', which is every "
        "interface. Name an address that the other processes reach.",
    ),
}


@pytest.mark.parametrize(("environ", "message"), REFUSED.values(), ids=REFUSED)
def test_half_a_cluster_is_refused(environ, message):
    with pytest.raises(ArgumentError) as refusal:
        detect(environ)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[001-015],other", "node001"),
        ("node[3,5-7]", "node3"),
        ("rack1-node[3,5]-ib,x", "rack1-node3-ib"),
    ],
)
def test_the_first_node_of_a_list_is_found(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:65535", "[fe80::1]:8482"])
def test_addresses_are_taken_apart_and_put_together(address):
    check_address("coordinator", address)
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize("address", ["a", "a:", "a:0", "a:65536", "a b:1", ":1", "::1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ArgumentError, match="must be host:port"):
        check_address("coordinator", address)


def test_a_cluster_of_no_process_is_refused():
    with pytest.raises(ArgumentError, match="`num_processes` must be at least 1"):
        Cluster(kind="arguments", coordinator="a:1", num_processes=0, process_id=0)
