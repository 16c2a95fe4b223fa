"""How a wait for a message begins: with looks, or asleep at once."""

import contextlib
import threading
import time

import pytest

from replicator.rpc.adaptive_spin import SHORT_S, AdaptiveSpin
from tests.rpc.courier_cases import NAMES, client_of, serving

LOOK_S = 1e-6
AWAY_S = 2e-3


class Scene:
    """A clock that moves when somebody looks, and a message that comes by it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.is_crowded = False
        self.comes_s = 0.0
        self.looks = 0
        self.waits = AdaptiveSpin(
            self.look, now_s=lambda: self.now_s, let_others=self.let_others
        )

    def look(self, timeout_s: float) -> bool:
        assert timeout_s == 0
        self.looks += 1
        self.now_s += LOOK_S
        return self.now_s >= self.comes_s

    def let_others(self) -> None:
        self.now_s += AWAY_S if self.is_crowded else 0.0

    def wait(self, seconds: float) -> int:
        """Wait for a message that comes after so long; return how often it looked."""
        started_s, looks = self.now_s, self.looks
        self.comes_s = started_s + seconds
        self.waits.begin(started_s)
        self.now_s = max(self.now_s, self.comes_s)  # asleep, if it has not come yet
        self.waits.end(started_s)
        return self.looks - looks

    def wait_until_it_looks(self) -> int:
        """Wait again and again; return how often it slept at once."""
        slept = 0
        while not self.wait(10 * LOOK_S):
            slept += 1
        return slept


def test_the_first_wait_sleeps_at_once():
    assert Scene().wait(10e-6) == 0


def test_a_wait_after_a_short_one_looks_until_the_message_is_there():
    scene = Scene()
    scene.wait(10e-6)
    assert scene.wait(10e-6) == pytest.approx(10, abs=1)


def test_a_wait_after_a_long_one_sleeps_at_once():
    scene = Scene()
    scene.wait(10e-6)
    scene.wait(1.0)
    assert scene.wait(10e-6) == 0


def test_looks_end_when_the_time_is_over():
    scene = Scene()
    scene.wait(10e-6)
    assert scene.wait(3600.0) * LOOK_S == pytest.approx(SHORT_S, rel=0.02)


def test_where_others_take_the_processor_the_next_64_waits_sleep_at_once():
    scene = Scene()
    scene.wait(10e-6)
    scene.is_crowded = True
    assert scene.wait(10e-6) == 1
    scene.is_crowded = False
    scene.wait(10e-6)  # it shows that waits are short again
    assert scene.wait_until_it_looks() == 64


def test_where_others_go_on_taking_it_looks_become_rare():
    scene = Scene()
    scene.is_crowded = True
    # After each look that was too long, one wait more: it shows that waits are short.
    slept = [scene.wait_until_it_looks() for _ in range(9)]
    assert slept == [1, 65, 129, 257, 513, 1025, 2049, 4097, 4097]


def test_looks_that_went_well_for_a_while_are_trusted_again():
    scene = Scene()
    scene.wait(10e-6)
    for _ in range(3):
        scene.is_crowded = True
        scene.wait_until_it_looks()
        scene.is_crowded = False
        assert scene.wait_until_it_looks() == 65
        for _ in range(64):
            scene.wait(10e-6)


def processor_s_of(seconds: float) -> float:
    """Return what this process uses of the processors in so long a time."""
    used_s = time.process_time()
    threading.Event().wait(seconds)
    return time.process_time() - used_s


@pytest.mark.parametrize("transport", NAMES)
@pytest.mark.parametrize("num_clients", [1, 2])
def test_ends_that_fell_silent_take_no_time(transport, num_clients):
    with serving(transport) as server, contextlib.ExitStack() as stack:
        for _ in range(num_clients):
            client = stack.enter_context(client_of(server))
            for _ in range(200):
                client.noop()
        # Several windows: threads of other tests may not have gone home yet.
        assert any(processor_s_of(0.25) < 0.1 for _ in range(8))
