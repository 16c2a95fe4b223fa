"""Each launcher is found, or refused, by one set of laws; nobody is alone unasked."""

import itertools

import pytest

from benchmarks.launchers import environments
from benchmarks.launchers.cases import CASES, count
from benchmarks.launchers.environments import LAUNCHERS
from replicator.distributed.launchers.detection import detect, explain
from replicator.distributed.launchers.detectors import DETECTORS, first_host
from replicator.errors import ArgumentError

WAYS = LAUNCHERS | {"tpu slices": environments.tpu_slices}
COORDINATORS = {
    "replicator": "10.0.0.1:5000",
    "ray": "10.0.0.9:4000",
    "kubeflow": "job-node-0-0.job:6666",
    "torchrun": "node1:29500",
    "tpu": "train-0.train:8482",
    "tpu slices": "train-slice-0-0.train:8482",
    "jobset": "train-workers-0-0.train:8482",
    "slurm": "node007:65344",
}
EACH_VARIABLE = [(way, name) for way, environ in WAYS.items() for name in environ(2, 4)]
OUTSPOKEN = {"replicator", "ray"}
"""For this library, or the launcher's own answer: these count before all others."""


def place(environ, **arguments):
    found = detect({"PATH": "/bin", **environ}, **arguments)
    return found and (found.process_id, found.num_processes)


def refusal(environ):
    with pytest.raises(ArgumentError) as refused:
        detect(environ)
    return str(refused.value)


def test_every_launcher_is_under_the_laws():
    assert LAUNCHERS.keys() == DETECTORS.keys()


@pytest.mark.parametrize("way", WAYS)
def test_each_process_finds_its_place(way):
    assert [place(WAYS[way](n, 4)) for n in range(4)] == [(n, 4) for n in range(4)]
    found = {detect(WAYS[way](n, 4)).coordinator for n in range(4)}
    assert len(found) == 1
    assert found == {COORDINATORS.get(way, *found)}


def outcome(environ):
    try:
        return place(environ)
    except ArgumentError as refused:
        return str(refused)


@pytest.mark.parametrize(("way", "name"), EACH_VARIABLE)
def test_a_missing_variable_leaves_nobody_alone_or_in_another_s_place(way, name):
    for number in range(4):
        environ = WAYS[way](number, 4)
        del environ[name]
        found = outcome(environ)
        if isinstance(found, str):
            # Where a launcher names no host, there is no variable to name.
            assert f"`{name}`" in found or "`coordinator`" in found
        else:
            assert found == (number, 4)


@pytest.mark.parametrize("way", WAYS)
def test_a_number_beyond_the_size_is_refused_by_its_name(way):
    levels = DETECTORS[way.split()[0]].levels
    number = levels[-1][0].partition("|")[0]
    assert f"`{number}`" in refusal(WAYS[way](2, 4) | {number: "4"})


@pytest.mark.parametrize("value", ["first", "-1", "1.5"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name.partition("|")[0])
        for kind, row in DETECTORS.items()
        for level in row.levels
        for name in level
        if not name.startswith("TPU_PROCESS")
    ],
)
def test_what_is_no_number_is_refused_by_its_name(kind, name, value):
    message = refusal(LAUNCHERS[kind](2, 4) | {name: value})
    assert f"`{name}` must be a whole number in the environment, got '{value}'" in (
        message
    )


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(LAUNCHERS, 2)])
def test_two_launchers_agree_or_are_refused_by_their_names(one, other):
    assert place(LAUNCHERS[one](2, 4) | LAUNCHERS[other](2, 4)) == (2, 4)
    both = LAUNCHERS[one](2, 4) | LAUNCHERS[other](3, 4)
    if OUTSPOKEN & {one, other}:
        first = min(one, other, key=[*LAUNCHERS].index)
        assert detect(both).kind == first
    else:
        message = refusal(both)
        assert one in message
        assert other in message


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nobody_is_alone_unasked_or_in_another_s_place(case):
    assert count(case) == (0, 0)


REFUSED = {
    "a size alone": (
        {"WORLD_SIZE": "4"},
        "`RANK`, `MASTER_ADDR` must be set beside `WORLD_SIZE` (torchrun), got "
        "nothing. Set all of them in each process, or none.",
    ),
    "a number alone, also of the first": (
        {"RANK": "0"},
        "`WORLD_SIZE`, `MASTER_ADDR` must be set beside `RANK` (torchrun), got "
        "nothing. Set all of them in each process, or none.",
    ),
    "our own, half": (
        {"REPLICATOR_COORDINATOR": "a:1", "REPLICATOR_NUM_PROCESSES": "2"},
        "`REPLICATOR_PROCESS_ID` or `JOB_COMPLETION_INDEX` must be set beside "
        "`REPLICATOR_NUM_PROCESSES`, `REPLICATOR_COORDINATOR` (replicator), got "
        "nothing. Set all of them in each process, or none.",
    ),
    "two that disagree": (
        environments.pytorch(1, 2) | environments.slurm(3, 4),
        "`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` (slurm) and `RANK`, `WORLD_SIZE` "
        "(torchrun) must name one place in one group, got process 3 of 4 and process 1 "
        "of 2. Unset those of the one that did not start this process.",
    ),
    "half of one that disagrees": (
        {"WORLD_SIZE": "2"} | environments.slurm(3, 4),
        "`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` (slurm) and `WORLD_SIZE` (torchrun) "
        "must name one place in one group, got process 3 of 4 and a process of 2. "
        "Unset those of the one that did not start this process.",
    ),
    "a number alone that disagrees": (
        {"RANK": "2"} | environments.slurm(3, 4),
        "`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` (slurm) and `RANK` (torchrun) must "
        "name one place in one group, got process 3 of 4 and process 2 of no size. "
        "Unset those of the one that did not start this process.",
    ),
    "several hosts, and none named": (
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
        "`coordinator` must be given where the launcher (pmi) names no host, got "
        "process 1 of 4 from `PMI_RANK`, `PMI_SIZE`. Call "
        '`initialize(coordinator="HOST:8482")` with the host of process 0.',
    ),
    "a process beyond the last": (
        environments.pytorch(2, 2),
        "`RANK` and `WORLD_SIZE` must be the number of a process and of all, got 2 of "
        "2. Number processes from 0.",
    ),
    "no process": (
        environments.pytorch(0, 0),
        "`RANK` and `WORLD_SIZE` must be the number of a process and of all, got 0 of "
        "0. Number processes from 0.",
    ),
    "digits that Python reads and no launcher writes": (
        environments.pytorch(0, 2) | {"RANK": "\u0661"},
        "`RANK` must be a whole number in the environment, got '\u0661'. Set it for "
        "every process.",
    ),
    "more digits than Python reads": (
        environments.pytorch(0, 2) | {"WORLD_SIZE": "9" * 5000},
        "`WORLD_SIZE` must be a whole number in the environment, got "
        f"{'9' * 5000!r}. Set it for every process.",
    ),
    "hosts of a launcher that is not known": (
        {"SM_HOSTS": '["algo-1", "algo-2"]'},
        "`SM_HOSTS` must not count several processes where no launcher that is known "
        'numbers them, got \'["algo-1", "algo-2"]\'. Call `initialize` with all '
        "three arguments, or set REPLICATOR_NUM_PROCESSES=1 to train alone.",
    ),
    "no port": (
        environments.replicator(0, 2) | {"REPLICATOR_COORDINATOR": "node1"},
        "`coordinator` must be host:port, got 'node1'. Use for example "
        "`10.0.0.1:8482`.",
    ),
    "every interface": (
        environments.replicator(0, 2) | {"REPLICATOR_COORDINATOR": "0.0.0.0:8482"},
        "`coordinator` must name one host, got '0.0.0.0:8482', which is every "
        "interface. Name an address that the other processes reach.",
    ),
    "every interface, as the resolver reads it": (
        environments.replicator(0, 2) | {"REPLICATOR_COORDINATOR": "0:8482"},
        "`coordinator` must name one host, got '0:8482', which is every interface. "
        "Name an address that the other processes reach.",
    ),
}


@pytest.mark.parametrize(("environ", "message"), REFUSED.values(), ids=REFUSED)
def test_half_a_group_is_refused(environ, message):
    assert refusal(environ) == message


def test_our_variables_take_the_number_of_an_indexed_job():
    environ = environments.replicator(0, 4) | {"JOB_COMPLETION_INDEX": "2"}
    del environ["REPLICATOR_PROCESS_ID"]
    assert place(environ) == (2, 4)


def test_an_address_of_ours_leaves_the_numbers_to_the_launcher():
    environ = environments.jobset(3, 4) | {"REPLICATOR_COORDINATOR": "10.0.0.1:5000"}
    assert place(environ) == (3, 4)
    assert detect(environ).coordinator == "10.0.0.1:5000"


def test_a_step_on_some_hosts_of_a_job_meets_on_its_own_first_one():
    step = environments.sbatch(4, "node[001-010]") | environments.slurm(1, 2)
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert detect(step | pmi).host == "node007"


ADDRESSES = {
    "an argument": ({}, {"coordinator": "a:1"}, "a:1"),
    "ours": ({"REPLICATOR_COORDINATOR": "b:2"}, {}, "b:2"),
    "JAX's": ({"JAX_COORDINATOR_ADDRESS": "c:3"}, {}, "c:3"),
    "PyTorch's": ({"MASTER_ADDR": "d", "MASTER_PORT": "4"}, {}, "d:4"),
    "SLURM's": (environments.sbatch(4), {}, "node007"),
    "that of mpirun": ({"OMPI_MCA_orte_hnp_uri": "5.0;tcp://e,f:6"}, {}, "e"),
    "that of mpirun by IPv6": (
        {"OMPI_MCA_orte_hnp_uri": "5.0;tcp6://[fe80::1,fe80::2]:6"},
        {},
        "[fe80::1]",
    ),
}


@pytest.mark.parametrize(
    ("environ", "arguments", "address"), ADDRESSES.values(), ids=ADDRESSES
)
def test_mpi_on_several_hosts_takes_the_address_that_is_set(
    environ, arguments, address
):
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    found = detect(ranks | environ, **arguments)
    assert (found.process_id, found.num_processes) == (1, 4)
    assert found.coordinator.startswith(address)


def test_the_port_of_torchrun_s_agent_is_left_to_it():
    found = {detect(environments.torchrun(n, 4)).port for n in range(4)}
    assert len(found) == 1
    assert 29500 not in found
    assert found != {detect(environments.torchrun(0, 4, run="c8")).port}


def test_processes_whose_agents_restarted_differently_meet():
    one, other = (environments.torchrun(n, 2, restarts=n) for n in range(2))
    assert detect(one).coordinator == detect(other).coordinator


@pytest.mark.parametrize(
    ("environ", "own"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_LOCALID": "3"}, (3,)),
        ({"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (3,)),
    ],
)
def test_processes_that_share_a_host_share_out_its_accelerators(environ, own):
    assert detect(environments.slurm(3, 4) | environ).local_devices == own


@pytest.mark.parametrize("kind", ["torchrun", "openmpi", "pmi", "slurm"])
def test_launchers_that_number_a_host_s_processes_give_each_an_accelerator(kind):
    local = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert detect(LAUNCHERS[kind](3, 4) | local).local_devices == (3,)


def test_two_job_steps_at_once_take_two_ports():
    environ = environments.slurm(0, 4)
    ports = {detect(environ | {"SLURM_STEP_ID": str(step)}).port for step in range(8)}
    assert len(ports) == 8


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


def test_what_was_found_and_what_was_not_is_explained():
    environ = environments.slurm(1, 2) | environments.torchrun(5, 8)
    [slurm, torchrun, rest] = explain(environ | {"WORLD_SIZE": "8"})
    assert torchrun.startswith("torchrun: process 5 of 8 at node1:")
    assert slurm.startswith("slurm: process 1 of 2 at node007:")
    assert slurm.endswith(", left out for torchrun")
    assert rest.startswith("not set: replicator (REPLICATOR_NUM_PROCESSES), ")
    assert "openmpi (OMPI_COMM_WORLD_SIZE)" in rest


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            {"WORLD_SIZE": "4"},
            "torchrun: a process of 4 at no known address (WORLD_SIZE), without `RANK`",
        ),
        ({"WORLD_SIZE": "1"}, "torchrun: one process (WORLD_SIZE)"),
        (environments.sbatch(4), "slurm: a batch script is one process; `srun` "),
        ({"JOB_COMPLETION_INDEX": "1"}, "kubernetes: JOB_COMPLETION_INDEX numbers "),
    ],
)
def test_why_a_process_is_alone_is_explained(environ, line):
    assert explain(environ)[0].startswith(line)
