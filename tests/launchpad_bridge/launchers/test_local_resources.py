"""Who gets which accelerators and cores of this machine."""

import pytest

from replicator.errors import LaunchError
from replicator.launchpad_bridge.launchers.local_resources import (
    LocalMachine,
    look_at_machine,
    share_out,
)
from replicator.launchpad_bridge.protocols import Executable, Resources

MACHINE = LocalMachine(gpus=["0", "1", "5"], cores=[0, 1, 2, 3], memory_bytes=1000)
NO_GPUS = LocalMachine(gpus=[], cores=[0, 1], memory_bytes=1000)


def workers(**resources):
    return [
        Executable(label=name, index=0, name=name, run=print, resources=each)
        for name, each in resources.items()
    ]


def environments(executables, machine=MACHINE, environ=None):
    shares = share_out(executables, machine, environ or {})
    return {name: dict(share.environment) for name, share in shares.items()}


def test_gpus_are_handed_out_once_in_the_order_of_the_program():
    found = environments(workers(a=Resources(gpus=1), b=Resources(gpus=2)))
    assert found == {
        "a": {"CUDA_VISIBLE_DEVICES": "0"},
        "b": {"CUDA_VISIBLE_DEVICES": "1,5"},
    }


def test_no_gpus_hides_them_from_jax_too():
    executables = workers(a=Resources(gpus=0))
    assert environments(executables) == {
        "a": {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    }


def test_who_shares_gpus_does_not_take_their_memory_at_once():
    found = environments(workers(a=Resources(), b=Resources(gpus=0), c=Resources()))
    assert found["a"] == found["c"] == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_who_is_alone_with_them_may():
    assert environments(workers(a=Resources(), b=Resources(gpus=0)))["a"] == {}


@pytest.mark.parametrize(
    "name", ["XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"]
)
def test_what_the_user_says_of_memory_is_left_alone(name):
    executables = workers(a=Resources(), b=Resources())
    assert environments(executables, environ={name: "x"}) == {"a": {}, "b": {}}
    executables = workers(a=Resources(env={name: "x"}), b=Resources())
    assert environments(executables)["a"] == {}


def test_nothing_is_set_where_there_are_no_gpus():
    assert environments(workers(a=Resources(), b=Resources()), NO_GPUS) == {
        "a": {},
        "b": {},
    }


TOO_MUCH = {
    "gpus": (Resources(gpus=4), "3 of this machine's 3 are left"),
    "cpus": (Resources(cpus=4.5), "this machine has 4 core"),
    "memory_bytes": (Resources(memory_bytes=1001), "this machine has 1000"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_more_than_there_is_is_refused_by_name(what):
    resources, there = TOO_MUCH[what]
    with pytest.raises(LaunchError, match=f"`{what}` of `b` must be there.*{there}"):
        share_out(workers(a=Resources(), b=resources), MACHINE, {})


def test_gpus_that_others_took_are_refused():
    executables = workers(a=Resources(gpus=2), b=Resources(gpus=2))
    with pytest.raises(LaunchError, match="1 of this machine's 3 are left"):
        share_out(executables, MACHINE, {})


def test_claims_on_cores_are_added_to_no_limit():
    many = workers(**{f"w{number}": Resources(cpus=1) for number in range(32)})
    assert all(share.cores == () for share in share_out(many, MACHINE, {}).values())


def test_cores_are_handed_out_once_where_that_is_wanted():
    executables = workers(
        a=Resources(cpus=1), b=Resources(cpus=2.0), c=Resources(cpus=0.5), d=Resources()
    )
    shares = share_out(executables, MACHINE, {}, pin_cores=True)
    cores = {name: list(share.cores) for name, share in shares.items()}
    assert cores == {"a": [0], "b": [1, 2], "c": [], "d": []}


def test_more_pinned_cores_than_there_are_are_refused():
    executables = workers(a=Resources(cpus=3), b=Resources(cpus=2))
    with pytest.raises(LaunchError, match="1 core"):
        share_out(executables, MACHINE, {}, pin_cores=True)


def test_visible_devices_of_the_launcher_are_all_there_are():
    assert look_at_machine({"CUDA_VISIBLE_DEVICES": "3, 7"}).gpus == ["3", "7"]
    assert look_at_machine({"CUDA_VISIBLE_DEVICES": ""}).gpus == []


def test_this_machine_has_cores_and_memory():
    machine = look_at_machine({})
    assert len(machine.cores) >= 1
    assert machine.memory_bytes > 1e8
