"""A run that lacks memory says in our words what its step needed (fault row 23)."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import resource, time
    import jax, jax.numpy as jnp, numpy as np, optax
    import replicator
    from replicator.hooks import StateCallback, every

    rep = replicator.Replicator(num_replicas=1, compilation_cache=False)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        return {"params": jnp.ones((8000,)), "opt": optimizer.init(jnp.ones((8000,)))}

    def loss_fn(params, batch):
        wide = jax.lax.optimization_barrier(batch["x"] + params)  # one whole array
        return (wide * wide).mean()

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": state["params"] + updates, "opt": opt}, {"loss": loss}

    def used():
        return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

    def limit(event):
        if event.step > 2:
            return
        jax.block_until_ready(event.state)
        # The devices give temporaries back a little after the result is there.
        deadline_s = time.monotonic() + 60
        while used() > before + (800 << 20) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_AS, (used() + (300 << 20),) * 2)

    batch = {"x": np.ones((40960, 1), np.float32)}
    before = used()
    hooks = [StateCallback(limit, every(n_steps=2))]
    try:
        rep.run(step_fn, [batch], init_fn=init_fn, steps=6, display=False, hooks=hooks)
    except replicator.errors.DeviceMemoryError as failure:
        print(failure)
"""


@pytest.mark.slow
def test_a_run_that_lacks_memory_says_what_its_step_needed():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert "got 1: it needs 1.2" in done.stdout
    assert "Use `accumulate=2`, `accumulate=4` or `accumulate=5`" in done.stdout
