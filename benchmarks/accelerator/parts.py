"""Parts of the benchmark, and the names of their numbers."""

import dataclasses
import functools
from collections.abc import Callable

from benchmarks.accelerator import against_hand, checks, islands, training
from benchmarks.accelerator.measured import Parts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the benchmark.

    Attributes:
      run: `run(tiny=...)` measures.
      keys: Names of its numbers.
      devices: Fewest devices that it needs.
    """

    run: Callable[..., Parts]
    keys: tuple[str, ...]
    devices: int = 1


def _keys(names: str, kinds: str) -> tuple[str, ...]:
    return tuple(f"{name}_{kind}" for name in names.split() for kind in kinds.split())


_STEPS = " ".join(f"{{0}}_{step_ms:g}ms" for step_ms in against_hand.STEP_MS)
_RATIOS = "run_ratio own_ratio step_ms"
_MODEL = "tokens_per_s batch parameters peak_gb mfu"
_SAVES = " ".join(f"checkpoint_{size}gb" for size in checks.SIZES_GB)

PARTS = {
    "laws": Part(run=checks.laws, keys=("failures", "law_checks")),
    "step": Part(
        run=against_hand.step_against_hand, keys=_keys(_STEPS.format("step"), _RATIOS)
    ),
    "resnet50": Part(
        run=training.resnet50, keys=_keys("resnet50", "images_per_s batch peak_gb")
    ),
    "lm_100m": Part(
        run=functools.partial(training.language_model, "lm_100m", training.SMALL),
        keys=_keys("lm_100m", _MODEL),
    ),
    "lm_1b": Part(
        run=functools.partial(training.language_model, "lm_1b", training.LARGE),
        keys=_keys("lm_1b", _MODEL),
    ),
    "checkpoint": Part(
        run=checks.checkpoint, keys=_keys(_SAVES, "blocked_ms save_s restore_s peak_gb")
    ),
    "islands": Part(
        run=islands.islands,
        keys=_keys("island", "failures chained_ratio gb_per_s"),
    ),
    "fsdp": Part(
        run=against_hand.fsdp_against_hand,
        keys=_keys(_STEPS.format("fsdp"), _RATIOS),
        devices=2,
    ),
    "scaling": Part(run=training.scaling, keys=("scaling",), devices=2),
}
