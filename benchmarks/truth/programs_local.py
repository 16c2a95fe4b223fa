"""Losses that are local to a replica: every way to count, optimizers, other state."""

import dataclasses
import itertools

from benchmarks.truth import extras, masks, optimizers, tasks
from benchmarks.truth import tasks_hard as hard
from benchmarks.truth.program import Program
from benchmarks.truth.supervised import Recipe, supervised

_COUNTED = [
    ("schedule", tasks.mlp, optimizers.adamw_schedule, masks.scattered),
    ("padding", tasks.mlp, optimizers.adam, masks.padded),
    ("empty-replica", tasks.conv, optimizers.rmsprop, masks.empty_replica),
    ("empty-microbatch", tasks.smoothed, optimizers.adam, masks.empty_microbatch),
    ("importances", tasks.conv, optimizers.masked_decay_all, masks.importances),
    ("tokens", tasks.lstm, optimizers.clipped_adam, masks.lengths),
    ("tokens", tasks.attention, optimizers.adamw_schedule, masks.short_end),
    ("tokens", tasks.dropped_attention, optimizers.adam, masks.lengths),
    ("padding", tasks.dropped_mlp, optimizers.momentum, masks.padded),
    ("padding", hard.ctc, optimizers.momentum, masks.scattered),
    ("padding", hard.gradient_penalty, optimizers.clipped_adam, masks.padded),
    ("padding", hard.equilibrium, optimizers.momentum, masks.scattered),
]
_PLAIN = [
    ("ema", tasks.mlp, optimizers.adam, {"ema": extras.ema}),
    ("polyak", tasks.mlp, optimizers.momentum, {"target": extras.polyak}),
    ("periodic", tasks.conv, optimizers.adam, {"target": extras.periodic}),
    ("counter-clip", tasks.lstm, optimizers.clipped_adam, {"step": extras.counter}),
    ("gated", tasks.mlp, optimizers.clipped_values, {"step": extras.gated_counter}),
    ("own-key", tasks.dropped_mlp, optimizers.adam, {"own": extras.walking}),
    ("by-label", tasks.mlp, optimizers.by_label, {"ema": extras.ema}),
    ("lamb", tasks.attention, optimizers.lamb, {}),
    ("adafactor", tasks.attention, optimizers.adafactor, {}),
    ("muon", tasks.attention, optimizers.muon, {}),
    ("injected", hard.remat_stack, optimizers.injected, {"ema": extras.ema}),
    ("noise", hard.branches, optimizers.noisy, {}),
    ("schedule-free", hard.quantised, optimizers.schedule_free, {}),
    ("every-second", hard.spectrum, optimizers.every_second, {}),
    ("finite-only", hard.maml, optimizers.finite_only, {}),
    ("decay", hard.second_order, optimizers.masked_decay_all, {}),
    ("momentum", hard.complex_weights, optimizers.momentum, {}),
    ("clip", hard.solved, optimizers.clipped_values, {}),
    ("rmsprop", hard.embedding_bag, optimizers.rmsprop, {}),
]


def _counted() -> list[Program]:
    return [
        supervised(
            f"{task.name}-{what}-{counting}",
            Recipe(task=task, counting=counting, tx=tx, mask=mask),
        )
        for (what, task, tx, mask), counting in itertools.product(
            _COUNTED, ("weight", "count")
        )
    ]


def _plain() -> list[Program]:
    return [
        supervised(
            f"{task.name}-{what}",
            Recipe(task=task, counting="mean", tx=tx, extras=more),
        )
        for what, task, tx, more in _PLAIN
    ]


def _joined() -> list[Program]:
    """Everything at once, and other ways to call a step."""
    everything = {
        "ema": extras.ema,
        "target": extras.periodic,
        "step": extras.counter,
    }
    rich = Recipe(
        task=tasks.dropped_attention,
        counting="count",
        tx=optimizers.adamw_schedule,
        mask=masks.short_end,
        extras=everything,
        penalty=0.02,
    )
    decayed = Recipe(
        task=tasks.conv,
        counting="count",
        tx=optimizers.adam,
        mask=masks.padded,
        penalty=0.05,
    )
    joined = Recipe(
        task=tasks.dropped_mlp,
        counting="weight",
        tx=optimizers.clipped_adam,
        mask=masks.scattered,
        extras={"ema": extras.ema},
        drive="joined",
    )
    return [
        supervised("attention-dropout-tokens-everything", rich),
        supervised("conv-penalty-padding-count", decayed),
        supervised("mlp-dropout-weight-ema-steps-per-call", joined),
        *_driven(),
    ]


def _driven() -> list[Program]:
    """Let a loop of one's own feed microbatches, and a reader pad the last batch."""
    own = {"ema": extras.ema}
    padded = {"ema": extras.ema, "step": extras.counter}
    table = [
        ("own", tasks.mlp, "mean", None, {}),
        ("own", tasks.lstm, "weight", masks.lengths, own),
        ("own", tasks.conv, "count", masks.empty_microbatch, {}),
        ("padded", tasks.dropped_mlp, "weight", None, padded),
        ("padded", tasks.attention, "count", None, padded),
    ]
    return [
        supervised(
            f"{task.name}-{counting}-{drive}-loop",
            Recipe(
                task=_by_example(task) if drive == "padded" else task,
                counting=counting,
                tx=optimizers.clipped_adam,
                mask=mask,
                extras=more,
                drive=drive,
            ),
        )
        for drive, task, counting, mask, more in table
    ]


def _by_example(task: tasks.Task) -> tasks.Task:
    """Average the losses of an example's tokens: a reader's mask has one row each."""
    if not task.tokens:
        return task

    def losses(params, batch, world):
        each, found = task.losses(params, batch, world)
        return each.mean(1), found

    return dataclasses.replace(task, losses=losses, tokens=False)


PROGRAMS = [*_counted(), *_plain(), *_joined()]
