"""The one law that all programs are put through: what they leave is the oracle's."""

import dataclasses
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.truth.compare import Apart, farthest, seen
from benchmarks.truth.program import Program, Refused, Same, Setting, Warned
from replicator import InputOptions, MicrobatchCollectiveWarning, Replicator
from replicator.base.types import Key, PyTree
from replicator.checkpoint import CheckpointStore, Snapshot

Leaves = dict[str, np.ndarray]
_CUT = "cut"  # on an oracle's step: what of the setting it depends on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a program.

    Attributes:
      start: Leaves of the first state.
      end: Leaves of the last.
      metrics: Of each update.
    """

    start: Leaves
    end: Leaves
    metrics: list[Leaves]


class Oracles:
    """Runs oracles, each once where microbatches and replicas mean nothing to it."""

    def __init__(self) -> None:
        self._runs: dict[tuple, Run] = {}

    def run(self, program: Program, setting: Setting) -> Run:
        """Return the run, made or remembered."""
        assert program.oracle is not None
        init, step = program.oracle(setting)
        # Steps say which part of the setting they used; most of them use none.
        used = getattr(step, _CUT, setting)
        known = self._runs.get((program.name, used))
        if known is None:
            known = self._runs[program.name, used] = _run_oracle(program, init, step)
        return known


def cut_by(used: Any) -> Callable:
    """Return the part of the setting that an oracle's step depends on."""

    def mark(step: Callable) -> Callable:
        setattr(step, _CUT, used)
        return step

    return mark


def problem(program: Program, setting: Setting, oracles: Oracles) -> str | None:
    """Run one program in one setting; return what is wrong with it, or None."""
    with jax.enable_x64(program.wide), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return _judged(program, setting, oracles, said)
        except Exception as error:
            return _summary(error)


def _summary(error: Exception) -> str:
    """Describe an error, with the line of ours or of the library that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "site-packages" not in each.filename]
    words = str(error).split("For simplicity, JAX")[0].strip()
    at = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {at}: {words[:400]}"


def _judged(
    program: Program,
    setting: Setting,
    oracles: Oracles,
    said: Sequence[warnings.WarningMessage],
) -> str | None:
    match program.expect:
        case Refused() as refusal:
            return _not_refused(refusal, lambda: run_ours(program, setting))
        case Warned() as warning:
            run_ours(program, setting)
            return _not_warned(warning, said)
        case Same(tolerance=tolerance):
            found = run_ours(program, setting)
            due = program.meets and setting.microbatches > 1
            if wrong := _needless(said, due and program.drive != "own"):
                return wrong
            return differing(found, oracles.run(program, setting), tolerance)


def run_ours(program: Program, setting: Setting) -> Run:
    """Run the program on replicas."""
    with program.around():
        return _run_here(program, setting)


def _run_here(program: Program, setting: Setting) -> Run:
    rep = Replicator(
        num_replicas=setting.replicas, compilation_cache=False, **program.options
    )
    init_fn, step_fn = program.ours(rep, setting)
    state = program.prepare(rep.init(init_fn))
    start = seen(state)
    state, metrics = _DRIVES[program.drive](program, setting, rep, step_fn, state)
    return Run(start=start, end=seen(state), metrics=[seen(each) for each in metrics])


def differing(found: Run, expected: Run, tolerance: float) -> str | None:
    """Describe the leaf that differs, and by how many tolerances; None if none does."""
    for what, apart in (
        ("first state", farthest(found.start, expected.start, None, tolerance=1e-5)),
        *(
            (f"metrics of update {number}", _apart(one, other, tolerance))
            for number, (one, other) in enumerate(
                zip(found.metrics, expected.metrics, strict=False), start=1
            )
        ),
        (
            "last state",
            farthest(found.end, expected.end, expected.start, tolerance=tolerance),
        ),
    ):
        if not apart.by <= 1:
            relative = apart.by * tolerance
            return f"{what}: `{apart.path}` is off by {relative:.1e} ({apart.by:.1e} x)"
    return None


def _apart(one: Leaves, other: Leaves, tolerance: float) -> Apart:
    return farthest(one, other, None, tolerance=tolerance)


def _run_oracle(program: Program, init: Callable, step: Callable) -> Run:
    state = jax.jit(init)(jax.random.key(0))
    start, metrics = seen(state), []
    jitted = jax.jit(step)
    for number in range(program.updates):
        state, reported = jitted(state, program.batch(number), *_key(program, number))
        metrics.append(seen(reported))
    return Run(start=start, end=seen(state), metrics=metrics)


def _key(program: Program, number: int) -> tuple[Key, ...]:
    return (jax.random.key(number + 7),) if program.keyed else ()


def _compiled(program, setting, rep, step_fn, state) -> tuple[PyTree, list]:
    step = rep.compile(step_fn, accumulate=setting.microbatches)
    metrics = []
    for number in range(program.updates):
        state, reported = step(state, program.batch(number), *_key(program, number))
        metrics.append(jax.device_get(reported))
    return state, metrics


def _joined(program, setting, rep, step_fn, state) -> tuple[PyTree, list]:
    """Make all updates in one call."""
    calls = program.updates
    step = rep.compile(step_fn, accumulate=setting.microbatches, steps_per_call=calls)
    batches = [program.batch(number) for number in range(calls)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    keys = [_key(program, number) for number in range(calls)]
    joined = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *keys)
    state, reported = step(state, stacked, *joined)
    rows = jax.device_get(reported)
    return state, [jax.tree.map(lambda leaf, n=n: leaf[n], rows) for n in range(calls)]


def _resumed(program, setting, rep, step_fn, state) -> tuple[PyTree, list]:
    """Save and read the state between updates, as a run that was killed does."""
    metrics = []
    for number in range(program.updates):
        step = rep.compile(step_fn, accumulate=setting.microbatches)
        state, reported = step(state, program.batch(number), *_key(program, number))
        metrics.append(jax.device_get(reported))
        with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
            store.save(Snapshot(step=number, arrays=state, meta={}))
            found = store.restore(state)
            assert found is not None
            state = rep.put(found.arrays)
    return state, metrics


def _own(program, setting, rep, step_fn, state) -> tuple[PyTree, list]:
    """Hand over one microbatch per call; the optimizer joins them."""
    step, k = rep.compile(step_fn), setting.microbatches
    for number in range(program.updates):
        batch = program.batch(number)
        for turn in range(k):
            piece = {name: _piece(leaf, turn, k) for name, leaf in batch.items()}
            state, _ = step(state, piece, *_key(program, number))
    return state, []  # the metrics of one microbatch are nobody's truth


def _padded(program, setting, rep, step_fn, state) -> tuple[PyTree, list]:
    """Let a reader pad the last batch: it has as many rows as its mask says."""
    options = InputOptions(accumulate=setting.microbatches, epochs=1)
    step = rep.compile(step_fn, accumulate=setting.microbatches)
    batches = [_real(program.batch(number)) for number in range(program.updates)]
    metrics = []
    with rep.batches(batches, options) as placed:
        for number, batch in enumerate(placed):
            state, reported = step(state, batch, *_key(program, number))
            metrics.append(jax.device_get(reported))
    return state, metrics


_DRIVES: Mapping[str, Callable] = {
    "compile": _compiled,
    "joined": _joined,
    "own": _own,
    "padded": _padded,
    "resumed": _resumed,
}


def _piece(leaf: np.ndarray, turn: int, k: int) -> np.ndarray:
    rows = len(leaf) // k
    return leaf[turn * rows : (turn + 1) * rows]


def _real(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    real = int(batch["mask"].sum())
    return {name: leaf[:real] for name, leaf in batch.items() if name != "mask"}


def _not_refused(refusal: Refused, run: Callable[[], object]) -> str | None:
    try:
        run()
    except Exception as error:
        names = {each.__name__ for each in type(error).__mro__}
        if refusal.by in names and refusal.word in str(error):
            return None
        first = str(error).split("\n", 1)[0]
        return f"refused by another {type(error).__name__}: {first[:300]}"
    return f"accepted, and must be refused ({refusal.by}: … {refusal.word} …)"


def _not_warned(warning: Warned, said: Sequence) -> str | None:
    for each in said:
        if each.category.__name__ == warning.by and warning.word in str(each.message):
            return None
    return f"no {warning.by} that says {warning.word!r}"


def _needless(said: Sequence, meeting: bool) -> str | None:
    """Describe a needless warning, or one that is missing where examples meet."""
    ours = [each for each in said if each.category.__module__.startswith("replicator")]
    rest = [each for each in ours if each.category is not MicrobatchCollectiveWarning]
    if meeting and len(rest) == len(ours):
        return "no MicrobatchCollectiveWarning"
    needless = rest if meeting else ours
    return f"warned needlessly: {str(needless[0].message)[:300]}" if needless else None
