"""What counts as a hang, decided without threads; and what the thread does then."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from replicator.errors import ArgumentError
from replicator.exit_codes import HUNG
from replicator.monitoring.phases import Current, Phases
from replicator.training.watchdog import Limits, Watchdog
from replicator.training.watchdog.limits import as_limits
from replicator.training.watchdog.peers import Beat, Peer
from replicator.training.watchdog.stacks import (
    format_stacks,
    runs_callback,
    waits_in_debugger,
    where_is,
)
from replicator.training.watchdog.watch import Seen, WatchState, decide, nears_limit
from tests.multiprocess.processes import stop

ROOT = Path(__file__).parents[3]
LIMITS = Limits(step_s=60.0)


class Run:
    """Looks at a run that a test moves."""

    def __init__(self, limits=LIMITS):
        self.limits = limits
        self.now_s = self.since_s = self.steps_s = 0.0
        self.phase, self.step = "step", 1
        self.watched = WatchState()
        self.in_debugger = False
        self.peers = ()

    def enter(self, phase, step=None):
        self.phase, self.since_s = phase, self.now_s
        self.step = self.step if step is None else step

    def look(self):
        current = Current(phase=self.phase, since_s=self.since_s, step=self.step)
        seen = Seen(
            now_s=self.now_s,
            current=current,
            steps_s=self.steps_s,
            in_debugger=self.in_debugger,
            peers=self.peers,
        )
        self.watched, limit_s = decide(self.watched, seen, limits=self.limits)
        return limit_s

    def looks(self, seconds, tick_s=1.0):
        """Look once a tick; return the first limit that is passed."""
        for _ in range(round(seconds / tick_s)):
            self.now_s += tick_s
            if self.phase == "step":
                self.steps_s += tick_s
            if (limit_s := self.look()) is not None:
                return limit_s
        return None

    def make_steps(self, count, step_s):
        for _ in range(count):
            self.enter("step", self.step + 1)
            self.look()
            assert self.looks(step_s) is None


def beat(phase, step, count=1, own_s=0.0):
    return Beat(count=count, phase=phase, step=step, seconds=1.0, own_s=own_s)


def test_a_step_that_lasts_longer_than_its_limit_expires():
    run = Run()
    assert run.looks(59) is None
    assert run.looks(5) == 60.0
    assert 60 <= run.watched.counted_s <= 62


def test_every_new_step_starts_the_count_anew():
    run = Run()
    for step in range(2, 6):
        run.enter("step", step)
        assert run.looks(50) is None


def test_first_steps_have_a_limit_of_their_own():
    assert Run(Limits(first_step_s=500)).looks(499) is None
    assert Run(Limits(first_step_s=500)).looks(510) is not None


def test_later_steps_may_take_ten_times_the_median_but_at_least_a_minute():
    run = Run(Limits())
    run.make_steps(5, step_s=9)
    run.enter("step", run.step + 1)
    assert run.looks(85) is None
    assert run.looks(10) == pytest.approx(90, rel=0.02)
    quick = Run(Limits())
    quick.make_steps(5, step_s=1)
    quick.enter("step", quick.step + 1)
    assert quick.looks(70) == 60.0


def test_one_slow_step_does_not_move_the_limit():
    run = Run(Limits())
    run.make_steps(9, step_s=2)
    run.make_steps(1, step_s=50)
    run.enter("step", run.step + 1)
    assert run.looks(70) == 60.0


@pytest.mark.parametrize("phase", ["compile", "input", "save", "evaluate", "restore"])
def test_each_phase_has_a_limit_and_a_name_of_its_own(phase):
    run = Run(Limits(step_s=10.0, **{f"{phase}_s": 20.0}))
    run.enter(phase)
    assert run.looks(19) is None
    assert run.looks(3) == 20.0


def test_the_input_may_take_longer_than_it_itself_allows():
    assert Limits().for_input(600).of("input") == 900
    assert Limits(input_s=5).for_input(600).of("input") == 5
    assert Limits().for_input(float("inf")).of("input") == float("inf")


def test_an_infinite_limit_watches_nothing():
    run = Run(Limits(step_s=float("inf")))
    assert run.looks(100_000, tick_s=100) is None


def test_a_process_that_was_stopped_for_an_hour_did_not_hang():
    run = Run()
    assert run.looks(30) is None
    run.now_s += 3600
    assert run.look() is None
    assert run.looks(20) is None


def test_a_debugger_at_its_prompt_is_no_hang():
    run = Run()
    run.in_debugger = True
    assert run.looks(1000) is None


def test_who_waits_in_a_step_for_another_process_that_compiles_does_not_hang():
    run = Run()
    run.peers = [Peer(process=1, beat=beat("compile", 1), silent_s=1.0)]
    assert run.looks(600) is None


@pytest.mark.parametrize(
    "peer",
    [
        Peer(process=1, beat=beat("step", 1), silent_s=1.0),
        Peer(process=1, beat=beat("save", 2), silent_s=1.0),
        Peer(process=1, beat=beat("save", 1), silent_s=1e5),
        Peer(process=1, beat=None, silent_s=1e5),
    ],
    ids=["in its step", "ahead", "silent", "never heard"],
)
def test_another_process_excuses_nobody_when_it(peer):
    run = Run()
    run.peers = [peer]
    assert run.looks(62) is not None


def test_other_processes_are_asked_for_from_half_of_the_limit_on():
    run = Run()
    run.looks(20)
    assert not nears_limit(run.watched, LIMITS)
    run.looks(12)
    assert nears_limit(run.watched, LIMITS)


@pytest.mark.parametrize("field", ["step_s", "compile_s", "interpreter_s"])
def test_a_limit_that_is_not_positive_is_refused(field):
    with pytest.raises(ArgumentError, match=f"`{field}` must be above 0, got 0"):
        Limits(**{field: 0})


@pytest.mark.parametrize("step_timeout", [0, -1.0])
def test_a_run_refuses_a_timeout_that_is_not_positive(step_timeout):
    with pytest.raises(ArgumentError, match="`step_timeout` must be above 0, got"):
        as_limits(step_timeout)


def test_a_timeout_is_that_of_a_step_and_limits_are_all():
    assert as_limits(None) == Limits()
    assert as_limits(5) == Limits(step_s=5)
    assert as_limits(Limits(save_s=5)) == Limits(save_s=5)


def test_stacks_name_every_thread_and_show_the_asked_one_first():
    ready, end = threading.Event(), threading.Event()

    def wait_in_a_thread():
        ready.set()
        end.wait(60)

    thread = threading.Thread(target=wait_in_a_thread, name="a worker of ours")
    thread.start()
    assert ready.wait(60)
    text = format_stacks(first=thread.ident)
    where = where_is(thread.ident)
    end.set()
    thread.join()
    assert text.startswith("Thread a worker of ours")
    assert "wait_in_a_thread" in text
    assert "Thread MainThread" in text
    assert re.search(r"test_watchdog.py:\d+ in wait_in_a_thread, inside `\w+`", where)


def test_a_callback_that_devices_wait_for_is_known():
    seen = []

    def callback(x):
        seen.append(runs_callback())
        return x

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.jit(lambda x: jax.pure_callback(callback, shape, x))
    program(jnp.float32(1)).block_until_ready()
    assert [*seen, runs_callback()] == [True, False]


def test_a_thread_at_the_prompt_of_a_debugger_is_known():
    ready, end = threading.Event(), threading.Event()
    source = "def interaction():\n    ready.set()\n    end.wait(60)\n"
    names = {"__name__": "pdb", "ready": ready, "end": end}
    exec(source, names)
    thread = threading.Thread(target=names["interaction"])
    thread.start()
    assert ready.wait(60)
    assert waits_in_debugger(thread.ident)
    end.set()
    thread.join()
    assert not waits_in_debugger(threading.get_ident())


def watch_a_hang(tmp_path, limits, **arguments):
    """Let a watchdog find that this thread hangs; return the codes that it exits with.

    The watchdog's end of the process is only noted: this is the test's own process.
    """
    codes, ended = [], threading.Event()

    def exit_process(code):
        codes.append(code)
        ended.set()

    phases = Phases()
    phases.enter("step", step=5)
    with Watchdog(
        phases,
        limits=limits,
        directory=tmp_path,
        exit_process=exit_process,
        **arguments,
    ):
        assert ended.wait(60)
    return codes


def test_a_hang_leaves_stacks_a_report_an_event_and_an_exit_code(tmp_path, capfd):
    told = []
    codes = watch_a_hang(
        tmp_path,
        Limits(step_s=0.2),
        log=lambda kind, **more: told.append((kind, more)),
    )
    assert codes == [HUNG]
    stacks = (tmp_path / "stacks" / "0-5.txt").read_text()
    assert "watch_a_hang" in stacks
    said = capfd.readouterr().err
    assert "no progress; the last step begun is 5" in said
    assert re.search(r"process 0: in `step` for [\d.]+ s \(limit 0.2 s\), step 5", said)
    ((kind, fields),) = told
    assert (kind, fields["step"], fields["phase"]) == ("hung", 5, "step")


def test_a_directory_that_cannot_be_written_keeps_no_run_alive(tmp_path, capfd):
    (tmp_path / "stacks").write_text("in the way")
    assert watch_a_hang(tmp_path, Limits(step_s=0.2)) == [HUNG]
    said = capfd.readouterr().err
    assert "stacks could not be written" in said
    assert "watch_a_hang" in said


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    phases = Phases()
    watchdog = Watchdog(phases, directory=tmp_path, exit_process=pytest.fail)
    with watchdog:
        phases.enter("step", step=1)
    watchdog.close()
    assert not (tmp_path / "stacks").exists()


class LookedAt(Phases):
    """Tells when a watchdog has looked at it."""

    def __init__(self):
        super().__init__()
        self.looked = threading.Event()

    @property
    def current(self):
        self.looked.set()
        return super().current


# In a process of its own: where a hundred threads run, listing them may end it.
@pytest.mark.slow
@pytest.mark.parametrize("looks", [False, True], ids=["a short run", "a longer one"])
def test_a_timer_of_the_user_s_own_stays(looks):
    limits = "Limits(start_s=1e6, silent_s=0.2, interpreter_s=float('inf'))"
    code = f"""
import faulthandler, threading
from replicator.training.watchdog import Limits, Watchdog
from tests.training.watchdog.test_watchdog import LookedAt
phases = LookedAt()
faulthandler.dump_traceback_later(2, exit=True)
with Watchdog(phases, limits={limits if looks else None}):
    assert {not looks} or phases.looked.wait(60)
threading.Event().wait(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    # The user's, by its seconds.
    assert "Timeout (0:00:02)!" in done.stderr


@pytest.mark.slow
def test_a_timer_that_the_watchdog_set_ends_with_it():
    code = """
import threading
from replicator.training.watchdog import Limits, Watchdog
from tests.training.watchdog.test_watchdog import LookedAt
phases = LookedAt()
with Watchdog(phases, limits=Limits(silent_s=0.2, interpreter_s=4)):
    assert phases.looked.wait(60)
threading.Event().wait(5)  # it would end the program
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_thread_does_not_keep_a_finished_program_from_its_end():
    code = """
from replicator.monitoring.phases import Phases
from replicator.training.watchdog import Watchdog
Watchdog(Phases()).start()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300)
    assert done.returncode == 0


def program(code):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_code_that_holds_the_interpreter_ends_with_its_stacks_told():
    code = """
from replicator.monitoring.phases import Phases
from replicator.testing.faults.effects import hold_interpreter
from replicator.training.watchdog import Limits, Watchdog
with Watchdog(Phases(), limits=Limits(interpreter_s=5)) as watchdog:
    import threading
    threading.Event().wait(1)
    hold_interpreter(300)
"""
    with program(code) as held:
        _, said = held.communicate(timeout=300)
        assert held.returncode == 1
    assert "Timeout (0:00:05)!" in said
    assert "in hold_interpreter" in said


@pytest.mark.slow
def test_a_run_that_was_stopped_and_continued_goes_on():
    code = """
import sys, threading
from replicator.monitoring.phases import Phases
from replicator.training.watchdog import Limits, Watchdog
phases = Phases()
phases.enter("step", step=1)
with Watchdog(phases, limits=Limits(step_s=4)):
    print("watched", flush=True)
    sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout.readline() == "watched\n"
        stop(run)
        threading.Event().wait(6)  # longer than the limit: that is the point
        os.kill(run.pid, signal.SIGCONT)
        run.stdin.write("end\n")
        run.stdin.flush()
        assert run.wait(60) == 0


STUCK_RUN = """
import sys, threading
import jax, numpy as np, optax
import replicator

def sleep_in_step(number):
    if number >= 5:
        threading.Event().wait()
    return np.float32(0)

rep = replicator.Replicator(num_replicas=1, compilation_cache=False)
tx = rep.wrap_optimizer(optax.sgd(0.1))

def init_fn(key):
    params = {"w": jax.numpy.zeros(())}
    return {"params": params, "opt": tx.init(params)}

def step_fn(state, batch):
    late = jax.pure_callback(
        sleep_in_step, jax.ShapeDtypeStruct((), np.float32), batch["number"][0]
    )
    updates, opt = tx.update({"w": late}, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

print("printed, and not flushed")
batches = [{"number": np.full(1, n, np.float32)} for n in range(20)]
rep.run(step_fn, batches, init_fn=init_fn, steps=20, step_timeout=3,
        directory=sys.argv[1], display=False)
"""


@pytest.mark.slow
def test_a_run_that_is_stuck_in_its_step_ends_with_everything_told(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", STUCK_RUN, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        out, said = run.communicate(timeout=300)
    assert run.returncode == HUNG, said
    assert out == "printed, and not flushed\n"
    assert re.search(r"process 0: in `step` for [\d.]+ s \(limit 3 s\)", said), said
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert "in sleep_in_step" in stacks.read_text()


def test_a_run_that_ends_while_its_hang_is_told_does_not_fail_its_node():
    told, failed = threading.Event(), []

    def log(kind, **fields):
        told.set()
        assert watchdog._closed.wait(60)

    phases = Phases()
    phases.enter("step", step=1)
    watchdog = Watchdog(
        phases, limits=Limits(first_step_s=0.01), log=log, fail=failed.append
    )
    with watchdog:
        assert told.wait(60)
    assert not watchdog._thread.is_alive()
    assert failed == []
