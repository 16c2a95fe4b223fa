"""Every Python block of README runs, in order, as a reader would paste it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def init_params(key):
    return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}


def loss_fn(params, batch):
    predicted = batch["x"] @ params["w"] + params["b"]
    return ((predicted - batch["y"]) ** 2).mean()


def masked_loss(model, batch):
    apart = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    return (apart * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1.0)


def line_of(examples):
    x = np.random.default_rng(0).normal(size=(examples, 4)).astype(np.float32)
    return {"x": x, "y": x @ np.arange(4, dtype=np.float32)}


@pytest.mark.filterwarnings("default::UserWarning")
def test_every_python_block_runs(tmp_path):
    names = {
        "folder": tmp_path,
        "init_params": init_params,
        "loss_fn": loss_fn,
        "masked_loss": masked_loss,
        "make_model": lambda key: nnx.Linear(4, 1, rngs=nnx.Rngs(key)),
        "dataset": [line_of(32)] * 3,
        "loader": [line_of(32), line_of(32), line_of(19)],
    }
    # A reader has JAX as it comes; optax schedules promote int32 counts.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in BLOCKS:
            # A thousand steps prove no more than ten.
            code = block.replace("steps=1000", "steps=10")
            exec(compile(code, "README.md", "exec"), names)
    assert names["result"].step == 12


def test_the_ten_lines_are_those_of_the_design():
    assert BLOCKS[0].count("\n") <= 20
    assert "rep.run(step_fn, dataset, init_fn=init_fn, steps=1000, seed=0)" in BLOCKS[0]
