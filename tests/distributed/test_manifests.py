"""Manifests of `docs/guides/clusters.md`: whole, and found by what they feed."""

import pathlib
import re
import subprocess

import pytest

from replicator.cli.main import make_parser
from replicator.distributed.launchers.detection import detect
from replicator.distributed.launchers.detectors import DETECTORS
from replicator.exit_codes import HUNG, PREEMPTED

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MANIFESTS = DOCS / "manifests"


def jobset(name="jobset.yaml"):
    yaml = pytest.importorskip("yaml", reason="the lock's development part has it")
    return yaml.safe_load((MANIFESTS / name).read_text())


def patched_jobset():
    """Return the JobSet with the patch for copies in memory, as RFC 6902 applies it."""
    manifest = jobset()
    for change in jobset("jobset_memory_copies.yaml"):
        *path, last = change["path"].strip("/").split("/")
        place = manifest
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        if change["op"] == "add":
            assert last == "-"
            place.append(change["value"])
        else:
            assert last in place
            place[last] = change["value"]
    return manifest


def pod_environ(manifest, job, pod):
    """Resolve the variables of one pod as the controllers do."""
    spec = manifest["spec"]
    [workers] = spec["replicatedJobs"]
    name, lead = manifest["metadata"]["name"], spec["coordinator"]
    labels = {
        "jobset.sigs.k8s.io/coordinator": f"{name}-{lead['replicatedJob']}-"
        f"{lead['jobIndex']}-{lead['podIndex']}.{name}",
        "jobset.sigs.k8s.io/replicatedjob-replicas": str(workers["replicas"]),
        "jobset.sigs.k8s.io/job-index": str(job),
    }
    environ = {"JOB_COMPLETION_INDEX": str(pod)}
    [container] = workers["template"]["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        if "value" in variable:
            environ[variable["name"]] = variable["value"]
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            if path == "status.podIP":
                environ[variable["name"]] = f"10.0.{job}.{pod}"
                continue
            label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)[1]
            environ[variable["name"]] = labels[label]
    return environ


def test_each_pod_of_the_jobset_finds_its_place():
    manifest = jobset()
    [workers] = manifest["spec"]["replicatedJobs"]
    pods = workers["template"]["spec"]["parallelism"]
    clusters = [
        detect(pod_environ(manifest, job, pod))
        for job in range(workers["replicas"])
        for pod in range(pods)
    ]
    assert {cluster.kind for cluster in clusters} == {"jobset"}
    assert {cluster.coordinator for cluster in clusters} == {
        "train-workers-0-0.train:8482"
    }
    assert [cluster.process_id for cluster in clusters] == list(range(8))
    assert {cluster.num_processes for cluster in clusters} == {8}


def test_a_launcher_in_each_pod_of_the_patched_jobset_leaves_its_place():
    manifest = patched_jobset()
    environ = pod_environ(manifest, 1, 2)
    [workers] = manifest["spec"]["replicatedJobs"]
    [container] = workers["template"]["spec"]["template"]["spec"]["containers"]
    _, *command = (
        each.replace("$(POD_IP)", environ["POD_IP"]) for each in container["command"]
    )
    given = make_parser().parse_args(command)
    assert given.processes == 1  # which is no group: the one around it counts
    assert (given.copies_host, given.script) == ("10.0.1.2", "train.py")
    assert detect(environ).process_id == 6


def test_the_jobset_restarts_the_preempted_and_the_hung_for_free():
    spec = jobset()["spec"]
    [workers] = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["values"] == [PREEMPTED, HUNG]
    [container] = job["template"]["spec"]["containers"]
    assert codes["containerName"] == container["name"]
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == [
        "PodFailurePolicy"
    ]


def batch_options():
    text = (MANIFESTS / "slurm.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))


def test_each_task_of_the_slurm_job_finds_its_place():
    options = batch_options()
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    clusters = [
        detect(
            {
                "SLURM_JOB_ID": "4242",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "node[12-13]",
                "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
                "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % tasks),
            }
        )
        for task in range(nodes * tasks)
    ]
    assert {cluster.host for cluster in clusters} == {"node12"}
    assert [cluster.process_id for cluster in clusters] == list(range(8))
    assert [cluster.local_devices for cluster in clusters] == [
        (task % tasks,) for task in range(8)
    ]


def test_the_slurm_job_is_told_in_time_and_requeued():
    text = (MANIFESTS / "slurm.sbatch").read_text()
    assert batch_options()["signal"] == "TERM@120"
    assert "requeue" in batch_options()
    for code in (PREEMPTED, HUNG):
        assert f'"$code" -eq {code}' in text


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_vm.sh"])
def test_a_script_is_one_that_bash_reads(name):
    subprocess.run(["bash", "-n", MANIFESTS / name], check=True)


def test_the_page_names_every_manifest():
    page = (DOCS / "guides" / "clusters.md").read_text()
    for manifest in MANIFESTS.iterdir():
        assert f"manifests/{manifest.name}" in page


def test_the_page_names_every_launcher_and_its_variables():
    page = (DOCS / "guides" / "clusters.md").read_text()
    assert "`REPLICATOR_COORDINATOR_BIND`" in page
    for kind, row in DETECTORS.items():
        assert f"(`{kind}`)" in page
        for name in "|".join(row.names).split("|"):
            assert f"`{name}`" in page or name.startswith("ray.train:")
