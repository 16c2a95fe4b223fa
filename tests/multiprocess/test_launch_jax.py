"""Processes that meet, add over gloo, die in the middle of it, and start again."""

import json
import re
import signal
import time

import pytest

from tests.distributed.processes.launched import Launched, kill, script

pytestmark = pytest.mark.slow

JOIN = """
import replicator
from replicator import distributed
group = distributed.initialize(heartbeat_s=100)
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("replica",))
add = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x, "replica"),
    mesh=mesh, in_specs=P("replica"), out_specs=P(), check_vma=False,
))
def total():
    own = jnp.full(jax.local_device_count(), 1.0 + rank)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("replica")), own)
    return float(add(x)[0])
print("joined", attempt, total(), flush=True)
"""
FOREVER = "\nwhile True: total()\n"
ONCE = JOIN + "if attempt: sys.exit()" + FOREVER


@pytest.mark.parametrize(("processes", "devices"), [(3, 1), (2, 2)])
def test_processes_meet_and_add(tmp_path, processes, devices):
    words = ("--processes", processes, "--devices-per-process", devices)
    with Launched(*words, script(tmp_path, JOIN)) as group:
        assert group.wait() == 0
    total = devices * sum(range(1, processes + 1))
    assert group.text.count(f"joined 0 {total:.1f}") == processes


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_restarts_all_at_once(tmp_path, victim):
    with Launched("--processes", 2, script(tmp_path, ONCE)) as group:
        group.wait_for("joined 0 3.0", count=2)
        pids = [group.pid_of(rank) for rank in range(2)]
        killed_s = time.monotonic()
        kill(pids[victim], signal.SIGKILL)
        assert group.wait() == 0
        assert not group.alive()
    # The other one ends by itself when its connection breaks, and may be seen first.
    ends = f"process {victim} was killed by SIGKILL|process {1 - victim} exited with"
    assert re.search(ends, group.text), group.text
    # About 30 ms on a quiet machine: it waits for no heartbeat.
    assert group.wait_for("starting all processes again now")[0][0] - killed_s < 60
    assert group.text.count("joined 1 3.0") == 2


def test_a_stopped_rank_is_noticed_by_the_heartbeat_and_all_are_restarted(tmp_path):
    train = script(tmp_path, ONCE.replace("heartbeat_s=100", "heartbeat_s=10"))
    with Launched("--processes", 2, train) as group:
        group.wait_for("joined 0 3.0", count=2)
        kill(group.pid_of(1), signal.SIGSTOP)
        assert group.wait() == 0
        assert not group.alive()
    assert group.text.count("joined 1 3.0") == 2


def test_a_rank_that_raises_does_not_wait_for_those_that_wait_for_it(tmp_path):
    code = JOIN + "if attempt: sys.exit()\nif rank: raise ValueError('bug')" + FOREVER
    with Launched("--processes", 2, script(tmp_path, code)) as group:
        assert group.wait() == 0
    [(raised_s, _)] = group.wait_for("ValueError: bug")
    assert group.wait_for("starting all")[0][0] - raised_s < 60


def test_sigterm_ends_a_loop_that_has_no_handler(tmp_path):
    with Launched("--processes", 2, script(tmp_path, JOIN + FOREVER)) as group:
        group.wait_for("joined", count=2)
        group.tell(signal.SIGTERM)
        assert group.wait() == 128 + signal.SIGTERM


MISSING = """
from replicator import distributed
from replicator.errors import DistributedTimeoutError
started = time.monotonic()
try:
    if rank == 1: sys.exit()
    distributed.initialize(timeout_s=25)  # the others may come far apart
except DistributedTimeoutError as error:
    print("after", round(time.monotonic() - started), error)
"""


def test_who_does_not_come_is_named_in_bounded_time(tmp_path):
    with Launched("--processes", 3, script(tmp_path, MISSING)) as group:
        assert group.wait() == 0
    said = [line for _, line in group.wait_for("process 1 of 3 did not", count=2)]
    assert all(int(line.split()[2]) < 100 for line in said)


AGREE = (
    JOIN
    + """
import json, threading
from replicator.errors import DistributedError
def say(*what): print("said", json.dumps(what), flush=True)
say("values", distributed.exchange("value", {"rank": rank, "list": [1, None]}))
say("any", [distributed.any_process("flag", rank == 1) for _ in range(2)])
for n in range(50): assert distributed.exchange("n", n) == [n, n]
# What one thread agrees on does not disturb another.
thread = threading.Thread(target=distributed.barrier, args=("thread",))
thread.start(); distributed.barrier("main"); thread.join()
try:
    distributed.barrier("here" if rank else "there", timeout_s=2)
except DistributedError as error:
    say("missing", str(error))
distributed.barrier("again")
from replicator.distributed.coordination import coordination_client
keys = coordination_client().key_value_dir_get("replicator/agreement/n#49/")
say("old", len(keys))
distributed.barrier("end")
"""
)


def test_two_processes_agree(tmp_path):
    with Launched("--processes", 2, script(tmp_path, AGREE)) as group:
        assert group.wait() == 0, group.text
    said = {}
    for _, line in group.wait_for("] said "):
        kind, value = json.loads(line.partition("said ")[2])
        said.setdefault(kind, {})[int(line[1])] = value
    both = [{"rank": 0, "list": [1, None]}, {"rank": 1, "list": [1, None]}]
    assert said["values"] == {0: both, 1: both}
    assert said["any"] == {0: [True, True], 1: [True, True]}
    assert said["old"] == {0: 0, 1: 0}
    assert (
        "`there` must be reached by all processes within 2 s, but process 1 (on "
        in (said["missing"][0])
    )
    # It has given up as well by now, and may wait at the next one.
    assert "Process 1 waits at `" in said["missing"][0]


SAME = (
    JOIN
    + """
from replicator.errors import TooLateError
assert distributed.initialize() == group
try:
    distributed.initialize("127.0.0.1:1", 5, 2)
except TooLateError as error:
    print("refused:", error)
"""
)


def test_the_same_group_may_be_joined_twice_and_no_other(tmp_path):
    with Launched("--processes", 2, script(tmp_path, SAME)) as group:
        assert group.wait() == 0
    refused = group.wait_for("refused:", count=2)
    assert (
        "must join one group only, got process 2 of 5 at 127.0.0.1:1" in refused[0][1]
    )


LISTENERS = (
    JOIN
    + """
listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout
port = ":" + str(group.port)
for address in {line.split()[3] for line in listening.splitlines()}:
    if address.endswith(port): print("coordinator listens on", address)
distributed.barrier("looked")
"""
)


def test_the_coordinator_listens_on_its_named_address_only(tmp_path):
    with Launched("--processes", 2, script(tmp_path, LISTENERS)) as group:
        assert group.wait() == 0
    said = group.wait_for("coordinator listens on", count=2)
    assert all("127.0.0.1" in line for _, line in said)


def test_processes_that_do_not_join_are_not_trainings_of_their_own(
    tmp_path, pytestconfig
):
    train = script(
        tmp_path, "import replicator; replicator.Replicator(); print('alone')"
    )
    environ = {"PYTHONPATH": str(pytestconfig.rootpath)}
    with Launched("--processes", 2, train, environ=environ) as group:
        assert group.wait() == 1
    assert "got one of 2 that is alone. Call `replicator.distributed" in group.text
    assert "not started again" in group.text
    assert "alone\n" not in group.text


NAN = """
from replicator import distributed
distributed.initialize()
import jax.numpy as jnp, replicator
def step_fn(state, batch):
    return state, {"loss": jnp.float32("nan")}
replicator.run(
    step_fn, [jnp.ones((2, 1))], init_fn=lambda key: {}, steps=3, display=False
)
"""


def test_a_run_that_met_a_nan_is_not_started_again(tmp_path, pytestconfig):
    train = script(tmp_path, NAN)
    environ = {"PYTHONPATH": str(pytestconfig.rootpath)}
    with Launched("--processes", 2, train, environ=environ) as group:
        assert group.wait() == 1
    assert "`loss` must be finite, got nan at step 1" in group.text
    assert "not started again: it would end the same way" in group.text
    assert "starting all processes again" not in group.text
