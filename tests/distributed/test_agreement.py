"""What one process alone agrees on; two processes: tests/multiprocess."""

import math
import time

import pytest

from replicator.distributed import any_process, barrier, exchange, initialize
from replicator.errors import ArgumentError, TooLateError


def test_one_process_hears_itself():
    assert exchange("step", {"step": 3, "loss": 0.1}) == [{"step": 3, "loss": 0.1}]


def test_one_process_gets_what_many_would():
    assert exchange("pair", (1, 2)) == [[1, 2]]


def test_numbers_that_json_lacks_are_told_all_the_same():
    [value] = exchange("loss", math.nan)
    assert math.isnan(value)


@pytest.mark.parametrize("flag", [False, True])
def test_any_of_one_process_is_its_own_flag(flag):
    assert any_process("stop", flag) is flag


def test_one_process_does_not_wait_at_a_barrier():
    started_s = time.monotonic()
    barrier("end")
    assert time.monotonic() - started_s < 60  # its limit is 600 s


@pytest.mark.parametrize("name", ["", "a b", "a#1", "a\n"])
def test_a_name_that_could_meet_another_is_refused(name):
    with pytest.raises(ArgumentError, match="`name` must be letters"):
        exchange(name, 1)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_a_value_that_is_not_json_is_refused(value):
    with pytest.raises(ArgumentError, match="`value` must be of JSON's types"):
        exchange("value", value)


def test_without_a_cluster_initialize_does_nothing(monkeypatch):
    monkeypatch.delenv("REPLICATOR_COORDINATOR", raising=False)
    assert initialize() is None


def test_one_process_needs_no_group():
    assert initialize("127.0.0.1:1", 1, 0) is None


def test_half_of_the_arguments_are_refused():
    with pytest.raises(ArgumentError, match="must be given together"):
        initialize("127.0.0.1:8482", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": 0}, "`timeout_s` must be above 0, got 0"),
        ({"timeout_s": math.nan}, "`timeout_s` must be above 0, got nan"),
        ({"heartbeat_s": 0}, "`heartbeat_s` must be at least 1"),
    ],
)
def test_waits_without_a_bound_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        initialize(**arguments)


def test_joining_after_jax_started_is_refused(mesh):
    assert mesh.size == 8
    with pytest.raises(TooLateError, match="must be called before JAX starts"):
        initialize("127.0.0.1:1", 2, 0)
