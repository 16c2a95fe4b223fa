"""Train a ResNet on 1,437 real handwritten digits; test it on 360 others.

`make demo` runs this on eight fake CPU devices, `make demo STRATEGY=fsdp` with its
state cut over them, and `STRATEGY=auto` under the strategy that is fastest. The claim:
what one replica does, written as for one device, trains on eight, batch norm included,
and real digits are read. One that was killed goes on when it is run again; one that
ended begins anew.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import replicator
from experiments import config_flags, digits, run_folder
from experiments.config_flags import Count, Rate, Settings, Whole, check_batch
from experiments.strategy_flag import StrategyName, replicator_for
from models.resnet import TENSOR_PARALLEL, ResNet
from replicator.base.host.json_lines import read_lines
from replicator.base.types import InitFn, StepFn
from replicator.nnx import BatchNorm, params_of, value_and_grad, with_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      strategy: How the step and its state are spread over devices; auto tries several.
      stats: Of batch norm: over all replicas, or those of each replica.
      steps: Updates.
      global_batch: Examples per update, over all replicas.
      accumulate: Microbatches per update.
      learning_rate: Peak of the cosine schedule.
      width: Channels of the first stage.
      seed: Of initialisation and example order.
      directory: Where checkpoints, metrics and the learning curve go.
      profile_from: The first of ten steps to trace; 0 traces none.
    """

    strategy: Literal["auto", StrategyName] = "data_parallel"
    stats: Literal["all", "replica"] = "all"
    steps: Count = 600
    global_batch: Count = 64
    accumulate: Count = 1
    learning_rate: Rate = 3e-3
    width: Count = 8
    seed: Whole = 0
    directory: str = "runs/digits_resnet"
    profile_from: Whole = 0


# What may differ from sitting to sitting: the state learns the same.
FREE = {"strategy", "steps", "directory", "profile_from"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the experiment.

    Attributes:
      accuracy: Share of test digits read right at the end.
      steps: Updates that were made, those of earlier sittings included.
      curve: (step, test accuracy) along the way, earlier sittings included.
      examples_per_s: Training throughput, compilation left out.
      seconds: From this sitting's first batch to the last update, compilation included.
    """

    accuracy: float
    steps: int
    curve: list[tuple[int, float]]
    examples_per_s: float
    seconds: float


def make_training(rep: replicator.Replicator, config: Config) -> tuple[InitFn, StepFn]:
    """Return `init_fn` and `step_fn`."""
    optimizer = rep.wrap_optimizer(
        optax.adamw(
            optax.warmup_cosine_decay_schedule(
                0.0, config.learning_rate, config.steps // 10, config.steps
            ),
            weight_decay=1e-3,
        ),
        name="model",
    )

    def init_fn(key: jax.Array) -> dict:
        model = ResNet(
            depth=18,
            num_classes=digits.NUM_CLASSES,
            width=config.width,
            in_channels=1,
            stem="small",
            norm=functools.partial(BatchNorm, stats=config.stats),
            rngs=nnx.Rngs(key),
        )
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def step_fn(state: dict, batch: dict) -> tuple[dict, dict]:
        (loss, model), grads = value_and_grad(_loss)(state["model"], batch)
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def problem(rep: replicator.Replicator, *, small: bool = False) -> tuple:
    """Return `step_fn`, `init_fn` and the shapes of a batch, for `replicator plan`.

    Args:
      rep: Where it is to train; a device gets 8 digits, or 1.
      small: Whether to take a quarter of the width, for `--rehearse`.
    """
    config = Config(
        width=16 if small else 64, global_batch=(1 if small else 8) * rep.mesh.size
    )
    init_fn, step_fn = make_training(rep, config)
    batch = {
        "image": jax.ShapeDtypeStruct((config.global_batch, 8, 8, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((config.global_batch,), jnp.int32),
    }
    return step_fn, init_fn, batch


def train(rep: replicator.Replicator, config: Config) -> Outcome:
    """Train and test; write what happened into `config.directory`."""
    init_fn, step_fn = make_training(rep, config)
    result = rep.run(
        step_fn,
        functools.partial(
            digits.train_input_fn, global_batch=config.global_batch, seed=config.seed
        ),
        init_fn=init_fn,
        steps=config.steps,
        seed=config.seed,
        accumulate=config.accumulate,
        directory=config.directory,
        eval_fn=_test,
        eval_dataset=functools.partial(
            digits.eval_input_fn, global_batch=config.global_batch
        ),
        eval_every=max(1, config.steps // 12),
        profile=_traced(config),
        **run_folder.saved_in(Path(config.directory), seconds=10),
    )
    assert result.evaluation is not None  # the last state's
    done = result.progress  # None if all steps were made in an earlier sitting
    return Outcome(
        accuracy=float(result.evaluation["accuracy"]),
        steps=result.step,
        curve=_curve(Path(config.directory) / "metrics.jsonl"),
        examples_per_s=(done and done.examples_per_s) or 0.0,
        seconds=done.elapsed_s if done else 0.0,
    )


def _traced(config: Config) -> range | None:
    first = config.profile_from
    return range(first, first + 10) if first else None


def _loss(model: ResNet, batch: dict) -> jax.Array:
    logits = model(batch["image"])
    labels = batch["label"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _test(state: dict, batch: dict) -> dict:
    reader = nnx.clone(state["model"])
    reader.eval()
    read = jnp.argmax(reader(batch["image"]), axis=-1)
    return {"accuracy": (read == batch["label"]).astype(jnp.float32)}


def _curve(path: Path) -> list[tuple[int, float]]:
    name = "eval/accuracy"
    return [(row["step"], row[name]) for row in read_lines(path) if name in row]


def _draw(curve: list[tuple[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True), marker="o")
    axes.set(xlabel="step", ylabel="test accuracy", title="UCI digits, ResNet-18")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _report(rep: replicator.Replicator, config: Config, outcome: Outcome) -> Table:
    directory = Path(config.directory)
    table = Table("digits_resnet", "", show_lines=False)
    table.add_row("test accuracy", f"{outcome.accuracy:.2%} of 360 digits")
    table.add_row("throughput", f"{outcome.examples_per_s:,.0f} examples/s")
    table.add_row("replicas", f"{rep.num_replicas} ({jax.devices()[0].platform})")
    strategy = rep.layout.describe().get("name", "data_parallel")
    table.add_row("strategy", f"{strategy}, {jax.device_count()} devices")
    table.add_row("training", f"{outcome.steps} steps in {outcome.seconds:.0f} s")
    table.add_row("learning curve", str(directory / "learning_curve.png"))
    table.add_row("metrics", str(directory / "metrics.jsonl"))
    return table


def main(config: Config) -> None:
    if config.strategy == "auto":
        rep = replicator.Replicator(strategy="auto")
        check_batch(config, 1)  # strategies that do not divide are not chosen
    else:
        rep = replicator_for(config, tensor_parallel=TENSOR_PARALLEL)
    run_folder.claim(config.directory, config, free=FREE)
    outcome = train(rep, config)
    _draw(outcome.curve, Path(config.directory) / "learning_curve.png")
    Console().print(_report(rep, config, outcome))
    run_folder.release(config.directory)


if __name__ == "__main__":
    config_flags.run(main, Config)
