"""Losses in which examples meet across replicas: norms, contrasts, global sums."""

import itertools

from benchmarks.truth import extras, masks, optimizers
from benchmarks.truth import tasks_meeting as tasks
from benchmarks.truth.program import Program, Refused, Setting
from benchmarks.truth.supervised import Recipe, supervised

_UNEVEN = {
    "scattered": masks.scattered,
    "padding": masks.padded,
    "empty-replica": masks.empty_replica,
    "empty-microbatch": masks.empty_microbatch,
}


def _mean() -> list[Program]:
    """Every part counts alike: a plain mean is exact, collectives or not."""
    table = [
        ("library-running", tasks.normed_conv, optimizers.momentum, {}),
        ("by-hand-running", tasks.normed_conv, optimizers.momentum, {}),
        ("per-replica", tasks.normed_conv, optimizers.adam, {"stats": "replica"}),
        ("stats-batch", tasks.normed_conv, optimizers.adam, {"stats_batch": 8}),
        ("schedule", tasks.normed_dropout, optimizers.adamw_schedule, {}),
        ("clip", tasks.normed_penalty, optimizers.clipped_adam, {}),
        ("ema", tasks.contrastive, optimizers.adam, {}),
        ("temperature", tasks.clip, optimizers.clipped_adam, {}),
        ("balance", tasks.experts, optimizers.adam, {}),
        ("redundancy", tasks.redundancy, optimizers.momentum, {}),
        ("max", tasks.hardest, optimizers.momentum, {}),
        ("shares", tasks.importance, optimizers.adam, {}),
        ("entropy", tasks.advantages, optimizers.clipped_adam, {}),
    ]
    programs = []
    for what, task, tx, stats in table:
        recipe = Recipe(
            task=task,
            counting="mean",
            tx=tx,
            extras={"ema": extras.ema} if what == "ema" else {},
            norm="hand" if what.startswith("by-hand") else "library",
            stats=stats,
        )
        programs.append(supervised(f"{task.name}-{what}-mean", recipe))
    return programs


def _counted() -> list[Program]:
    """Parts count unevenly, and some not at all: the sum form is exact."""
    norms = itertools.product(
        [(tasks.normed_conv, optimizers.momentum)], _UNEVEN.items()
    )
    others = [
        ((tasks.normed_dropout, optimizers.adam), ("padding", masks.padded)),
        ((tasks.normed_tokens, optimizers.clipped_adam), ("tokens", masks.lengths)),
        ((tasks.normed_tokens, optimizers.adam), ("short-end", masks.short_end)),
        ((tasks.normed_penalty, optimizers.momentum), ("padding", masks.padded)),
        ((tasks.contrastive, optimizers.adam), ("scattered", masks.scattered)),
        ((tasks.clip, optimizers.momentum), ("padding", masks.padded)),
        ((tasks.experts, optimizers.clipped_adam), ("scattered", masks.scattered)),
        ((tasks.redundancy, optimizers.momentum), ("padding", masks.padded)),
        ((tasks.hardest, optimizers.momentum), ("empty", masks.empty_microbatch)),
        ((tasks.importance, optimizers.adam), ("importances", masks.importances)),
        ((tasks.advantages, optimizers.adamw_schedule), ("padding", masks.padded)),
    ]
    programs = [
        supervised(
            f"{task.name}-{what}-count",
            Recipe(task=task, counting="count", tx=tx, mask=mask),
        )
        for (task, tx), (what, mask) in [*norms, *others]
    ]
    decayed = Recipe(
        task=tasks.normed_conv,
        counting="count",
        tx=optimizers.adamw_schedule,
        mask=masks.scattered,
        norm="hand",
        extras={"ema": extras.ema, "target": extras.periodic},
        penalty=0.02,
    )
    windows = Recipe(
        task=tasks.normed_penalty,
        counting="count",
        tx=optimizers.momentum,
        mask=masks.scattered,
        stats={"stats_batch": 8},
    )
    read = [
        Recipe(
            task=task,
            counting="count",
            tx=optimizers.clipped_adam,
            extras={"ema": extras.ema},
            drive="padded",
        )
        for task in (tasks.normed_conv, tasks.normed_dropout, tasks.contrastive)
    ]
    return [
        *programs,
        *(supervised(f"{each.task.name}-count-padded-loop", each) for each in read),
        supervised("conv-norm-penalty-ema-by-hand-count", decayed),
        supervised("norm-gradient-penalty-stats-batch-count", windows),
    ]


def _weighted() -> list[Program]:
    """Weights of means are exact where no gradient crosses replicas, refused else."""
    local = Recipe(
        task=tasks.normed_penalty,
        counting="weight",
        tx=optimizers.adam,
        mask=masks.scattered,
        stats={"stats": "replica"},
    )
    stopped = Recipe(
        task=tasks.advantages,
        counting="weight",
        tx=optimizers.adam,
        mask=masks.scattered,
    )
    crossing = [tasks.normed_conv, tasks.contrastive, tasks.experts, tasks.importance]
    return [
        supervised("norm-gradient-penalty-per-replica-weight", local),
        supervised("ppo-advantages-stop-gradient-weight", stopped),
        *(
            supervised(
                f"{task.name}-weight-refused",
                Recipe(
                    task=task,
                    counting="weight",
                    tx=optimizers.momentum,
                    mask=masks.scattered,
                ),
                expect=Refused(by="ReplicatorError", word="count="),
                settings=(Setting(2, 2), Setting(4, 1)),
            )
            for task in crossing
        ),
    ]


PROGRAMS = [*_mean(), *_counted(), *_weighted()]
