"""Which runs start: by weight, by room, by memory; no threads, no clocks."""

import pytest

from replicator.controller.scheduling.decisions import ScheduleState, decide
from replicator.controller.scheduling.events import (
    CancelRun,
    ClientJoined,
    ClientLeft,
    Closing,
    ForgetValue,
    FutureDropped,
    IslandJoined,
    IslandLost,
    OpEnded,
    PlacedResult,
    QueuedRun,
    SliceClosed,
    StartRun,
)
from replicator.engine.run_ahead import MOST_ON_CPU


class Machine:
    """A state, and what was decided."""

    def __init__(self, *weights, islands=("one",), is_fifo=False):
        self.state = ScheduleState(islands, is_fifo=is_fifo)
        self.count = 0
        for client, weight in enumerate(weights or (1.0,)):
            self.tell(ClientJoined(client, weight))

    def tell(self, event):
        return decide(self.state, event)

    def call(self, client=0, islands=("one",), takes=(), donates=(), size=0):
        """Queue a run of an op an island; return its result, and the runs that start.

        Its result is on the first island, and `size` bytes of 100.
        """
        key = self.count, 0
        limits = {"slice": 100} if size else {}
        run = QueuedRun(
            number=self.count,
            client=client,
            ops=dict.fromkeys(islands, 1),
            takes=frozenset((*takes, *donates)),
            donates=frozenset(donates),
            makes={
                key: PlacedResult(island=islands[0], slice="slice", size_bytes=size)
            },
            most_bytes=dict.fromkeys(limits, size),
            limits=limits,
        )
        self.count += 1
        return key, self.tell(run)

    def fill(self, island="one"):
        return [self.call(islands=(island,))[0] for _ in range(MOST_ON_CPU)]

    def end(self, key, island="one", device_s=1.0):
        return self.tell(OpEnded(key[0], island, device_s))


def started(actions):
    return [each.run for each in actions if isinstance(each, StartRun)]


def cancelled(actions):
    return {each.run: each.reason for each in actions if isinstance(each, CancelRun)}


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
def test_clients_have_time_by_weight_whatever_their_ops_take(weights):
    machine = Machine(*weights)
    seconds, had_s = (3.0, 1.0, 2.0, 0.5), [0.0] * 4
    waiting = {client: 0 for client in range(4)}
    running = []
    for _ in range(4000):
        for client in range(4):
            while waiting[client] < 32:
                waiting[client] += 1
                running += started(machine.call(client)[1])
        run = running.pop(0)
        client = machine.state.started[run].run.client
        had_s[client] += seconds[client]
        waiting[client] -= 1
        running += started(machine.end((run, 0), device_s=seconds[client]))
    wanted = [weight / sum(weights) for weight in weights]
    shares = [each / sum(had_s) for each in had_s]
    assert shares == pytest.approx(wanted, rel=0.05)


def test_a_client_that_was_idle_has_no_time_saved():
    machine = Machine(1, 1)
    for _ in range(50):
        machine.end(machine.call(0)[0])
    machine.fill()
    for client in (1, 0, 1, 0):
        machine.call(client)
    runs = [started(machine.end((50 + n, 0)))[0] for n in range(2)]
    clients = [machine.state.started[run].run.client for run in runs]
    assert sorted(clients) == [0, 1]


def test_fifo_starts_the_first_call_first():
    machine = Machine(1, 8, is_fifo=True)
    full = machine.fill()
    queued = [machine.call(client)[0] for client in (0, 1, 0)]
    assert [started(machine.end(each)) for each in full[:3]] == [[q[0]] for q in queued]


def test_no_more_than_16_ops_of_an_island_are_in_flight():
    machine = Machine(islands=("one", "two"))
    full = machine.fill()
    _, waits = machine.call()
    _, elsewhere = machine.call(islands=("two",))
    assert (started(waits), started(elsewhere)) == ([], [17])
    assert started(machine.end(full[0])) == [16]


def test_what_waits_for_room_on_two_islands_is_not_overtaken_on_either():
    machine = Machine(islands=("one", "two"))
    full = machine.fill()
    both, actions = machine.call(islands=("one", "two"))
    _, later = machine.call(islands=("two",))
    assert started(actions) == started(later) == []
    assert started(machine.end(full[0])) == [both[0], both[0] + 1]


def test_a_run_starts_after_those_whose_results_it_takes():
    machine = Machine(islands=("one", "two"))
    full = machine.fill()
    made, _ = machine.call()
    _, actions = machine.call(islands=("two",), takes=[made])
    assert started(actions) == []
    assert started(machine.end(full[0])) == [made[0], made[0] + 1]


def test_who_copies_what_the_next_run_donates_does_not_hold_it_up():
    machine = Machine(islands=("one", "two"))
    weights, _ = machine.call(islands=("two",))
    machine.fill()
    copied, actions = machine.call(takes=[weights])  # no room on island "one"
    assert started(actions) == []
    donated, actions = machine.call(islands=("two",), donates=[weights])
    assert started(actions) == [copied[0], donated[0]]


def test_a_result_is_forgotten_once_no_future_and_no_waiting_run_needs_it():
    machine = Machine()
    made = machine.fill()
    machine.call(takes=[made[0]])
    assert machine.tell(FutureDropped(made[0])) == []
    assert ForgetValue("one", made[0]) in machine.end(made[1])
    assert machine.tell(FutureDropped(made[1])) == [ForgetValue("one", made[1])]


def test_a_run_waits_for_memory_until_futures_are_dropped_and_others_go_on():
    machine = Machine()
    kept, _ = machine.call(size=60)
    machine.end(kept)
    large, actions = machine.call(size=50)
    _, small = machine.call(size=40)
    assert (started(actions), started(small)) == ([], [large[0] + 1])
    machine.end((large[0] + 1, 0))
    assert started(machine.tell(FutureDropped(kept))) == [large[0]]


def test_memory_of_what_a_run_takes_is_free_after_it():
    machine = Machine()
    kept, _ = machine.call(size=60)
    machine.end(kept)
    taking, _ = machine.call(takes=[kept])
    machine.tell(FutureDropped(kept))
    large, actions = machine.call(size=50)
    assert started(actions) == []
    assert started(machine.end(taking)) == [large[0]]


def test_memory_that_was_donated_is_free():
    machine = Machine()
    kept, _ = machine.call(size=60)
    machine.end(kept)
    donating, _ = machine.call(donates=[kept])
    machine.end(donating)
    assert machine.tell(FutureDropped(kept)) == []
    assert started(machine.call(size=100)[1]) == [2]


def test_runs_that_wait_for_each_others_memory_do_not_wait_for_ever():
    machine = Machine()
    kept = [machine.call(size=45)[0] for _ in range(2)]
    for each in kept:
        machine.end(each)
    for each in kept:
        machine.call(takes=[each], size=45)
    machine.tell(FutureDropped(kept[0]))
    actions = machine.tell(FutureDropped(kept[1]))
    assert cancelled(actions) == {3: "memory"}
    assert started(actions) == [2]


def test_a_client_that_leaves_frees_what_it_held_and_cancels_what_waits():
    machine = Machine(1, 1)
    made, _ = machine.call(1)
    machine.end(made)
    machine.fill()
    waits, _ = machine.call(1)
    taking, _ = machine.call(0, takes=[waits])
    actions = machine.tell(ClientLeft(1))
    assert cancelled(actions) == {waits[0]: "left", taking[0]: "left"}
    assert ForgetValue("one", made) in actions
    assert 1 not in machine.state.clients
    assert machine.tell(ClientLeft(1)) == []
    assert cancelled(machine.call(0, takes=[made])[1]) == {taking[0] + 1: "left"}


def test_a_slice_that_is_closed_frees_what_lives_on_it():
    machine = Machine()
    made, _ = machine.call(size=60)
    machine.end(made)
    assert machine.tell(SliceClosed("slice")) == [ForgetValue("one", made)]
    assert machine.state.held_bytes == {}


def test_at_the_end_what_waits_for_memory_is_cancelled():
    machine = Machine()
    kept, _ = machine.call(size=60)
    machine.end(kept)
    machine.call(size=60)
    assert cancelled(machine.tell(Closing())) == {1: "closed"}
    assert machine.state.is_done


def test_nothing_is_kept_of_runs_that_are_done():
    machine = Machine()
    for _ in range(3):
        made, _ = machine.call(size=10)
        machine.tell(FutureDropped(made))
        machine.end(made)
    state = machine.state
    assert (state.values, state.started, state.held_bytes) == ({}, {}, {})
    assert state.in_flight == {"one": 0}


def test_what_lived_on_a_lost_island_takes_no_memory_of_its_slice():
    machine = Machine(islands=("one", "two"))
    full, _ = machine.call(size=100)
    machine.end(full)
    running, actions = machine.call(islands=("two",), size=0)
    waiting, actions = machine.call(islands=("two",), size=100)
    assert not started(actions)
    assert started(machine.tell(IslandLost("one"))) == [waiting[0]]
    machine.end(running, "two")
    machine.end(waiting, "two")
    assert machine.state.held_bytes == {"slice": 100}
    machine.tell(FutureDropped(full))
    assert machine.state.held_bytes == {"slice": 100}


def test_what_a_lost_island_was_to_make_takes_no_memory_either():
    machine = Machine()
    made, _ = machine.call(size=100)
    machine.tell(IslandLost("one"))
    machine.end(made, device_s=None)
    assert not machine.state.held_bytes


def test_an_op_that_was_lost_is_no_time_of_its_client():
    machine = Machine(1)
    machine.end(machine.call()[0], device_s=2.0)
    lost, _ = machine.call()
    machine.end(lost, device_s=None)
    client = machine.state.clients[0]
    assert client.used_s == pytest.approx(2.0)
    assert client.op_s == 2.0


def test_runs_start_on_an_island_that_joined():
    machine = Machine()
    machine.fill()
    machine.tell(IslandJoined("two"))
    key, actions = machine.call(islands=("two",))
    assert started(actions) == [key[0]]
