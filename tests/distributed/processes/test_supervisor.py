"""What the supervisor decides, event by event: no process, no clock."""

import dataclasses
import itertools
import random
import signal

import pytest

from replicator.base.host.exit_codes import HUNG, PREEMPTED
from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.distributed.processes.states import (
    Asked,
    Exit,
    Exited,
    Failure,
    Kill,
    Policy,
    Say,
    Start,
    Tell,
    TimeUp,
)
from replicator.distributed.processes.supervisor import begin, decide, describe_code

POLICY = Policy(processes=2)


def play(*events, policy=POLICY):
    """Return the last state, and what was done for each event, words apart."""
    state, actions = begin(policy)
    assert actions == [Start(attempt=0)]
    done = []
    for now_s, event in enumerate(events):
        state, actions = decide(state, event, float(now_s))
        done.append([action for action in actions if not isinstance(action, Say)])
    return state, done


def died(rank, code=1, progress=None):
    return Exited(rank=rank, code=code, progress=progress)


def crash(progress=None, code=1):
    """One process fails, the other is killed for it."""
    return died(1, code, progress), died(0, KILLED_BY_LAUNCHER, progress)


def test_a_group_that_ends_well_ends_the_launcher_well():
    _, done = play(died(0, 0), died(1, 0))
    assert done == [[], [Exit(code=0)]]


def test_one_death_kills_the_group_and_starts_it_again_at_once():
    state, done = play(*crash())
    assert done == [[Kill(hard=False)], [Start(attempt=1)]]
    assert (state.phase, state.live) == ("running", {0, 1})


def test_a_death_after_another_ended_well_restarts_both():
    _, done = play(died(0, 0), died(1, 1))
    assert done == [[], [Start(attempt=1)]]


def test_what_would_come_again_is_not_started_again():
    again = Exited(rank=1, code=1, comes_again=True)
    _, done = play(again, died(0, KILLED_BY_LAUNCHER))
    failure = Failure(rank=1, code=1, attempt=0, comes_again=True)
    assert done[-1] == [Exit(code=1, failure=failure)]


def test_a_crash_loop_is_restarted_three_times_with_growing_pauses():
    state, done = play(
        *crash(), *crash(), TimeUp(), *crash(code=2), TimeUp(), *crash(code=3)
    )
    starts = [action for actions in done for action in actions if type(action) is Start]
    assert [start.attempt for start in starts] == [1, 2, 3]
    first = Failure(rank=1, code=1, attempt=0)
    assert done[-1] == [Exit(code=1, failure=first)]
    assert state.phase == "ended"


def test_pauses_double_up_to_their_limit():
    state, _ = begin(Policy(processes=1, max_restarts=10, longest_backoff_s=4))
    pauses = []
    for _ in range(6):
        state, _ = decide(state, died(0), 0.0)
        pauses.append(state.deadline_s or 0.0)
        if state.phase == "waiting":
            state, _ = decide(state, TimeUp(), 0.0)
    assert pauses == [0, 1, 2, 4, 4, 4]


def test_progress_forgives_all_restarts_before_it():
    events = [event for step in range(20) for event in crash(progress=step)]
    state, done = play(*events)
    assert done[-1] == [Start(attempt=20)]
    assert state.idle_restarts == 1


def test_the_same_step_again_is_no_progress():
    state, _ = play(*crash(progress=7), *crash(progress=7), TimeUp())
    assert (state.idle_restarts, state.progress) == (2, 7)


def test_the_failure_shown_is_the_first_since_there_was_progress():
    policy = Policy(processes=2, max_restarts=1)
    _, done = play(*crash(code=5), *crash(3, code=6), *crash(3, code=7), policy=policy)
    first = Failure(rank=1, code=6, attempt=1)
    assert done[-1] == [Exit(code=6, failure=first)]


def test_without_restarts_the_first_failure_ends_the_launcher():
    _, done = play(*crash(code=9), policy=Policy(processes=2, max_restarts=0))
    assert done[-1][0].code == 9


def test_a_killed_process_s_code_is_what_a_shell_would_say():
    policy = Policy(processes=2, max_restarts=0)
    _, done = play(*crash(code=-signal.SIGSEGV), policy=policy)
    assert done[-1][0].code == 128 + signal.SIGSEGV


def fell(rank, code=1):
    return Exited(rank=rank, code=code, is_symptom=True)


def test_the_cause_is_blamed_though_its_symptom_was_seen_first():
    policy = Policy(processes=3, max_restarts=0)
    events = (fell(2), died(0, -9), died(1, KILLED_BY_LAUNCHER))
    _, done = play(*events, policy=policy)
    cause = Failure(rank=0, code=-9, attempt=0)
    assert done == [[Kill(hard=False)], [], [Exit(code=137, failure=cause)]]


def test_symptoms_are_blamed_where_nothing_else_is():
    policy = Policy(processes=2, max_restarts=0)
    _, done = play(fell(1, 3), fell(0, 4), policy=policy)
    assert done[-1] == [
        Exit(code=3, failure=Failure(rank=1, code=3, attempt=0, is_symptom=True))
    ]


def test_symptoms_do_not_hide_that_all_was_saved():
    _, done = play(Asked(signal=15), died(0, PREEMPTED), fell(1))
    assert done[-1] == [Exit(code=PREEMPTED)]


def test_an_asked_group_that_fell_is_a_failure():
    _, done = play(Asked(signal=15), fell(0, 5), fell(1, 6))
    assert done[-1] == [Exit(code=5)]


def test_a_hung_group_may_write_its_stacks_before_it_is_killed():
    state, done = play(died(0, HUNG))
    assert done == [[]]
    assert state.deadline_s == POLICY.hung_grace_s
    _, done = play(died(0, HUNG), TimeUp(), died(1, -9))
    assert done == [[], [Kill(hard=False)], [Start(attempt=1)]]


def test_a_preempted_group_is_waited_for_and_not_restarted():
    state, done = play(died(1, PREEMPTED))
    assert (state.phase, done) == ("leaving", [[]])
    _, done = play(died(1, PREEMPTED), died(0, PREEMPTED))
    assert done[-1] == [Exit(code=PREEMPTED)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wish_to_stop_is_handed_on_once(number):
    _, done = play(Asked(signal=number), Asked(signal=number))
    told = [action for actions in done for action in actions if type(action) is Tell]
    assert told == [Tell(signal=number)]


def test_a_closed_terminal_asks_to_save_and_end():
    _, done = play(Asked(signal=signal.SIGHUP))
    assert done == [[Tell(signal=signal.SIGTERM)]]


def test_who_saves_after_sigterm_makes_the_launcher_say_so():
    _, done = play(Asked(signal=signal.SIGTERM), died(0, PREEMPTED), died(1, PREEMPTED))
    assert done[-1] == [Exit(code=PREEMPTED)]


@pytest.mark.parametrize(
    ("number", "codes", "expected"),
    [
        (signal.SIGTERM, (-15, -15), 143),
        (signal.SIGINT, (130, 130), 130),
        (signal.SIGINT, (-2, 0), 130),
        (signal.SIGTERM, (0, 0), 0),
        (signal.SIGTERM, (0, PREEMPTED), PREEMPTED),
        (signal.SIGTERM, (PREEMPTED, 1), 1),
    ],
)
def test_how_an_asked_group_ends_is_passed_on(number, codes, expected):
    _, done = play(Asked(signal=number), died(0, codes[0]), died(1, codes[1]))
    assert done[-1] == [Exit(code=expected)]


def test_a_second_sigterm_kills():
    _, done = play(Asked(signal=15), Asked(signal=15), died(0, 137), died(1, 137))
    assert done[1:] == [[Kill(hard=False)], [], [Exit(code=143)]]


def test_a_third_ctrl_c_kills():
    _, done = play(*[Asked(signal=2)] * 3)
    assert done == [[Tell(signal=2)], [], [Kill(hard=False)]]


def test_who_does_not_end_in_time_is_killed_then_killed_harder_then_left():
    state, done = play(Asked(signal=15), TimeUp(), TimeUp(), TimeUp())
    assert done[1:] == [[Kill(hard=False)], [Kill(hard=True)], [Exit(code=137)]]
    assert state.phase == "ended"


def test_asked_between_two_attempts_it_ends_at_once():
    _, done = play(*crash(), *crash(), Asked(signal=15))
    assert done[-1] == [Exit(code=143)]


def test_asked_while_it_clears_up_it_does_not_start_again():
    _, done = play(died(1), Asked(signal=15), died(0, -9))
    assert done[-1] == [Exit(code=143)]


def test_whatever_happens_the_group_ends_or_waits_for_something():
    """Random events: no live process is forgotten, every wait without one is bound."""
    draw = random.Random(0)
    codes = [0, 1, PREEMPTED, HUNG, -6, -9]
    for _ in range(500):
        state, _ = begin(dataclasses.replace(POLICY, processes=3))
        for now_s in itertools.count():
            event = draw.choice([*map(died, state.live), Asked(signal=15), TimeUp()])
            if isinstance(event, Exited):
                code, symptom = draw.choice(codes), draw.random() < 0.3
                event = dataclasses.replace(event, code=code, is_symptom=symptom)
            elif isinstance(event, TimeUp) and state.deadline_s is None:
                continue
            state, actions = decide(state, event, float(now_s))
            if state.phase == "ended":
                assert isinstance(actions[-1], Exit)
                break
            assert state.live or state.deadline_s is not None
            assert state.phase == "running" or state.deadline_s is not None


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
    killed = Exited(rank=0, code=-signal.SIGKILL, out_of_memory=True)
    state, _ = begin(Policy(processes=1))
    told = []
    for event in [killed, killed, TimeUp(), killed, TimeUp(), killed]:
        state, actions = decide(state, event, 0.0)
        told += [action.message for action in actions if isinstance(action, Say)]
    said = "process 0 was killed by SIGKILL: the machine was out of memory"
    assert told.count(said) == 4
    assert state.phase == "ended"
    assert state.first_failure is not None
    assert state.first_failure.out_of_memory


def test_another_s_kill_for_memory_explains_no_other_end():
    assert describe_code(-11, out_of_memory=True) == "was killed by SIGSEGV"
    assert describe_code(1, out_of_memory=True) == "exited with code 1"
