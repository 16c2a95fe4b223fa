"""What `replicator launch` decides by exit codes: no process, no clock."""

import signal

import pytest

from replicator.distributed.processes.exits import describe_code
from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.distributed.processes.policy import (
    LaunchPolicy,
    ProcessEnd,
    ended,
    exit_code,
    stop_asked,
)
from replicator.distributed.processes.states import (
    Finish,
    Kill,
    Log,
    Start,
    StopWorkers,
    TimeUp,
)
from replicator.distributed.processes.supervisor import begin, decide, next_deadline_s
from replicator.exit_codes import HUNG, PREEMPTED

POLICY = LaunchPolicy(processes=2)
BOTH = ("process 0", "process 1")
TERM, INT = stop_asked(signal.SIGTERM), stop_asked(signal.SIGINT)
GONE = [b"ValueError: Gloo all-reduce failed: Connection closed by peer"]
NAN = [b"replicator.errors.NonFiniteError: `loss` must be finite, got nan"]


class Group:
    """A group of processes that end as they are told to."""

    def __init__(self, policy=POLICY):
        self.policy = policy
        self.code = None
        self.failure = None
        self.now_s = 0.0
        self.said = []
        self.state, self.done = begin([policy.unit], 0.0, timeouts=policy.timeouts)

    def happens(self, event, at_s=None):
        """Return what is done, words apart."""
        self.now_s = self.now_s if at_s is None else at_s
        self.state, actions = decide(self.state, event, self.now_s)
        self.said += [a.message for a in actions if isinstance(a, Log)]
        for action in actions:
            if isinstance(action, Finish):
                self.code = exit_code(self.state, action)
                self.failure = action.failure and action.failure.exited
        return [action for action in actions if not isinstance(action, Log)]

    def ends(self, rank, code, *, lines=(), step=None, out_of_memory=False):
        event = ended(
            ProcessEnd(rank, code, lines, out_of_memory),
            self.state,
            hung_grace_s=self.policy.hung_grace_s,
            safe_step=step,
        )
        return self.happens(event)

    def crashes(self, code=1, step=None):
        """Let one process fail, and the other be killed for it."""
        self.ends(1, code, step=step)
        return self.ends(0, KILLED_BY_LAUNCHER, step=step)

    def waits(self):
        return self.happens(TimeUp(), next_deadline_s(self.state))


def test_a_group_that_ends_well_ends_the_launcher_well():
    group = Group()
    group.ends(0, 0)
    group.ends(1, 0)
    assert group.code == 0


def test_one_death_kills_the_group_and_starts_it_again_at_once():
    group = Group()
    assert group.ends(1, 1) == [Kill(names=("process 0",))]
    again = group.ends(0, KILLED_BY_LAUNCHER)
    assert again == [Start(names=BOTH, attempt=1)]


def test_a_death_after_another_ended_well_restarts_both():
    group = Group()
    group.ends(0, 0)
    assert group.ends(1, 1) == [Start(names=BOTH, attempt=1)]


def test_what_would_come_again_is_not_started_again():
    group = Group()
    group.ends(1, 1, lines=NAN)
    group.ends(0, KILLED_BY_LAUNCHER)
    assert (group.code, group.failure) == (1, ProcessEnd(1, 1, NAN))
    assert "not started again: it would end the same way" in group.said


def test_only_code_1_comes_again():
    group = Group(LaunchPolicy(processes=1))
    assert group.ends(0, -9, lines=NAN) == [Start(names=BOTH[:1], attempt=1)]


def test_pauses_double_up_to_their_limit():
    group = Group(LaunchPolicy(processes=1, max_restarts=10, longest_backoff_s=4))
    pauses = []
    for _ in range(6):
        group.ends(0, 1)
        due_s = next_deadline_s(group.state)
        pauses.append(0.0 if due_s is None else due_s - group.now_s)
        if due_s is not None:
            group.waits()
    assert pauses == [0, 1, 2, 4, 4, 4]


def test_a_long_run_is_no_progress_without_a_step():
    group = Group(LaunchPolicy(processes=1, max_restarts=0))
    group.now_s = 1e6
    group.ends(0, 1)
    assert group.code == 1


def test_the_failure_shown_is_the_first_since_there_was_progress():
    group = Group(LaunchPolicy(processes=2, max_restarts=1))
    group.crashes(5)
    group.crashes(6, step=3)
    group.crashes(7, step=3)
    assert (group.code, group.failure) == (6, ProcessEnd(1, 6, ()))


def test_a_killed_process_s_code_is_what_a_shell_would_say():
    group = Group(LaunchPolicy(processes=2, max_restarts=0))
    group.crashes(-signal.SIGSEGV)
    assert group.code == 128 + signal.SIGSEGV


def test_the_kernel_s_kill_is_the_cause_of_a_symptom_that_was_seen_first():
    group = Group(LaunchPolicy(processes=3, max_restarts=0))
    group.ends(2, 1, lines=GONE)
    group.ends(0, -9)
    group.ends(1, KILLED_BY_LAUNCHER)
    assert (group.code, group.failure) == (137, ProcessEnd(0, -9, ()))


@pytest.mark.parametrize("codes", [(1, -9), (-9, 1)])
def test_a_death_by_a_signal_is_named_before_an_exception(codes):
    group = Group(LaunchPolicy(processes=2, max_restarts=0))
    for rank, code in enumerate(codes):
        group.ends(rank, code)
    assert (group.code, group.failure) == (137, ProcessEnd(codes.index(-9), -9, ()))


@pytest.mark.parametrize(
    ("first", "then", "lines"),
    [
        (1, -signal.SIGABRT, ()),  # libraries abort when a peer is gone
        (1, -signal.SIGSEGV, GONE),
        (HUNG, -9, ()),
        (5, -9, ()),
        (-signal.SIGSEGV, -9, ()),
    ],
)
def test_what_may_follow_from_the_first_failure_does_not_replace_it(first, then, lines):
    group = Group(LaunchPolicy(processes=2, max_restarts=0))
    group.ends(0, first)
    group.ends(1, then, lines=lines)
    assert group.failure == ProcessEnd(0, first, ())


def test_a_death_by_a_signal_does_not_replace_a_nan():
    group = Group(LaunchPolicy(processes=2, max_restarts=0))
    group.ends(0, 1, lines=NAN)
    group.ends(1, -9)
    assert group.failure == ProcessEnd(0, 1, NAN)


def test_symptoms_do_not_hide_that_all_was_saved():
    group = Group()
    group.happens(TERM)
    group.ends(0, PREEMPTED)
    group.ends(1, 1, lines=GONE)
    assert group.code == PREEMPTED


@pytest.mark.parametrize("lines", [(), GONE])
@pytest.mark.parametrize("codes", [(-15, 1), (1, -15), (5, 6), (-15, -6), (0, 1)])
def test_an_asked_group_that_falls_ends_as_asked(codes, lines):
    group = Group()
    group.happens(TERM)
    for rank, code in enumerate(codes):
        group.ends(rank, code, lines=lines if code != -15 else ())
    assert group.code == 143


def test_an_asked_group_that_hangs_can_go_on():
    group = Group()
    group.happens(TERM)
    group.ends(0, HUNG)
    group.ends(1, 1, lines=GONE)
    assert group.code == HUNG


def test_what_fails_in_an_asked_group_is_shown():
    group = Group()
    group.happens(TERM)
    group.ends(0, PREEMPTED)
    group.ends(1, 1)
    assert (group.code, group.failure) == (143, ProcessEnd(1, 1, ()))


def test_who_fails_after_a_preemption_does_not_hide_that_the_launcher_was_asked():
    group = Group()
    group.ends(0, PREEMPTED)
    group.happens(TERM)
    group.ends(1, 1)
    assert group.code == 143


def test_a_hung_group_may_write_its_stacks_before_it_is_killed():
    group = Group()
    assert group.ends(0, HUNG) == []
    assert next_deadline_s(group.state) == POLICY.hung_grace_s
    assert group.waits() == [Kill(names=("process 1",))]
    assert group.ends(1, -9) == [Start(names=BOTH, attempt=1)]


def test_a_preempted_group_is_waited_for_and_not_restarted():
    group = Group()
    assert group.ends(1, PREEMPTED) == []
    assert next_deadline_s(group.state) == POLICY.stop_grace_s
    group.ends(0, PREEMPTED)
    assert group.code == PREEMPTED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wish_to_stop_is_handed_on_once(number):
    group = Group()
    wish = stop_asked(number)
    assert group.happens(wish) == [StopWorkers(names=BOTH)]
    assert StopWorkers(names=BOTH) not in group.happens(wish)


def test_a_closed_terminal_asks_to_save_and_end():
    assert stop_asked(signal.SIGHUP) == stop_asked(signal.SIGTERM)


@pytest.mark.parametrize(
    ("number", "codes", "expected"),
    [
        (signal.SIGTERM, (PREEMPTED, PREEMPTED), PREEMPTED),
        (signal.SIGTERM, (-15, -15), 143),
        (signal.SIGINT, (130, 130), 130),
        (signal.SIGINT, (-2, 0), 130),
        (signal.SIGTERM, (0, 0), 0),
        (signal.SIGTERM, (0, PREEMPTED), PREEMPTED),
        (signal.SIGTERM, (PREEMPTED, 1), 143),
        (signal.SIGINT, (130, 1), 130),
    ],
)
def test_how_an_asked_group_ends_is_passed_on(number, codes, expected):
    group = Group()
    group.happens(stop_asked(number))
    for rank, code in enumerate(codes):
        group.ends(rank, code)
    assert group.code == expected


def test_a_second_sigterm_kills():
    group = Group()
    group.happens(TERM)
    assert group.happens(TERM) == [Kill(names=BOTH)]
    group.ends(0, KILLED_BY_LAUNCHER)
    group.ends(1, KILLED_BY_LAUNCHER)
    assert group.code == 143


def test_a_third_ctrl_c_kills():
    group = Group()
    done = [group.happens(INT) for _ in range(3)]
    assert done == [[StopWorkers(names=BOTH)], [], [Kill(names=BOTH)]]


def test_a_signal_of_the_launcher_s_own_after_a_preemption_is_no_escalation():
    group = Group()
    group.ends(0, PREEMPTED)
    assert group.happens(TERM) == []
    assert group.happens(TERM) == [Kill(names=("process 1",))]


@pytest.mark.parametrize("is_first", [True, False])
def test_who_ends_by_the_signal_of_a_preemption_does_not_hide_it(is_first):
    group = Group()
    events = [lambda: group.happens(TERM), lambda: group.ends(0, PREEMPTED)]
    for event in events if is_first else events[::-1]:
        event()
    group.ends(1, -signal.SIGTERM)
    assert (group.code, group.failure) == (PREEMPTED, None)


def test_who_does_not_end_in_time_is_killed_then_killed_harder_then_left():
    group = Group()
    group.happens(TERM)
    done = [group.waits() for _ in range(3)]
    assert done[:2] == [[Kill(names=BOTH)], [Kill(names=BOTH)]]
    assert group.code == KILLED_BY_LAUNCHER


def test_a_group_that_was_killed_by_force_ends_as_it_was_asked_to():
    group = Group()
    group.happens(TERM)
    group.waits()
    group.waits()
    group.ends(0, -9)
    group.ends(1, KILLED_BY_LAUNCHER)
    assert group.code == 143


def test_asked_between_two_attempts_it_ends_at_once():
    group = Group()
    group.crashes()
    group.crashes()
    group.happens(TERM)
    assert group.code == 143


def test_asked_while_it_clears_up_it_does_not_start_again():
    group = Group()
    group.ends(1, 1)
    group.happens(TERM)
    group.ends(0, -9)
    assert group.code == 143


def test_a_restart_names_the_step_that_is_safe():
    group = Group()
    group.crashes(step=1000)
    assert group.said == [
        "process 1 exited with code 1",
        "starting all processes again now (restart 1 of 3 without progress; step 1000 "
        "is safe)",
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "exited with code 1"),
        (75, "exited with code 75 (preempted)"),
        (76, "exited with code 76 (hung)"),
        (-9, "was killed by SIGKILL"),
        (-63, "was killed by signal 63"),
    ],
)
def test_an_end_is_told_in_words(code, said):
    assert describe_code(code) == said


def test_a_kill_for_memory_is_told_as_one_and_given_up_like_any_failure():
    group = Group(LaunchPolicy(processes=1))
    for attempt in range(4):
        group.ends(0, -9, out_of_memory=True)
        if attempt in (1, 2):
            group.waits()
    said = "process 0 was killed by SIGKILL: the machine was out of memory"
    assert group.said.count(said) == 4
    assert group.code == 137


def test_another_s_kill_for_memory_explains_no_other_end():
    assert describe_code(-11, out_of_memory=True) == "was killed by SIGSEGV"
    assert describe_code(1, out_of_memory=True) == "exited with code 1"
