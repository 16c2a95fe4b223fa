"""What the processes of `test_partitioned` run: the same under every builder."""

from pathlib import Path

import jax
import numpy as np

from replicator import InputOptions, Replicator, strategies
from replicator.errors import ArgumentError
from replicator.strategies import unpadded
from replicator.training.to_host import whole_on_host
from tests.multiprocess.programs import global_batches
from tests.steps import adam, errors, mlp, trainer

CUT = {"whole_below_bytes": 0}


def by_rules(variables, devices):
    """Build a strategy of one's own: biases whole, others cut as they divide."""
    whole = [v.path for v in variables if v.path == "params/b1"]
    rules = [strategies.Rule(pattern=path) for path in whole]
    rules.append(strategies.Rule(pattern="*", stored="model", computed="model"))
    return strategies.Rules(rules, replica=len(devices) // 2, model=2, **CUT)


STRATEGIES = {
    "data_parallel": strategies.data_parallel(),
    "zero1": strategies.zero1(**CUT),
    "zero2": strategies.zero2(replicas=2, **CUT),
    "fsdp": strategies.fsdp(**CUT),
    "hybrid": strategies.hybrid(shard=4, **CUT),
    # `model` lies over all processes: each of them needs the whole batch.
    "tensor_parallel": strategies.tensor_parallel({"params/w1": (None, "model")}),
    "rules": by_rules,
    # Of four rows, and of one, over eight devices: some hold nothing but padding.
    "padded": strategies.Rules(
        [strategies.Rule(pattern="*", stored=("shard",), uneven="pad")], shard=None
    ),
}
NAMES = list(STRATEGIES)


def over(name):
    return Replicator(strategy=STRATEGIES[name], compilation_cache=False)


def laws(directory):
    """Train under every builder, save, evaluate, predict, and read."""
    found = {"refused": refused(), "checked": checked()}
    for name in NAMES:
        found[name] = trained(name, Path(directory) / name, steps=4)
        found[name]["own_loop"] = own_loop(name)
        found[name]["read"] = {
            mode: read(name, mode) for mode in ("single", "per_host")
        }
    return found


def refused():
    """Return what is said where processes, or their devices, are not alike."""
    here, rep = jax.process_index(), over("fsdp")
    init_fn, _ = trainer(adam())

    def odd(key):
        return {"w": np.full((8, 8), here, np.float32)}

    attempts = {
        "devices": lambda: Replicator(strategy=strategies.fsdp(shards=4)),
        "init_fn": lambda: rep.init(odd),
        "seed": lambda: rep.init(init_fn, seed=here),
        "state": lambda: rep.put(odd(None)),
        "nothing": lambda: rep.put(jax.tree.map(np.asarray, init_fn(None))),
    }
    return {what: told(attempt) for what, attempt in attempts.items()}


def told(attempt):
    try:
        attempt()
    except ArgumentError as failure:
        return str(failure)


def checked():
    """Return what comes of the check of first updates."""
    rep, (init_fn, step_fn) = over("fsdp"), trainer(adam())
    step, state = rep.compile(step_fn, check_first_updates=True), rep.init(init_fn)
    for batch in global_batches(3):
        state, _ = step(state, batch)
    return [each.result for each in step.checked_updates]


def own_loop(name):
    """Make two updates of three microbatches from a state that was put."""
    rep = over(name)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    step, state = rep.compile(step_fn, accumulate=3), rep.put(init_fn(None))
    for batch in global_batches(2):
        state, _ = step(state, batch)
    return unpadded(whole_on_host(state["params"]))


def gone_on(directory):
    """Go on with what each builder saved, under the next one."""
    others = dict(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
    return {
        saved: trained(name, Path(directory) / saved, steps=6)["params"]
        for saved, name in others.items()
    }


def trained(name, directory, steps):
    rep = over(name)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    result = rep.run(
        step_fn,
        global_batches(),
        init_fn=init_fn,
        steps=steps,
        checkpoint_dir=directory,
        checkpoint_every=2,
        display=False,
    )
    state, rows = result.state, global_batches(1)
    evaluated = rep.evaluate(
        lambda state, rows: {"loss": errors(state["params"], rows)}, rows, state=state
    )
    predicted = rep.predict(
        lambda state, rows: mlp(state["params"], rows["x"]), rows, state
    )

    def uneven(context):
        parts = np.array_split(np.arange(11.0), context.num_pipelines)
        return [{"x": parts[context.pipeline_index]}]

    return {
        "params": unpadded(whole_on_host(state["params"])),
        "evaluated": evaluated["loss"],
        "predicted": predicted,
        "uneven": rep.predict(lambda state, rows: rows["x"], uneven, state),
    }


def read(name, mode):
    """Read two batches of an input function, and return them whole."""
    rep = over(name)
    rep.init(trainer(adam())[0])  # a builder of one's own asks for variables

    def input_fn(context):
        size, first = context.batch_size(24), context.pipeline_index
        return [{"x": batch["x"][first * size :][:size]} for batch in global_batches(2)]

    options = InputOptions(mode=mode, epochs=1)
    with rep.batches(input_fn, options) as batches:
        return np.stack([whole_on_host(placed.value["x"]) for placed in batches])
