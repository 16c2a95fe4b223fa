"""Compare a partitioned step of a language model with the same one placed by hand.

`same_program`: for FSDP and for tensor parallelism, our compiled step has the
collectives of the step with its constraints written by hand: as many of each kind, of
as many bytes. `ratio_low`: it takes no longer, on eight fake devices; the slower of the
two, lower 95 % bound.

By hand means: whoever writes the model knows how each weight is kept, and says at each
use how it is multiplied, and how its gradient is kept. Ours is `models/transformer.py`,
which knows nothing of that.
"""

import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from absl import app, flags
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import replicator
from benchmarks import tasks
from benchmarks.step.step_pair import OwnLoop, replicator_init, replicator_step
from benchmarks.timing import Estimate, ratio, time_rounds
from models.transformer import TENSOR_PARALLEL, Transformer
from replicator import strategies
from replicator.base.types import PyTree
from replicator.engine.inspection.collectives import collectives_of
from replicator.strategies import Strategy

DEVICES = 8
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Interleaved blocks of each step.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps per block.")
_WIDTH = flags.DEFINE_integer("width", 128, "Of the language model.")
_CONTEXT = flags.DEFINE_integer("context", 32, "Tokens of a sequence.")

Cuts = Mapping[str, tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A strategy, and what it comes to by hand.

    Attributes:
      strategy: What ours is given.
      stored: How each weight is kept, by its name in a layer, without the axis of
        layers.
      computed: How it is multiplied; whole where it is not named.
    """

    strategy: Strategy
    stored: Cuts
    computed: Cuts


_MEGATRON = {
    "embedding": ("model",),
    "qkv": (None, None, "model"),
    "out": ("model",),
    "up": (None, "model"),
    "down": ("model",),
}
PAIRS = (
    Pair(
        strategy=strategies.fsdp(),
        stored={
            "embedding": ("shard",),
            "qkv": ("shard",),
            "out": (None, None, "shard"),
            "up": (None, "shard"),
            "down": ("shard",),
        },
        computed={},
    ),
    Pair(
        strategy=strategies.tensor_parallel(TENSOR_PARALLEL, model=4, replicas=2),
        stored=_MEGATRON,
        computed=_MEGATRON,
    ),
)


class PlacedTransformer(Transformer):
    """The same network; `use(name, weight)` says where each weight is multiplied."""

    def __init__(self, use: Callable[[str, jax.Array], jax.Array], **options: Any):
        """Make it; other options are those of `Transformer`."""
        super().__init__(**options)
        self.use = use

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Compute logits as `Transformer` does."""
        table = self.embed.embedding
        table[...] = self.use("embedding", table[...])
        return super().__call__(tokens)

    def _through_blocks(self, x: jax.Array) -> jax.Array:
        graphdef, stacked = nnx.split(self.blocks)

        def layer(x: jax.Array, params: PyTree) -> tuple[jax.Array, None]:
            block = nnx.merge(graphdef, params)
            for name in ("qkv", "out", "up", "down"):
                kernel = getattr(block, name).kernel
                kernel[...] = self.use(name, kernel[...])
            return block(x), None

        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, stacked)[0]


def placed_by_hand(pair: Pair, mesh: Mesh) -> Callable[[str, jax.Array], jax.Array]:
    """Return how a weight is used: constrained there, and its gradient to its place."""

    def lie(leaf: jax.Array, cut: tuple[str | None, ...]) -> jax.Array:
        where = NamedSharding(mesh, PartitionSpec(*cut))
        return jax.lax.with_sharding_constraint(leaf, where)

    def use(name: str, weight: jax.Array) -> jax.Array:
        computed, stored = pair.computed.get(name, ()), pair.stored[name]

        @jax.custom_vjp
        def at_use(weight: jax.Array) -> jax.Array:
            return lie(weight, computed)

        at_use.defvjp(
            lambda weight: (lie(weight, computed), None),
            lambda _, ct: (lie(ct, stored),),
        )
        return at_use(weight)

    return use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """One step twice, as loops; and what each puts on the wire.

    Attributes:
      loops: `"replicator"`, `"by hand"` and, to compare that with itself, once more.
      wire: Of the first two: by kind of collective, how many and how many bytes.
    """

    loops: dict[str, OwnLoop]
    wire: dict[str, dict[str, tuple[int, int]]]


def steps_of(pair: Pair, *, width: int, context: int) -> Steps:
    """Compile the step of a strategy, ours and by hand."""
    rep = replicator.Replicator(strategy=pair.strategy)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    sizes = {"width": width, "context": context, "remat": True, "layers": 4}
    ours = tasks.language_model(32, vocabulary=256, **sizes)
    make = functools.partial(PlacedTransformer, placed_by_hand(pair, rep.mesh))
    placed = tasks.language_model(32, vocabulary=256, make=make, **sizes)

    step = rep.compile(replicator_step(ours, tx))
    init_fn, batch = replicator_init(placed, tx), ours.batch
    state = rep.init(init_fn)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = rep.layout.batch_shardings(batch, axis=0)

    def by_hand() -> Any:
        return jax.jit(
            replicator_step(placed, tx),
            in_shardings=(where, {"tokens": rows}),
            out_shardings=(where, None),
            donate_argnums=0,
        )

    def loop(step: Any, state: PyTree) -> OwnLoop:
        return OwnLoop(step, state, itertools.repeat(batch), sharding=rows)

    begun = rep.init(replicator_init(ours, tx))
    compiled = {
        "replicator": step.lower(begun, batch).compile(),
        "by hand": by_hand().lower(state, batch).compile(),
    }
    return Steps(
        loops={
            "replicator": loop(step, begun),
            "by hand": loop(by_hand(), state),
            "by hand again": loop(by_hand(), rep.init(init_fn)),
        },
        wire={name: on_the_wire(each, rep.mesh) for name, each in compiled.items()},
    )


def on_the_wire(
    compiled: jax.stages.Compiled, mesh: Mesh
) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of collectives, by kind and mesh axes."""
    counts, sent = Counter(), Counter()
    for each in collectives_of(compiled.as_text() or "", dict(mesh.shape)):
        counts[each.name] += each.count
        sent[each.name] += each.wire_bytes
    return {name: (counts[name], sent[name]) for name in sorted(counts)}


def _table(wire: Mapping[str, dict[str, dict[str, tuple[int, int]]]]) -> Table:
    table = Table("strategy", "collective", "replicator", "by hand")
    for name, both in wire.items():
        for kind in sorted(set().union(*both.values())):
            cells = [both[who].get(kind, (0, 0)) for who in ("replicator", "by hand")]
            table.add_row(name, kind, *(f"{n}: {size:,} B" for n, size in cells))
    return table


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    steps = {
        pair.strategy.name: steps_of(pair, width=_WIDTH.value, context=_CONTEXT.value)
        for pair in PAIRS
    }
    wire = {name: each.wire for name, each in steps.items()}
    Console().print(_table(wire))
    same = all(each["replicator"] == each["by hand"] for each in wire.values())
    ratios: dict[str, Estimate] = {}
    itself: dict[str, Estimate] = {}
    for name, each in steps.items():
        blocks = {
            who: functools.partial(loop.run, _STEPS.value)
            for who, loop in each.loops.items()
        }
        times_s = time_rounds(blocks, rounds=_ROUNDS.value)
        ratios[name] = ratio(times_s["replicator"], times_s["by hand"])
        itself[name] = ratio(times_s["by hand again"], times_s["by hand"])
        print(f"{name}: ours / by hand {ratios[name]}, by hand / itself {itself[name]}")
    result = {
        "same_program": int(same),
        "ratio_low": round(max(each.low for each in ratios.values()), 4),
        **{f"{name}_ratio": round(each.median, 4) for name, each in ratios.items()},
        "aa_ratio_low": round(max(each.low for each in itself.values()), 4),
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
