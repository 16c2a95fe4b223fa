"""Hold the cost model against published runs of language models on TPUs.

`worst_ratio`: predicted / published seconds, the larger way round, of three models on
256 chips of v5e, by data sheets alone, with nothing that is sent hidden behind the
arithmetic; `without_wires`: the same by arithmetic alone. `efficiency_error`: of the
speed that a chip keeps on 2 to 8 slices, the largest difference, of four models;
`efficiency_error_16` and `_32` likewise, where stragglers, which the model does not
know, cost as much as the network. `v5p_ratio`: the worst of six models on v5p. `stale`:
number of kept compilations whose step is lowered to another text today.

With `--fresh` what is kept is compiled again: ten minutes and more for each model.
"""

import json
import time
from collections.abc import Iterable

from absl import app, flags

import replicator
from benchmarks.plan_published import compiled
from benchmarks.plan_published.predicted import predicted
from benchmarks.plan_published.published import V5E, V5P, Run
from benchmarks.tpu_environment import is_installed
from replicator.strategies.cost import StepTime

_FRESH = flags.DEFINE_multi_enum(
    "fresh", [], list(compiled.RUNS), "Compile these models again, by libtpu."
)
_TINY = flags.DEFINE_bool("tiny", False, "One model of each kind of chip alone.")


def worst(ratios: Iterable[float]) -> float:
    """Return the ratio that is farthest from 1, above it."""
    return round(max(max(each, 1 / each) for each in ratios), 3)


def efficiency_error(
    run: Run, one: StepTime, kept: compiled.Kept | None, slices: int
) -> float:
    """Return the predicted share of a chip's speed on slices, less the published."""
    share = one.high_s / predicted(run, kept, slices).high_s
    print(
        f"{run.decoder} on {slices} slices: keeps {share:.3f}, published "
        f"{run.teraflops[slices] / run.teraflops[1]:.3f}"
    )
    return share - run.teraflops[slices] / run.teraflops[1]


def main(argv: list[str]) -> None:
    del argv
    started_s = time.monotonic()
    replicator.fake_devices(compiled.DEVICES)
    if _FRESH.value and not is_installed():
        raise app.UsageError("`pip install 'jax-replicator[tpu]'` brings libtpu.")
    kept = compiled.read()
    for name in _FRESH.value:
        kept[name] = compiled.compile_elsewhere(name)
        compiled.write(kept)
    v5e, v5p = (V5E[:1], V5P[:1]) if _TINY.value else (V5E, V5P)
    first = {run: predicted(run, kept.get(run.decoder)) for run in v5e}
    later = {run: predicted(run, None) for run in v5p}
    for run, each in {**first, **later}.items():
        how = "compiled" if run in first and run.decoder in kept else "forecast"
        print(
            f"{run.decoder} on {run.topology}, {how}: {each}; published "
            f"{run.seconds():.3g} s, ratio {each.high_s / run.seconds():.3f}"
        )
    whole = {run: each for run, each in first.items() if run.tensor == 1}
    errors = {
        slices: max(
            abs(efficiency_error(run, one, kept.get(run.decoder), slices))
            for run, one in first.items()
        )
        for slices in (2, 4, 8, 16, 32)
    }
    print(
        "on 16 slices and more, stragglers cost as much as the network: the model "
        "does not know them"
    )
    stale = [
        run.decoder
        for run in first
        if run.decoder in kept and compiled.key_of(run.decoder) != kept[run.decoder].key
    ]
    result = {
        "worst_ratio": worst(p.high_s / run.seconds() for run, p in whole.items()),
        "without_wires": worst(
            p.arithmetic_s / run.seconds() for run, p in whole.items()
        ),
        "forecast_ratio": worst(
            predicted(run, None).high_s / run.seconds() for run in whole
        ),
        "efficiency_error": round(max(errors[n] for n in (2, 4, 8)), 3),
        "efficiency_error_16": round(errors[16], 3),
        "efficiency_error_32": round(errors[32], 3),
        "v5p_ratio": worst(p.high_s / run.seconds() for run, p in later.items()),
        "compiled": sorted(set(kept) & {run.decoder for run in whole}),
        "stale": len(stale),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
