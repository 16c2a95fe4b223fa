"""Ask what batch norm over replicas, and the global batch, are worth to a GAN.

    python -m experiments.sngan_study

The batch study of Buchlovsky et al. 2019, "TF-Replicator", at the size of the digits:
an SNGAN of 8 × 8 pixels on eight replicas, fake ones, with each choice of

- who shares batch statistics, at one global batch: each replica for itself, groups of
  2 and of 4 replicas, or all;
- the global batch, 8 to 512, with statistics over all replicas.

At 64 examples each replica has 8; the first is asked at 16, too, where a replica has
but 2 and sharing matters more.

All runs make the same number of updates, so that a larger batch sees more examples; the
rest is the same, too: rates, seeds, an update of the generator to each of the
discriminator. A run is judged by the Fréchet distance (`fid`) between as many drawn
images as there are digits to train on, of the same classes, and those, on features of a
small classifier that is trained on them; `sample_accuracy` is the share of drawn images
that the classifier reads as what was ordered.

The folder gets `study.png` and `study.json`; what stands in the latter is not run again
(after a change of the networks, take another folder). The last line is one JSON object:
the table, `global_over_local` (the distance with statistics over all replicas divided
by that with each replica's own), `small_global_over_local` likewise of the small batch,
and `fid_halves`, the distance between two halves of the digits (which, being of half as
many images, is no lower bound).
"""

import dataclasses
import functools
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import replicator
from experiments import config_flags
from experiments.config_flags import Count, Decay, Rate, Settings, Whole
from experiments.drawing import draw_scores
from experiments.gan import Gan, images_of
from experiments.images.classifier import Classifier, train_classifier
from experiments.images.image_sets import ImageSet, open_image_set
from experiments.images.sample_quality import frechet_distance
from models import sngan
from replicator.checkpoint.disk import Disk
from replicator.errors import ArgumentError
from replicator.nnx import BatchNorm

REPLICAS = 8
_RESOLUTION = 8  # the digits' own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the study; each field is a flag.

    Attributes:
      shared: By how many replicas statistics are shared, a row for each.
      global_batch: Examples of an update in these rows.
      small_batch: Examples of an update in as many rows more; 0 for none.
      global_batches: Examples of an update, a row for each with all replicas sharing.
      steps: Updates of each run.
      seeds: Runs of a row.
      channels: Width of both networks.
      latent: Size of a latent vector.
      generator_rate: Of the generator's Adam.
      discriminator_rate: Of the discriminator's Adam.
      decay: Of the average of the generator's parameters, which draws.
      standing: Examples that the statistics for drawing are means over.
      directory: Where results are kept.
    """

    shared: str = "1,2,4,8"
    global_batch: Count = 64
    small_batch: Whole = 16
    global_batches: str = "8,16,32,64,128,256,512"
    steps: Count = 1000
    seeds: Count = 2
    channels: Count = 16
    latent: Count = 16
    generator_rate: Rate = 1e-3
    discriminator_rate: Rate = 2e-3
    decay: Decay = 0.995
    standing: Count = 2048
    directory: str = "runs/sngan_study"


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """A row of the table.

    Attributes:
      shared: Consecutive replicas that share batch statistics.
      global_batch: Examples of an update, of all replicas together.
    """

    shared: int
    global_batch: int

    @property
    def norm(self) -> str:
        """The replicas that share statistics, as text."""
        names = {1: "per replica", REPLICAS: "global"}
        return names.get(self.shared, f"groups of {self.shared}")

    @property
    def stats_batch(self) -> int:
        """Examples that share statistics."""
        return self.global_batch // REPLICAS * self.shared


def cases_of(config: Config) -> list[Case]:
    """Return the rows that are asked for, each once.

    Raises:
      ArgumentError: Numbers are no such, or do not fit the replicas.
    """
    shared = _numbers("shared", config.shared)
    if odd := [each for each in shared if each < 1 or REPLICAS % each]:
        raise ArgumentError(
            f"`shared` must be divisors of {REPLICAS}, the replicas, got {odd[0]}. Use "
            "'1,2,4,8'."
        )
    sizes = _numbers("global_batches", config.global_batches)
    fixed = [config.global_batch, *filter(None, [config.small_batch])]
    if odd := [each for each in (*sizes, *fixed) if not _divides(each)]:
        raise ArgumentError(
            f"`global_batch`, `small_batch` and `global_batches` must be multiples of "
            f"{REPLICAS}, the replicas, got {odd[0]}. Use "
            f"{max(1, odd[0] // REPLICAS) * REPLICAS}."
        )
    return list(
        dict.fromkeys(
            [Case(shared=each, global_batch=size) for size in fixed for each in shared]
            + [Case(shared=REPLICAS, global_batch=each) for each in sizes]
        )
    )


def make_gan(
    rep: replicator.Replicator, config: Config, case: Case, image_set: ImageSet
) -> Gan:
    """Return both players and their optimizers."""
    shape: dict[str, Any] = {
        "resolution": image_set.resolution,
        "num_classes": image_set.num_classes,
        "channels": config.channels,
        "image_channels": image_set.channels,
    }
    return Gan(
        make_generator=functools.partial(
            sngan.Generator,
            latent=config.latent,
            norm=functools.partial(BatchNorm, stats=case.shared),
            **shape,
        ),
        make_discriminator=functools.partial(sngan.Discriminator, **shape),
        generator_tx=rep.wrap_optimizer(
            optax.adam(config.generator_rate, b1=0.0, b2=0.9), name="generator"
        ),
        discriminator_tx=rep.wrap_optimizer(
            optax.adam(config.discriminator_rate, b1=0.0, b2=0.9), name="discriminator"
        ),
        latent=config.latent,
        num_classes=image_set.num_classes,
        decay=config.decay,
    )


def train(
    rep: replicator.Replicator,
    config: Config,
    case: Case,
    image_set: ImageSet,
    *,
    seed: int,
) -> tuple[Gan, Any]:
    """Return both players, and the generator after its last update, fit to draw."""
    gan = make_gan(rep, config, case, image_set)
    result = rep.run(
        gan.step_fn,
        functools.partial(
            image_set.train_input_fn, global_batch=case.global_batch, seed=seed
        ),
        init_fn=gan.init_fn,
        steps=config.steps,
        seed=seed,
        gradient_norm=False,
        display=False,
    )
    [generator] = gan.samplers(
        rep,
        result.state,
        truncations=[None],
        batches=max(1, config.standing // case.global_batch),
        global_batch=case.global_batch,
        seed=seed,
    )
    return gan, generator


def judge(
    gan: Gan, generator: Any, classifier: Classifier, image_set: ImageSet, *, seed: int
) -> dict[str, float]:
    """Return the scores of as many drawn images as there are to train on."""
    real, labels = image_set.arrays("train")
    latents, _ = gan.draw(jax.random.key(seed + 1), len(real))
    probabilities, features = classifier.outputs(images_of(generator, latents, labels))
    return {
        "fid": frechet_distance(features, classifier.features(real)),
        "sample_accuracy": float(np.mean(probabilities.argmax(axis=1) == labels)),
    }


def study(
    rep: replicator.Replicator,
    config: Config,
    image_set: ImageSet,
    classifier: Classifier,
) -> list[dict[str, Any]]:
    """Make all runs that `study.json` lacks, seed after seed; return the table."""
    cases, path = cases_of(config), Path(config.directory) / "study.json"
    results = json.loads(path.read_text()) if path.exists() else []
    for seed, case in itertools.product(range(config.seeds), cases):
        settings = settings_of(config, case, seed)
        if find(results, settings):
            continue
        began = time.monotonic()
        gan, generator = train(rep, config, case, image_set, seed=seed)
        found = judge(gan, generator, classifier, image_set, seed=seed)
        found["seconds"] = time.monotonic() - began
        results.append(settings | found)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: the study may be stopped at any time.
        Disk().replace_file(path, json.dumps(results, indent=1).encode())
        print(
            f"{case.norm}, batch {case.global_batch}, seed {seed}: {found}", flush=True
        )
    return table_of(results, config)


def settings_of(config: Config, case: Case, seed: int) -> dict[str, Any]:
    """Return all that a run's result depends on."""
    settings = dataclasses.asdict(config)
    for name in ("shared", "global_batch", "small_batch", "global_batches"):
        del settings[name]
    del settings["seeds"], settings["directory"]
    return settings | dataclasses.asdict(case) | {"seed": seed}


def find(
    results: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the result of the run with these settings; None if there is none."""
    return next((each for each in results if settings.items() <= each.items()), None)


def table_of(results: list[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
    """Return a row for each case: means over seeds, and the distance of each seed."""
    rows = []
    for case in cases_of(config):
        settings = (settings_of(config, case, seed) for seed in range(config.seeds))
        runs = [run for each in settings if (run := find(results, each))]
        fids, read, seconds = (
            [run[name] for run in runs]
            for name in ("fid", "sample_accuracy", "seconds")
        )
        rows.append(
            {
                "norm": case.norm,
                "stats_batch": case.stats_batch,
                "global_batch": case.global_batch,
                "fid": float(np.mean(fids)),
                "fids": fids,
                "sample_accuracy": float(np.mean(read)),
                "seconds": sum(seconds),
            }
        )
    return rows


def global_over_local(rows: list[dict[str, Any]], global_batch: int) -> float | None:
    """Return how the distances with all and with own statistics compare."""
    fid = {row["norm"]: row["fid"] for row in _rows_of(rows, global_batch)}
    if not {"global", "per replica"} <= fid.keys():
        return None
    return fid["global"] / fid["per replica"]


def _rows_of(rows: list[dict[str, Any]], global_batch: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["global_batch"] == global_batch]


def panels_of(
    rows: list[dict[str, Any]], config: Config
) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Return both parts of the table, as `draw_scores` takes them."""
    sizes = dict.fromkeys(filter(None, [config.global_batch, config.small_batch]))
    of_all = "" if len(sizes) > 1 else f", of {config.global_batch}"  # no legend then
    by_norm = {
        f"{size} examples, {size // REPLICAS} on a replica": {
            row["stats_batch"]: row["fids"] for row in _rows_of(rows, size)
        }
        for size in sizes
    }
    by_batch = {
        row["global_batch"]: row["fids"] for row in rows if row["norm"] == "global"
    }
    return {
        f"examples that share statistics{of_all}": by_norm,
        f"global batch, statistics over all {REPLICAS} replicas": {"": by_batch},
    }


def _report(rows: list[dict[str, Any]], config: Config) -> Table:
    table = Table("batch norm", "examples", "global batch", "FID", "by seed", "right")
    for row in rows:
        table.add_row(
            row["norm"],
            str(row["stats_batch"]),
            str(row["global_batch"]),
            f"{row['fid']:.3f}",
            " ".join(f"{each:.3f}" for each in row["fids"]),
            f"{row['sample_accuracy']:.1%}",
        )
    table.caption = f"{config.steps} updates each; {config.directory}/study.png"
    return table


def _numbers(name: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(
            f"`{name}` must be whole numbers with commas between, got {text!r}. "
            "Use '8' for one."
        )
    return [int(part) for part in parts]


def _divides(global_batch: int) -> bool:
    return global_batch > 0 and global_batch % REPLICAS == 0


def main(config: Config) -> None:
    cases_of(config)  # what is wrong shall not wait for the classifier
    if "REPLICATOR_FAKE_DEVICES" not in os.environ:
        replicator.fake_devices(REPLICAS)
    began = time.monotonic()
    rep = replicator.Replicator(REPLICAS)
    directory = Path(config.directory)
    image_set = open_image_set("digits", resolution=_RESOLUTION, augment="none")
    classifier = train_classifier(image_set, directory=directory)
    features = classifier.features(image_set.arrays("train")[0])
    fid_halves = frechet_distance(features[::2], features[1::2])
    rows = study(rep, config, image_set, classifier)
    draw_scores(
        panels_of(rows, config),
        directory / "study.png",
        ylabel="Fréchet distance; dotted: two halves of the digits",
        baseline=fid_halves,
    )
    Console().print(_report(rows, config))
    found = {
        "global_over_local": global_over_local(rows, config.global_batch),
        "small_global_over_local": global_over_local(rows, config.small_batch),
        "fid_halves": fid_halves,
        "classifier_accuracy": classifier.accuracy,
        "table": rows,
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    config_flags.run(main, Config)
