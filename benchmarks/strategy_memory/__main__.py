"""Compare what strategies keep on each device with what they should.

`worst_error`: bytes of the optimizer's state under `zero1`, and of all state under
`fsdp`, on each of eight devices, against an eighth. `temp_ratio`: temporaries of a
language model's step under `fsdp` against those of the same step written by hand. And,
with libtpu installed, a model of a billion parameters compiled ahead of time for 256
chips: `fits`, and how many collectives gather activations.
"""

import json

import jax
import optax
from absl import app, flags

import replicator
from benchmarks import tasks
from benchmarks.step.placed_step import placed_step
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.strategy_memory import ahead_of_time
from benchmarks.strategy_memory.shards import worst_error
from benchmarks.tpu_environment import is_installed
from replicator import strategies
from replicator.engine.memory import memory_need
from replicator.engine.step.state import state_shapes

DEVICES = 8
_WIDTH = flags.DEFINE_integer("width", 256, "Of the model on fake devices.")
_TPU = flags.DEFINE_bool("tpu", True, "Compile for TPUs, too, if libtpu is installed.")


def temporaries_bytes(task: tasks.Task) -> tuple[int, int]:
    """Return the temporaries of a device: of our step, and of the one by hand."""
    tx = optax.adamw(1e-3)
    rep = replicator.Replicator(strategy=strategies.fsdp())
    init_fn = replicator_init(task, tx)
    found = rep.inspect(replicator_step(task, tx), init_fn, task.batch)
    print(found)
    shapes = state_shapes(init_fn, rep.layout, name="init_fn")
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    by_hand = placed_step(task, tx, where)
    need = memory_need(by_hand.lower(shapes, task.batch).compile())
    assert found.memory is not None, "a CPU says"
    assert need is not None, "a CPU says"
    return found.memory.temporaries_bytes, need.temporaries_bytes


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    width = _WIDTH.value
    task = tasks.language_model(
        16, vocabulary=2 * width, layers=4, width=width, context=64, remat=True
    )
    ours, by_hand = temporaries_bytes(task)
    print(f"temporaries {ours:,} bytes, by hand {by_hand:,}")
    result: dict[str, float | None] = {
        "worst_error": round(worst_error(task, optax.adamw(1e-3)), 4),
        "temp_ratio": round(ours / by_hand, 4),
        "devices": DEVICES,
        "fits": None,
        "activation_gathers": None,
    }
    if not _TPU.value:
        print("not compiled for TPUs: --notpu")
    elif not is_installed():
        print(
            "not compiled for TPUs: `pip install 'jax-replicator[tpu]'` brings libtpu"
        )
    else:
        given = [each.serialize() for each in _ahead_of_time_flags()]
        result |= ahead_of_time.compile_elsewhere(given)
    print(json.dumps(result))


def _ahead_of_time_flags() -> list[flags.Flag]:
    own = flags.FLAGS.flags_by_module_dict()[ahead_of_time.__name__]
    return [each for each in own if each.present]


if __name__ == "__main__":
    app.run(main)
