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
from benchmarks.strategy_memory import ahead_of_time
from benchmarks.strategy_memory.language_model import (
    Sizes,
    hand_written_step,
    trainer,
)
from benchmarks.strategy_memory.shards import worst_error
from replicator import strategies
from replicator.engine.memory_errors import memory_need
from replicator.engine.step.state import state_shapes

DEVICES = 8
_WIDTH = flags.DEFINE_integer("width", 256, "Of the model on fake devices.")
_TPU = flags.DEFINE_bool("tpu", True, "Compile for TPUs, too, if libtpu is installed.")


def temporaries_bytes(sizes: Sizes) -> tuple[int, int]:
    """Return the temporaries of a device: of our step, and of the one by hand."""
    tx = optax.adamw(1e-3)
    rep = replicator.Replicator(strategy=strategies.fsdp())
    init_fn, step_fn = trainer(sizes, tx)
    found = rep.inspect(step_fn, init_fn, sizes.batch())
    print(found)
    shapes = state_shapes(init_fn, rep.layout, name="init_fn")
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    by_hand = hand_written_step(sizes, tx, rep.mesh, where)
    need = memory_need(by_hand.lower(shapes, sizes.batch()).compile())
    assert found.memory is not None, "a CPU says"
    assert need is not None, "a CPU says"
    return found.memory.temporaries_bytes, need.temporaries_bytes


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    sizes = Sizes(
        layers=4,
        width=_WIDTH.value,
        heads=4,
        context=64,
        vocabulary=2 * _WIDTH.value,
        global_batch=16,
    )
    ours, by_hand = temporaries_bytes(sizes)
    print(f"temporaries {ours:,} bytes, by hand {by_hand:,}")
    result: dict[str, float | None] = {
        "worst_error": round(worst_error(sizes, optax.adamw(1e-3)), 4),
        "temp_ratio": round(ours / by_hand, 4),
        "devices": DEVICES,
        "fits": None,
        "activation_gathers": None,
    }
    if not _TPU.value:
        print("not compiled for TPUs: --notpu")
    elif not ahead_of_time.is_installed():
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
