import gc
import itertools
import subprocess
import sys
import threading
import traceback

import pytest

from replicator.errors import InputTimeoutError
from replicator.inputs import Prefetcher
from replicator.inputs.prefetch import decide_wait

SOON_S = 60.0  # a bound for what happens at once unless something is broken


class StridingClock:
    """Goes on by a fixed stride whenever it is asked."""

    def __init__(self, stride_s):
        self._times = itertools.count(0.0, stride_s)

    def now_s(self):
        return next(self._times)


@pytest.fixture
def endless():
    """Yield a generator that counts for ever, and an event for when it is closed."""
    closed = threading.Event()

    def count():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    return count(), closed


@pytest.fixture
def stuck():
    """Yield a generator that never yields, until the test is over."""
    release = threading.Event()

    def wait_for_data():
        release.wait()
        yield 0

    yield wait_for_data()
    release.set()


def test_items_come_in_order_and_end():
    assert list(Prefetcher(i for i in range(5))) == [0, 1, 2, 3, 4]


def test_closing_stops_a_thread_that_waits_for_room(endless):
    source, closed = endless
    items = Prefetcher(source, size=1)
    assert next(items) == 0
    items.close()

    assert closed.is_set()
    assert not items._thread.is_alive()
    assert list(items) == []


def test_a_with_block_closes(endless):
    source, closed = endless
    with Prefetcher(source) as items:
        next(items)

    assert closed.is_set()


def test_forgetting_it_stops_its_thread(endless, quick_collections):
    source, closed = endless
    items = Prefetcher(source)
    next(items)
    del items
    gc.collect()

    assert closed.wait(SOON_S)


def test_it_reads_ahead_as_far_as_asked():
    made, fourth = [], threading.Event()

    def source():
        for i in itertools.count():
            made.append(i)
            if i == 3:
                fourth.set()
            yield i

    with Prefetcher(source(), size=2) as items:
        next(items)
        assert fourth.wait(SOON_S)  # one taken, two kept, one in hand

    assert made == [0, 1, 2, 3]


def test_what_nobody_is_to_ask_for_is_made_when_it_is_waited_for():
    made = []

    def items():
        for number in range(4):
            made.append(number)
            yield number

    with Prefetcher(items(), size=8, unasked=2) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        before = list(made)
        assert list(batches) == [2, 3]
    assert before == [0, 1]


def test_an_error_arrives_after_the_items_before_it_with_its_traceback():
    def read_a_broken_file():
        yield 1
        raise OSError("disk")

    items = Prefetcher(read_a_broken_file())
    assert next(items) == 1
    with pytest.raises(OSError, match="disk") as caught:
        next(items)

    frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert "read_a_broken_file" in frames


def test_an_error_stays():
    def fail():
        yield from ()
        raise OSError("disk")

    items = Prefetcher(fail())
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            next(items)


def test_a_wait_is_bounded_and_says_for_what(stuck, caplog):
    items = Prefetcher(stuck, timeout_s=600.0, clock=StridingClock(50.0))

    with pytest.raises(
        InputTimeoutError, match=r"^`dataset` must yield batch 0 within"
    ):
        next(items)
    # Threads of other tests in this process may log, too.
    [warned] = [each for each in caplog.messages if each.startswith("Waited")]
    assert warned.startswith("Waited 100 s for batch 0 of the dataset.")
    assert "in wait_for_data" in warned


@pytest.mark.parametrize(
    ("waited_s", "warned", "decision"),
    [
        (59.0, False, "wait"),
        (60.0, False, "warn"),
        (61.0, True, "wait"),
        (600.0, False, "warn"),
        (600.0, True, "fail"),
    ],
)
def test_a_long_wait_warns_before_it_fails(waited_s, warned, decision):
    assert decide_wait(waited_s, warned=warned, timeout_s=600.0) == decision


def test_waiting_time_is_summed():
    items = Prefetcher((i for i in range(3)), clock=StridingClock(0.5))
    list(items)

    assert items.stall_s >= 4 * 0.5


def test_the_interpreter_exits_while_an_input_is_open():
    program = (
        "import itertools\n"
        "from replicator.inputs import Prefetcher\n"
        "items = Prefetcher(i for i in itertools.count())\n"
        "print(next(items))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
