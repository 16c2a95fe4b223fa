"""Time training steps of a ResNet-50 and of language models, of this library's."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicator
from benchmarks import tasks
from benchmarks.accelerator.measured import (
    LeftOut,
    Parts,
    memory_limit,
    peak_memory,
)
from benchmarks.step.step_pair import OwnLoop, replicator_init, replicator_step
from benchmarks.tasks import Task
from benchmarks.timing import seconds
from models.attention import fastest_attention
from models.resnet import ResNet
from replicator import strategies

# Dense bfloat16 operations per second of one device, by the maker's data sheet; the
# longest name that the kind begins with counts.
_PEAK = {
    **{"NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12},
    **{"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12},
    **{"TPU v6 lite": 918e12, "TPU v6e": 918e12},
}


def resnet50(*, tiny: bool) -> Parts:
    """Time the training step of a ResNet-50 on images of 224 × 224."""
    size, depth, width = (32, 18, 4) if tiny else (224, 50, 64)
    batch = (4 if tiny else 512) * jax.device_count()

    def task(batch: int) -> Task:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((batch, size, size, 3), np.float32)
        labels = rng.integers(0, 1000, batch, np.int32)
        init = functools.partial(_resnet, depth, width)
        return dataclasses.replace(
            tasks.digits_resnet(1),
            init_model=init,
            batch={"image": images.astype(jnp.bfloat16), "label": labels},
        )

    def measure(batch: int) -> float:
        return _step_time(replicator.Replicator(), task(batch), tiny=tiny)

    batch, step_s = _largest_that_fits(batch, measure)
    yield {"resnet50_images_per_s": round(batch / step_s), "resnet50_batch": batch}
    yield peak_memory("resnet50_peak_gb")


def _resnet(depth: int, width: int, key: jax.Array) -> ResNet:
    return ResNet(
        depth, 1000, width=width, compute_dtype=jnp.bfloat16, rngs=nnx.Rngs(key)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Sizes of a language model.

    Attributes:
      layers: Of attention and perceptron.
      width: Features of a token.
      heads: Of attention.
      vocabulary: Number of different tokens.
      context: Tokens of a sequence.
      remat: Whether layers are computed again for their gradients.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 32_000
    context: int = 1024
    remat: bool = False

    def task(self, batch: int) -> Task:
        """Return its training on so many sequences, in bfloat16."""
        sizes = dataclasses.asdict(self)
        return tasks.language_model(
            batch,
            compute_dtype=jnp.bfloat16,
            attention=fastest_attention(jnp.bfloat16),
            **sizes,
        )

    def parameters(self) -> int:
        """Return how many parameters it has; the table counts once."""
        shapes = jax.eval_shape(self.task(1).init_model, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def operations(self) -> int:
        """Return the model's operations for a token (PaLM, appendix B)."""
        attention = 12 * self.layers * self.width * self.context
        return 6 * self.parameters() + attention


SMALL = Decoder(layers=12, width=768, heads=12)
LARGE = Decoder(layers=18, width=2048, heads=16, remat=True)
TOY = Decoder(layers=2, width=32, heads=2, vocabulary=256, context=16)


def language_model(name: str, decoder: Decoder, *, tiny: bool) -> Parts:
    """Time the training step of a decoder; several devices share a large one's state.

    Args:
      name: Of its numbers.
      decoder: Its sizes.
      tiny: Whether to take those of a toy.
    """
    cut = decoder is LARGE and jax.device_count() > 1
    rep = replicator.Replicator(strategy=strategies.fsdp() if cut else None)
    decoder = TOY if tiny else decoder
    batch, step_s = _largest_that_fits(
        2 * jax.device_count() if tiny else _batch_that_fits(rep, decoder),
        lambda batch: _step_time(rep, decoder.task(batch), tiny=tiny),
    )
    tokens_per_s = batch * decoder.context / step_s
    yield {
        f"{name}_tokens_per_s": round(tokens_per_s),
        f"{name}_batch": batch,
        f"{name}_parameters": decoder.parameters(),
    }
    yield peak_memory(f"{name}_peak_gb")
    kind = jax.devices()[0].device_kind
    known = [each for each in _PEAK if kind.startswith(each)]
    if not known:
        raise LeftOut(f"the peak of a {kind} is not in the table")
    peak = _PEAK[max(known, key=len)] * jax.device_count()
    yield {f"{name}_mfu": round(tokens_per_s * decoder.operations() / peak, 3)}


def _batch_that_fits(rep: replicator.Replicator, decoder: Decoder) -> int:
    """Return the largest power of two, times devices, by what two compilations need."""
    devices = jax.device_count()

    def needed(batch: int) -> int:
        task = decoder.task(batch)
        optimizer = rep.wrap_optimizer(optax.adamw(1e-3))
        state = rep.init(replicator_init(task, optimizer))
        step = rep.compile(replicator_step(task, optimizer))
        memory = step.lower(state, task.batch).compile().memory_analysis()
        assert memory is not None  # CPUs, GPUs and TPUs all have it
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    two, four = needed(2 * devices), needed(4 * devices)
    if (limit := memory_limit()) == float("inf"):
        return 2 * devices
    more = max(0.0, (limit - two) / max(four - two, 1))
    return devices * 2 ** int(np.log2(2 + 2 * more))


def _largest_that_fits(
    batch: int, measure: Callable[[int], float]
) -> tuple[int, float]:
    """Return the batch, halved until `measure(batch)` finds room, and its result."""
    while True:
        try:
            return batch, measure(batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        if batch <= jax.device_count():
            raise LeftOut("one example for each device does not fit its memory")
        print(f"a batch of {batch} does not fit", flush=True)
        batch //= 2


def _step_time(rep: replicator.Replicator, task: Task, *, tiny: bool) -> float:
    """Return the seconds of a training step; its batch lies on the devices."""
    optimizer = rep.wrap_optimizer(optax.adamw(1e-3))
    rows = rep.layout.batch_shardings(task.batch, axis=0)
    loop = OwnLoop(
        rep.compile(replicator_step(task, optimizer)),
        rep.init(replicator_init(task, optimizer)),
        itertools.repeat(jax.device_put(task.batch, rows)),
    )
    loop.run(3)
    block_s = 0.1 if tiny else 2.0
    steps = max(2, round(block_s * 2 / seconds(lambda: loop.run(2))))
    return (
        float(np.median([seconds(lambda: loop.run(steps)) for _ in range(3)])) / steps
    )


def scaling(*, tiny: bool) -> Parts:
    """Time the small decoder's step on one device and on all, a batch of 8 on each."""
    decoder = TOY if tiny else SMALL
    one_s, all_s = (
        _step_time(replicator.Replicator(count), decoder.task(8 * count), tiny=tiny)
        for count in (1, jax.device_count())
    )
    yield {"scaling": round(one_s / all_s, 3)}
