"""`replicator launch` with real processes that do not start JAX: exits and signals."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from replicator.exit_codes import INTERRUPTED, PREEMPTED
from replicator.rpc import Secret
from tests.distributed.processes.launched import Launched, kill, script
from tests.multiprocess.groups import at_most
from tests.multiprocess.worker_processes import wait_until

pytestmark = pytest.mark.slow

FOREVER = "\nwhile True: signal.pause()\n"


def test_a_crash_loop_is_restarted_three_times_and_its_first_traceback_shown(tmp_path):
    train = script(
        tmp_path,
        "if rank == 1: raise ValueError(f'bug, attempt {attempt}')" + FOREVER,
    )
    with Launched("--processes", 2, train) as group:
        assert group.wait() == 1
        assert not group.alive()
    for attempt in range(4):
        assert f"bug, attempt {attempt}" in group.text
    assert "here 4" not in group.text
    end = group.text.partition("gave up after 3 restart(s) without progress")[2]
    assert "the first failure was process 1 in attempt 0" in end
    assert "Traceback (most recent call last):" in end
    assert end.rstrip().endswith("[1] ValueError: bug, attempt 0")


def test_the_last_process_to_fail_is_quoted_too(tmp_path):
    train = script(tmp_path, "raise ValueError(f'bug, attempt {attempt}')")
    with Launched("--processes", 1, "--max-restarts", 1, train) as group:
        assert group.wait() == 1
    assert group.text.endswith("[0] ValueError: bug, attempt 0")


def test_a_restart_begins_at_once_after_a_death(tmp_path):
    train = script(tmp_path, "print('ready', attempt)" + FOREVER)
    with Launched("--processes", 2, "--max-restarts", 4, train) as group:
        delays = []
        for attempt in range(3):
            group.wait_for(f"ready {attempt}", count=2)
            killed_s = time.monotonic()
            kill(group.pid_of(1, attempt), signal.SIGKILL)
            told = group.wait_for("starting all processes again", count=attempt + 1)
            delays.append(told[attempt][0] - killed_s)
        group.tell(signal.SIGTERM)
        group.wait()
    # It waits for no heartbeat, which takes 10 s at least: 30 ms on a quiet machine.
    assert min(delays) <= 5, delays


def test_progress_allows_more_restarts(tmp_path):
    train = script(
        tmp_path,
        "from replicator.distributed import report_progress\n"
        "report_progress(attempt)\n"
        "sys.exit(7 if attempt < 5 else 0)",
    )
    with Launched("--processes", 1, train) as group:
        assert group.wait() == 0
    assert "here 5" in group.text
    assert "step 4 is safe" in group.text


def test_a_preempted_group_says_so_and_is_not_restarted(tmp_path):
    train = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nprint('ready')"
        + FOREVER,
    )
    with Launched("--processes", 2, train) as group:
        group.wait_for("ready", count=2)
        with at_most(60):
            group.tell(signal.SIGTERM)
            assert group.wait() == PREEMPTED
        assert not group.alive()
    assert "here 1" not in group.text


def test_a_hung_group_is_restarted(tmp_path):
    train = script(
        tmp_path, "if attempt == 0 and rank == 0: sys.exit(76)\nif attempt: sys.exit()"
    )
    train.write_text(train.read_text() + FOREVER)
    with Launched("--processes", 2, train) as group:
        assert group.wait() == 0
    assert "process 0 exited with code 76 (hung)" in group.text


def test_sigterm_arrives_once_and_a_second_one_kills(tmp_path):
    train = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        "print('ready')" + FOREVER,
    )
    with Launched("--processes", 2, train) as group:
        group.wait_for("ready", count=2)
        group.tell(signal.SIGTERM)
        group.wait_for("told", count=2)
        group.tell(signal.SIGTERM)
        assert group.wait() == 128 + signal.SIGTERM
        assert not group.alive()
    assert group.text.count("told") == 2


def test_the_third_ctrl_c_kills(tmp_path):
    train = script(
        tmp_path,
        "signal.signal(signal.SIGINT, lambda *_: print('told', flush=True))\n"
        "print('ready')" + FOREVER,
    )
    with Launched("--processes", 2, train) as group:
        group.wait_for("ready", count=2)
        with at_most(60):
            group.tell(signal.SIGINT)
            group.wait_for("told", count=2)
            group.tell(signal.SIGINT)
            group.wait_for("already stopping; once more kills all")
            group.tell(signal.SIGINT)
            assert group.wait() == INTERRUPTED
    assert group.text.count("told") == 2


def test_one_ctrl_c_ends_plain_scripts(tmp_path):
    with Launched(
        "--processes", 2, script(tmp_path, "print('ready')" + FOREVER)
    ) as group:
        group.wait_for("ready", count=2)
        with at_most(60):
            group.tell(signal.SIGINT)
            assert group.wait() == INTERRUPTED


# A child in a session of its own, which starts another one, whose parent then ends.
FAMILY = """
code = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(3600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True).wait()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print("ready", flush=True)
"""


def test_sigkill_of_the_launcher_leaves_nothing_behind(tmp_path):
    with Launched(
        "--processes",
        3,
        script(tmp_path, FAMILY + FOREVER),
        environ={"TMPDIR": str(tmp_path)},
    ) as group:
        group.wait_for("ready", count=3)
        # A process that has just begun another program has no environment for a moment.
        wait_until(lambda: len(group.alive()) == 12)
        assert list(tmp_path.glob("replicator-launch-*"))
        group.tell(signal.SIGKILL)
        group.wait_until_none_is_left()
    assert not list(tmp_path.glob("replicator-launch-*"))


@pytest.mark.parametrize("born", [1, 2, 4, 6])
def test_sigkill_of_the_launcher_while_it_starts_leaves_nothing_behind(tmp_path, born):
    with Launched("--processes", 6, script(tmp_path, FOREVER)) as group:
        while len(group.alive()) < born:
            assert group.text == "" or "here" in group.text
        group.tell(signal.SIGKILL)
        group.wait_until_none_is_left()


def test_sigkill_reaches_a_stopped_process_too(tmp_path):
    with Launched("--processes", 1, script(tmp_path, FOREVER)) as group:
        kill(group.pid_of(0), signal.SIGSTOP)
        group.tell(signal.SIGKILL)
        group.wait_until_none_is_left()


def test_a_killed_guard_takes_its_process_along(tmp_path):
    train = script(tmp_path, "if attempt: sys.exit()" + FAMILY + FOREVER)
    with Launched("--processes", 2, train) as group:
        group.wait_for("ready", count=2)
        status = pathlib.Path(f"/proc/{group.pid_of(0)}/status").read_text()
        [guard] = [line for line in status.splitlines() if line.startswith("PPid")]
        kill(int(guard.split()[1]), signal.SIGKILL)
        assert group.wait() == 0
    assert "process 0 was killed by SIGKILL" in group.text


def test_what_a_process_started_does_not_outlive_its_attempt(tmp_path):
    code = FAMILY + "\nif attempt: sys.exit()\nif rank: sys.exit(1)\n" + FOREVER
    with Launched("--processes", 2, script(tmp_path, code)) as group:
        assert group.wait() == 0
        assert not group.alive()


def test_nothing_is_killed_that_the_launcher_did_not_start(tmp_path):
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"]
    )
    try:
        train = script(tmp_path, "sys.exit(1)")
        with Launched("--processes", 2, "--max-restarts", 1, train) as group:
            assert group.wait() == 1
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_killed_by_a_signal_is_named_with_it(tmp_path):
    train = script(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    with Launched("--processes", 1, "--max-restarts", 0, train) as group:
        assert group.wait() == 128 + signal.SIGSEGV
    assert "process 0 was killed by SIGSEGV" in group.text


@pytest.fixture
def little_memory():
    """A cgroup of 200 MB; skips where none can be made."""
    root = pathlib.Path("/sys/fs/cgroup")
    parent = root / "memory" if (root / "memory").is_dir() else root
    cgroup = parent / f"replicator-test-{os.getpid()}"
    limit = {root: "memory.max"}.get(parent, "memory.limit_in_bytes")
    try:
        cgroup.mkdir()
    except OSError as refused:
        pytest.skip(f"no cgroup can be made: {refused}")
    try:
        if not (cgroup / limit).exists():
            pytest.skip("cgroups limit no memory here")
        (cgroup / limit).write_text(str(200 << 20))
        yield cgroup
    finally:
        cgroup.rmdir()


def test_a_process_killed_for_memory_says_so_and_is_not_restarted_for_ever(
    tmp_path, little_memory
):
    train = script(
        tmp_path,
        f"open({str(little_memory / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "all = [bytearray(b'x' * (16 << 20)) for _ in range(64)]",
    )
    with Launched("--processes", 1, "--max-restarts", 1, train) as group:
        assert group.wait() == 128 + signal.SIGKILL
        assert not group.alive()
    said = "process 0 was killed by SIGKILL: the machine was out of memory"
    assert group.text.count(said) == 2
    assert "gave up after 1 restart(s) without progress" in group.text


def test_much_output_arrives_whole_labelled_and_in_order(tmp_path):
    train = script(tmp_path, "for n in range(20_000): print('line', n)\n")
    with Launched("--processes", 2, train) as group:
        assert group.wait() == 0
    for rank in range(2):
        label = f"[{rank}] line "
        numbers = [line for _, line in group.lines if line.startswith(label)]
        assert numbers == [f"{label}{n}" for n in range(20_000)]


def test_each_process_knows_its_place(tmp_path):
    names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "FAKE_DEVICES")
    code = f"print(*[os.environ['REPLICATOR_' + name] for name in {names}])"
    words = ("--processes", 2, "--devices-per-process", 3, script(tmp_path, code))
    with Launched(*words, environ={"RANK": "9", "WORLD_SIZE": "10"}) as group:
        assert group.wait() == 0
    places = sorted(line.split()[1:] for _, line in group.lines if "127.0.0.1" in line)
    [(first, *zero), (second, *one)] = places
    assert first == second
    assert (zero, one) == (["2", "0", "3"], ["2", "1", "3"])


SECRET = (
    "path = os.environ['REPLICATOR_RPC_SECRET_FILE']\n"
    "print('secret', open(path, 'rb').read().hex(), oct(os.stat(path).st_mode))\n"
)


def test_all_processes_of_a_group_have_one_secret_and_no_other_group_has_it(tmp_path):
    train = script(tmp_path, SECRET)
    told = []
    for _ in range(2):
        with Launched("--processes", 2, train) as group:
            assert group.wait() == 0
        words = {line.split(" ", 1)[1] for line in group.text.splitlines()}
        told.append([word for word in words if word.startswith("secret")])
    assert [len(words) for words in told] == [1, 1]
    assert told[0] != told[1]
    assert told[0][0].endswith("0o100600")


def test_the_secret_of_the_environment_is_handed_on(tmp_path):
    secret = Secret.generate()
    secret.write(tmp_path / "secret")
    given = {"REPLICATOR_RPC_SECRET_FILE": str(tmp_path / "secret")}
    with Launched("--processes", 1, script(tmp_path, SECRET), environ=given) as group:
        assert group.wait() == 0
    assert f"secret {secret._key.hex()}" in group.text


def test_one_process_keeps_its_place_in_a_larger_group(tmp_path):
    code = "print([n for n in os.environ if n.startswith('REPLICATOR_COORD')])"
    with Launched("--processes", 1, script(tmp_path, code)) as group:
        assert group.wait() == 0
    assert "[0] []" in group.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--processes", 0, "x.py"), "`processes` must be at least 1, got 0"),
        (
            ("--processes", 1, "--devices-per-process", 0, "x.py"),
            "`devices_per_process` must be at least 1, got 0",
        ),
        (
            ("--processes", 1, "--max-restarts", -1, "x.py"),
            "`max_restarts` must be at least",
        ),
    ],
)
def test_counts_that_make_no_group_are_refused(words, message):
    with Launched(*words) as group:
        assert group.wait() == 2
    assert message in group.text


def test_a_script_that_is_not_there_is_not_tried_four_times(tmp_path):
    with Launched("--processes", 2, tmp_path / "missing.py") as group:
        assert group.wait() == 2
    assert "`script` must be a file" in group.text


def test_a_module_is_run_by_its_name(tmp_path):
    with Launched("--processes", 1, "-m", "platform") as group:
        assert group.wait() == 0
    assert os.uname().sysname in group.text


FAILS_AT_FIRST = """
import os, sys
attempt = os.environ["REPLICATOR_ATTEMPT"]
print("ran", attempt, sys.argv[1:], flush=True)
sys.exit(7 if attempt == "0" else 0)
"""


def test_a_process_that_was_kept_ready_takes_the_place_of_a_dead_one(tmp_path):
    train = script(tmp_path, FAILS_AT_FIRST)
    with Launched("--processes", 1, "--ready", train, "--rate", 1) as group:
        assert group.wait() == 0, group.text
        [_, (_, again)] = group.wait_for("] ran ", count=2)
        assert again.endswith("['--rate', '1']")
        assert not group.alive()
