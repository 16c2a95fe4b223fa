"""A strategy gives the same answer in one process and in two, and is saved by both."""

import functools

import jax
import numpy as np
import pytest

from tests.multiprocess import partitioned_programs as programs
from tests.multiprocess.processes import run_processes, values
from tests.steps import adam, assert_close, mlp, mlp_loss, trainer

pytestmark = pytest.mark.slow
LAYOUTS = [(1, 8), (2, 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return {layout: tmp_path_factory.mktemp("saved") for layout in LAYOUTS}


@pytest.fixture(scope="module")
def laws(saved):
    """What every process found under each builder, by layout."""
    return {layout: on(layout, programs.laws, saved[layout]) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def gone_on(laws, saved):
    """Parameters after a layout went on with what the other one had saved."""
    one, two = LAYOUTS
    return {
        one: on(one, programs.gone_on, saved[two]),
        two: on(two, programs.gone_on, saved[one]),
    }


def on(layout, program, directory):
    processes, devices = layout
    arguments = {"processes": processes, "devices": devices, "directory": directory}
    return values(run_processes(program, directory, **arguments))


@functools.cache
def alone(steps):
    init_fn, step_fn = trainer(adam())
    step, state = jax.jit(step_fn), init_fn(None)
    batches = programs.global_batches()
    for number in range(steps):
        state, _ = step(state, batches[number % len(batches)])
    return jax.device_get(state["params"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", programs.NAMES)
def test_every_strategy_trains_as_one_device_in_any_number_of_processes(
    laws, layout, name
):
    for process in laws[layout]:
        assert_close(process[name]["params"], alone(4), rtol=1e-5)


def test_first_updates_are_checked_in_one_process_and_told_to_be_not_in_two(laws):
    one, two = LAYOUTS
    assert [each["checked"] for each in laws[one]] == [["same", "same"]]
    assert [each["checked"] for each in laws[two]] == [["not checked"]] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", programs.NAMES)
def test_every_process_gets_evaluations_and_predictions(laws, layout, name):
    [batch], params = programs.global_batches(1), alone(4)
    for process in laws[layout]:
        value = process[name]
        np.testing.assert_allclose(
            value["evaluated"], mlp_loss(params, batch), rtol=1e-4
        )
        np.testing.assert_allclose(
            value["predicted"], mlp(params, batch["x"]), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_array_equal(sorted(value["uneven"]), range(11))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", programs.NAMES)
def test_a_state_that_was_put_is_trained_in_microbatches(laws, layout, name):
    for process in laws[layout]:
        assert_close(process[name]["own_loop"], alone(2), rtol=1e-5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("devices", "must leave each process a device, got fsdp on 4 and none in 1."),
        ("init_fn", "`init_fn` must be the same in all processes"),
        ("seed", "`key` must be the same in all processes"),
        ("state", "`w` must be the same in all processes"),
    ],
)
def test_processes_that_are_not_alike_are_refused_in_all(laws, what, message):
    assert laws[1, 8][0]["refused"][what] is None
    for process in laws[2, 4]:
        assert message in process["refused"][what]
        assert process["refused"]["nothing"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", programs.NAMES)
def test_what_was_saved_goes_on_in_other_processes_under_another_strategy(
    gone_on, layout, name
):
    for process in gone_on[layout]:
        assert_close(process[name], alone(6), rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", programs.NAMES)
@pytest.mark.parametrize("mode", ["single", "per_host"])
def test_an_input_function_is_read_by_whom_its_part_is_for(laws, layout, name, mode):
    expected = np.stack([batch["x"] for batch in programs.global_batches(2)])
    for process in laws[layout]:
        np.testing.assert_array_equal(process[name]["read"][mode], expected)
