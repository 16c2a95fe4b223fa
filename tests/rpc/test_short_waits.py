"""How a wait for a message begins: with looks, or asleep at once."""

import pytest

from replicator.rpc.short_waits import SHORT_S, ShortWaits


class Scene:
    """A clock that moves when somebody looks, and a message that comes by it."""

    def __init__(self, *, look_s: float = 1e-6) -> None:
        self.now_s = 100.0
        self.look_s = look_s
        self.comes_s = 0.0
        self.looks = 0
        self.waits = ShortWaits(self._look, now_s=lambda: self.now_s)

    def _look(self, timeout_s: float) -> bool:
        assert timeout_s == 0
        self.looks += 1
        self.now_s += self.look_s
        return self.now_s >= self.comes_s

    def wait(self, seconds: float) -> int:
        """Wait for a message that comes after so long; return how often it looked."""
        started_s, looks = self.now_s, self.looks
        self.comes_s = started_s + seconds
        self.waits.begin(started_s)
        self.now_s = max(self.now_s, self.comes_s)  # asleep, if it has not come yet
        self.waits.end(started_s)
        return self.looks - looks


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
    assert scene.wait(3600.0) * scene.look_s == pytest.approx(SHORT_S, rel=0.02)


def test_a_slow_look_is_the_last_of_the_next_64_waits():
    scene = Scene()
    scene.wait(10e-6)
    scene.look_s = 60e-6
    assert scene.wait(100e-6) == 1
    scene.look_s = 1e-6
    assert [scene.wait(10e-6) for _ in range(64)] == [0] * 64
    assert scene.wait(10e-6) > 1


def test_looks_that_stay_slow_become_rare():
    scene = Scene(look_s=60e-6)
    looks = sum(scene.wait(100e-6) for _ in range(1 + 64 + 1 + 128 + 1 + 256 + 1))
    assert looks == 3


def test_looks_that_went_well_for_a_while_are_trusted_again():
    scene = Scene()
    scene.wait(10e-6)
    for _ in range(3):
        scene.look_s = 60e-6
        while not scene.wait(100e-6):
            pass
        scene.look_s = 1e-6
        slept = 0
        while not scene.wait(10e-6):
            slept += 1
        assert slept == 64
        for _ in range(64):
            scene.wait(10e-6)
