"""Fake devices, in processes of their own: there JAX has not started yet."""

import os
import subprocess
import sys

import jax
import pytest

import replicator

TRAIN = """
import jax.numpy as jnp, numpy as np, optax
rep = replicator.Replicator(compilation_cache=False)
optimizer = rep.wrap_optimizer(optax.sgd(0.1))
def init_fn(key):
    return {"w": jnp.ones(4), "opt": optimizer.init(jnp.ones(4))}
def step_fn(state, batch):
    grads = jnp.ones(4) * batch["x"].mean()
    updates, opt = optimizer.update(grads, state["opt"])
    return {"w": state["w"] + updates, "opt": opt}, {}
step, state = rep.compile(step_fn), rep.init(init_fn)
for _ in range(100):
    state, _ = step(state, {"x": np.ones(16, np.float32)})
print(rep.num_replicas, round(float(state["w"][0]), 3))
"""


def python(code, **environment):
    """Run `code` in a fresh Python; return its output, or its error's last line."""
    unset = ("NPROC", "XLA_FLAGS", "JAX_PLATFORMS", "REPLICATOR_FAKE_DEVICES")
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


SET_UPS = {
    "a call": ("import replicator; replicator.fake_devices(8)", {}),
    "two calls": (
        "import replicator; replicator.fake_devices(8); replicator.fake_devices(8)",
        {},
    ),
    "replicator's variable": (
        "import jax.numpy; import replicator",
        {"REPLICATOR_FAKE_DEVICES": "8"},
    ),
    "XLA's flag": (
        "import replicator",
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    ),
    "the variable, confirmed by a call": (
        "import replicator, jax; jax.devices(); replicator.fake_devices(8)",
        {"REPLICATOR_FAKE_DEVICES": "8"},
    ),
    "the flag, confirmed by a call": (
        "import replicator, jax; jax.devices(); replicator.fake_devices(8)",
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    ),
    "a call over XLA's flag": (
        "import replicator; replicator.fake_devices(8)",
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "a call" else pytest.param(name, marks=pytest.mark.slow)
        for name in SET_UPS
    ],
)
def test_a_set_up_trains_a_hundred_steps_on_eight_devices(name):
    code, environment = SET_UPS[name]
    assert python(code + TRAIN, **environment) == "8 -9.0\n"


def test_the_cells_of_a_notebook_train_on_eight_devices():
    # A kernel runs each cell inside its event loop, in the main thread.
    cells = f"""
import asyncio, signal
cells = ["import replicator; replicator.fake_devices(8)", {TRAIN!r}, "rep.run("
    "lambda s, b: ({{**s, 'w': s['w'] + 1}}, {{}}), [{{'x': np.ones(16)}}], "
    "init_fn=lambda key: init_fn(key), steps=50, display=False); print('ran')"]
names = {{}}
async def kernel():
    for cell in cells:
        exec(cell, names)
        await asyncio.sleep(0)
asyncio.run(kernel())
"""
    assert python(cells) == "8 -9.0\nran\n"


def test_too_late_says_what_to_call_earlier():
    code = "import replicator, jax; jax.devices(); replicator.fake_devices(8)"
    message = python(code, JAX_PLATFORMS="cpu")
    assert message == (
        "replicator.errors.TooLateError: `fake_devices` must be called before JAX "
        "starts, got 8 when JAX already runs 1 cpu device(s). Call it (or set "
        "REPLICATOR_FAKE_DEVICES=8) before the first array or `jax.devices()`; in a "
        "notebook, restart the kernel."
    )


def test_too_late_an_import_says_what_to_call_earlier():
    code = "import jax; jax.devices(); import replicator"
    message = python(code, JAX_PLATFORMS="cpu", REPLICATOR_FAKE_DEVICES="8")
    assert message.startswith("replicator.errors.TooLateError: `fake_devices` must be")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "-1", "eight", "8.0"])
def test_a_variable_that_is_no_count_is_refused(value):
    message = python("import replicator", REPLICATOR_FAKE_DEVICES=value)
    assert message == (
        "replicator.errors.ArgumentError: `REPLICATOR_FAKE_DEVICES` must be a positive "
        f"number, got {value!r}. Set it to 8, or unset it."
    )


@pytest.mark.slow
def test_an_empty_variable_asks_for_nothing():
    assert python("import replicator; print(1)", REPLICATOR_FAKE_DEVICES="") == "1\n"


def test_importing_starts_no_backend_and_no_thread():
    code = """
import threading, replicator
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), threading.active_count())
"""
    assert python(code) == "False 1\n"


@pytest.mark.slow
def test_the_variable_starts_no_backend_either():
    code = """
import threading, replicator
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), threading.active_count())
"""
    assert python(code, REPLICATOR_FAKE_DEVICES="8") == "False 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "given", "pool"), [(8, None, 16), (32, None, 64), (8, "24", 24)]
)
def test_the_pool_holds_two_threads_per_device(count, given, pool):
    code = f"""
import os, replicator
replicator.fake_devices({count})
print(os.environ["NPROC"])
"""
    environment = {} if given is None else {"NPROC": given}
    assert python(code, **environment) == f"{pool}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "pool"), [({}, None), ({"JAX_NUM_CPU_DEVICES": "8"}, 16)]
)
def test_a_replicator_sizes_the_pool_for_several_devices_alone(environment, pool):
    code = """
import os, replicator
replicator.Replicator()
print(os.environ.get("NPROC"))
"""
    assert python(code, **environment) == f"{pool}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("count", "pool"), [(8, 16), (32, 64)])
def test_importing_sizes_the_pool_for_xlas_own_flag(count, pool):
    code = "import os, replicator; print(os.environ['NPROC'])"
    flag = f"--xla_dump_to=/dev/null --xla_force_host_platform_device_count={count}"
    assert python(code, XLA_FLAGS=flag) == f"{pool}\n"


@pytest.mark.slow
def test_importing_leaves_the_pool_alone_where_nobody_asks_for_devices():
    assert python("import os, replicator; print('NPROC' in os.environ)") == "False\n"


def test_asking_again_for_what_runs_does_nothing():
    replicator.fake_devices(jax.device_count())
    assert jax.device_count() == 8
