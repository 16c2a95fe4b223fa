"""Groups that others started: they train as those of `replicator launch` do."""

import shutil

import pytest

from benchmarks.launchers import starting
from tests.distributed.processes.launched import Launched, script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected():
    said = starting.trained(starting.reference())
    [loss] = {each["loss"] for each in said}
    assert [each["kind"] for each in said] == ["replicator"] * 2
    return loss


def of(said):
    return [(each["kind"], each["processes"], each["loss"]) for each in said]


@pytest.mark.parametrize("kind", ["torchrun", "jax"])
def test_two_processes_with_a_launcher_s_variables_train_as_one(kind, expected):
    said = starting.trained_by_hand(kind, starting.stand_ins()[kind])
    assert of(said) == [(kind, 2, expected)] * 2


@pytest.mark.parametrize(
    ("kind", "command"), [("openmpi", "mpirun"), ("pmi", "mpiexec.hydra")]
)
def test_two_processes_of_a_real_mpi_train_as_one(kind, command, expected):
    if not shutil.which(command):
        pytest.skip(f"{command} is not installed")
    said = starting.trained(starting.real_launchers(None)[kind])
    assert of(said) == [(kind, 2, expected)] * 2


@pytest.mark.parametrize("name", ["ray", "jax by JaxTrainer"])
def test_two_workers_of_ray_train_train_as_one(name, expected):
    pytest.importorskip("ray.train", reason="ray[train]", exc_type=ImportError)
    said = starting.trained(starting.real_launchers(None)[name])
    assert of(said) == [(name.split()[0], 2, expected)] * 2


UNBOUNDED = """
import jax
from replicator import distributed
if jax_first:
    jax.distributed.initialize(os.environ["REPLICATOR_COORDINATOR"], 2, rank)
jax.config.update("jax_num_cpu_devices", 2)
print("found", distributed.initialize().kind)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("replica",))
mean = jax.jit(jax.shard_map(
    lambda x: x + 0 * jax.lax.pmean(x, "replica"),
    mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False,
))
x = jax.make_array_from_process_local_data(
    NamedSharding(mesh, P("replica")), jnp.ones((2, 1000))
)
for _ in range(200): x = mean(x)
print("sum", float(x.addressable_shards[0].data.sum()))
"""


@pytest.mark.parametrize(("jax_first", "kind"), [(False, "replicator"), (True, "jax")])
def test_a_loop_that_never_waits_does_not_hang_on_several_cpu_devices(
    tmp_path, jax_first, kind
):
    code = f"jax_first = {jax_first}\n{UNBOUNDED}"
    with Launched("--processes", 2, script(tmp_path, code)) as group:
        group.wait_for("sum 1000.0", count=2)
        assert group.wait() == 0
    assert len(group.wait_for(f"found {kind}")) == 2


TOO_LATE = """
import jax, replicator
from replicator import distributed
from replicator.errors import TooLateError
count, address = 2, os.environ["REPLICATOR_COORDINATOR"]
jax.distributed.initialize(address, count, rank)
jax.devices()
for join in (distributed.initialize, replicator.Replicator):
    try:
        join()
    except TooLateError as error:
        print("refused:", error)
"""


def test_a_group_of_jax_whose_cpu_devices_would_hang_is_refused(tmp_path):
    words = ("--processes", 2, "--devices-per-process", 2)
    with Launched(*words, script(tmp_path, TOO_LATE)) as group:
        assert group.wait() == 0
    refused = group.wait_for("refused:", count=4)
    assert (
        "must run one step at a time, got JAX that already uses 2 devices"
        in (refused[0][1])
    )


ONE_EACH = """
import jax, replicator
from replicator.errors import TooLateError
from replicator.distributed.processes.ports import free_port
jax.distributed.initialize(f"127.0.0.1:{free_port()}", 1, 0)
try:
    replicator.distributed.initialize()
except TooLateError as error:
    print("refused:", error)
"""


def test_a_group_of_one_that_jax_made_of_several_is_refused(tmp_path):
    with Launched("--processes", 2, script(tmp_path, ONE_EACH)) as group:
        assert group.wait() == 0
    refused = group.wait_for("refused:", count=2)
    assert "got 1 process where replicator names 2" in refused[0][1]
