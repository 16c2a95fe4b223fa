"""Act on one slice of devices and learn on another, in Atari games, in one process.

    python -m experiments.sebulba --game=pong

Hessel et al. 2021, "Podracer architectures for scalable Reinforcement Learning", §4: a
thread plays a batch of games, with actions drawn on the acting slice; its trajectories
wait in a queue for the learning slice, whose weights go to the acting one after each
update. Agent and games are those of `impala_atari`, whose program of processes runs
beside, for as long. The last line is one JSON object:

- `steps_per_s` and `program_steps_per_s`: of the environments, learned from, in the
  second half of the time from the first update on; `ratio` of the two;
- `acting_busy` and `learning_busy`: share of that half in which each slice computed, or
  of its last 10,000 ops;
- `lag`: updates that the policy of a trajectory had missed, on average.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import queue
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import replicator
from experiments import config_flags, impala_atari, in_turn
from experiments.config_flags import Count, Rate, Settings, Whole, check_shares
from experiments.drawing import draw_spans
from experiments.environments import atari
from experiments.impala import Impala
from experiments.spans import Spans, busy
from replicator import controller
from replicator.base.host.json_lines import read_lines
from replicator.base.types import PyTree
from replicator.launchpad_bridge import acting
from replicator.launchpad_bridge.acting.local_inference import actor_key

_SECONDS_DRAWN = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      game: As ale_py writes it.
      devices: Of the learner; acting has one.
      program: Run the program of `impala_atari`, too.
      launch_type: Where the nodes of the program run.
      actors: How many nodes of the program share the games.
      minutes: Of training, of each of the two.
      steps: Updates of each, at most.
      torso: Of the network: shallow or deep.
      lstm: Units of its memory; 0 for none.
      environments: Games that are played at once.
      batch_size: Trajectories that an update learns from.
      unroll_length: Steps of a trajectory.
      waiting: Batches that wait for the learner at most; then acting waits.
      threads: That run the games.
      chunk: Images that convolutions take at once; 0 for all, on accelerators.
      learning_rate: Of Adam.
      seed: Of everything.
      directory: Where the picture goes; nowhere if empty.
    """

    game: str = "pong"
    devices: Count = 1
    program: bool = True
    launch_type: Literal["threads", "processes", "ray"] = "processes"
    actors: Count = 2
    minutes: Rate = 1.0
    steps: Count = 1_000_000
    torso: Literal["shallow", "deep"] = "shallow"
    lstm: Whole = 0
    environments: Count = 16
    batch_size: Count = 8
    unroll_length: Count = 20
    waiting: Count = 2
    threads: Count = 2
    chunk: Whole = 16
    learning_rate: Rate = 5e-4
    seed: Whole = 0
    directory: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Trajectories, and the number of updates behind the policy that made them."""

    trajectories: dict[str, PyTree]
    version: int


class SliceInference:
    """Acts on a slice of devices; an `Act` of `unroll`.

    Attributes:
      newest: Updates behind the newest weights that have arrived, and their futures;
        any thread may set it.
    """

    newest: tuple[int, PyTree]

    def __init__(
        self,
        pw: controller.Controller,
        on: controller.Slice,
        policy: acting.Policy,
        *,
        seed: int,
    ) -> None:
        """Bind a policy to a slice."""

        def act(
            variables: PyTree, observation: Any, first: Any, core: Any, *key: Any
        ) -> Any:
            folded = jax.random.fold_in(*key)
            return policy(variables, observation, first, core, folded)

        self._act = pw.fn(act, on)
        self._key = pw.put(actor_key(seed, 0), on)
        self._variables: PyTree = None

    def use_newest(self) -> int:
        """Act with the newest weights from now on; return their number of updates."""
        version, self._variables = self.newest
        return version

    def __call__(
        self, observation: PyTree, first: np.ndarray, core: PyTree, steps: int
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return actions, and futures of extras and the next core; see `acting.Act`."""
        at = self._key, np.uint32(steps)
        action, extras, core = self._act(self._variables, observation, first, core, *at)
        return jax.tree.map(np.asarray, action), extras, core  # waits


@dataclasses.dataclass(kw_only=True)
class Found:
    """What happened: (second, steps of environments learned from), and lags."""

    spans: Spans
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    lags: list[int] = dataclasses.field(default_factory=list)


def run(pw: controller.Controller, config: Config) -> Found:
    """Act and learn at once, until the minutes or the steps are over.

    Args:
      pw: With an island for learning and one for acting.
      config: Of the experiment.
    """
    agent = impala_atari.make_agent(_settings(config))
    learner = pw.slice(config.devices, island="island0")
    actor = pw.slice(1, island="island1")
    rep = replicator.Replicator(devices=learner.devices)
    learn = pw.fn(rep.compile(agent.step_fn), learner)
    state = rep.init(agent.init_fn, seed=config.seed)
    per_update = config.batch_size * config.unroll_length
    with contextlib.ExitStack() as stack:
        found = Found(spans=Spans(pw, acting=actor, learning=learner))
        act = SliceInference(pw, actor, agent.policy, seed=config.seed)
        act.newest = 0, pw.put({"params": state["params"]}, actor)
        batches = stack.enter_context(contextlib.closing(_played(config, agent, act)))
        for update, batch in enumerate(batches, 1):
            state, metrics = learn(state, batch.trajectories)
            found.lags.append(update - 1 - batch.version)
            # Sent sooner, weights would keep the acting slice until they are computed.
            metrics["loss"].result()
            act.newest = update, pw.put({"params": state["params"]}, actor)
            found.curve.append((found.spans.now(), float(per_update * update)))
            if update == config.steps or found.spans.now() > 60 * config.minutes:
                break
    return found


def _played(
    config: Config, agent: Impala, act: SliceInference
) -> Generator[Batch, None, None]:
    """Yield batches that a thread plays."""
    batches: queue.Queue[Batch | None] = queue.Queue(config.waiting)
    stopped = threading.Event()

    def play() -> None:
        try:
            for batch in _unrolled(config, agent, act, stopped):
                batches.put(batch)
        finally:
            batches.put(None)

    has_ended = False
    with concurrent.futures.ThreadPoolExecutor(1, "acting") as thread:
        playing = thread.submit(play)
        try:
            while (batch := batches.get()) is not None:
                yield batch
            has_ended = True
        finally:
            stopped.set()
            while not has_ended:  # the thread may wait for room
                has_ended = batches.get() is None
        playing.result()


def _unrolled(
    config: Config, agent: Impala, act: SliceInference, stopped: threading.Event
) -> Iterator[Batch]:
    """Yield batches of trajectories, each unroll with the newest weights."""
    games = atari.make_games(config.game, config.environments, threads=config.threads)
    seed = acting.environment_seed(config.seed, 0)
    state = acting.start(games, agent.initial_core, seed=seed)
    while not stopped.is_set():
        version = act.use_newest()
        length = config.unroll_length
        unrolled = acting.unroll(games, act, state, length, is_stopped=stopped.is_set)
        if unrolled is None:
            return
        state = unrolled.acting
        for each in in_turn.cut(unrolled.trajectories, config.batch_size):
            yield Batch(trajectories=each, version=version)


def run_program(config: Config) -> list[tuple[float, float]]:
    """Run the program of `impala_atari` as long; return its curve as of `Found`."""
    with tempfile.TemporaryDirectory() as directory:
        settings = dataclasses.replace(
            _settings(config), scale="program", directory=directory
        )
        impala_atari.train_program(settings)
        rows = list(read_lines(Path(directory) / "metrics.jsonl"))
    per_update = config.batch_size * config.unroll_length
    return [(row["time_s"], float(per_update * row["step"])) for row in rows]


def half_of(curve: Sequence[tuple[float, float]]) -> float:
    """Return the second in the middle between the first update and the last."""
    return (curve[0][0] + curve[-1][0]) / 2


def rate(curve: Sequence[tuple[float, float]]) -> float:
    """Return steps a second in the second half of the time.

    >>> rate([(0.0, 0.0), (4.0, 10.0), (6.0, 30.0), (8.0, 50.0)])
    10.0
    """
    began = next(point for point in curve if point[0] >= half_of(curve))
    if began == curve[-1]:  # too short a run to have one
        began = (0.0, 0.0)
    return (curve[-1][1] - began[1]) / (curve[-1][0] - began[0])


def _settings(config: Config) -> impala_atari.Config:
    """Return the settings of agent, games and program."""
    names = {field.name for field in dataclasses.fields(impala_atari.Config)}
    given = {k: v for k, v in dataclasses.asdict(config).items() if k in names}
    return impala_atari.Config(**given)


def _check(config: Config) -> None:
    atari.num_actions(config.game)  # there is such a game
    each = "trajectories of `--batch_size`"
    check_shares("environments", config.environments, config.batch_size, each)
    check_shares("batch_size", config.batch_size, config.devices, "replicas")
    if config.program:
        check_shares("environments", config.environments, config.actors, "actors")


def _draw(config: Config, found: Found, program: Sequence[tuple[float, float]]) -> None:
    curves: dict[str, Sequence[tuple[float, float]]] = {"two slices": found.curve}
    if program:
        curves[f"a program, {config.actors} actors"] = program
    draw_spans(
        found.spans.found,
        Path(config.directory) / "sebulba.png",
        title=f"{config.game}, IMPALA, {config.environments} games",
        seconds=_SECONDS_DRAWN,
        curves=curves,
        ylabel="environment steps learned from",
    )


def main(config: Config) -> None:
    began = time.monotonic()
    _check(config)
    with controller.local(islands=2, devices=config.devices) as pw:
        found = run(pw, config)
    program = run_program(config) if config.program else []
    if config.directory:
        _draw(config, found, program)
    half = half_of(found.curve)
    own = {
        "steps_per_s": rate(found.curve),
        "acting_busy": busy(found.spans.found, "acting", half),
        "learning_busy": busy(found.spans.found, "learning", half),
        "lag": float(np.mean(found.lags)),
        "updates": len(found.lags),
    }
    if program:
        beside = rate(program)
        own |= {"program_steps_per_s": beside, "ratio": own["steps_per_s"] / beside}
    own |= {"game": config.game, "seconds": time.monotonic() - began}
    print(json.dumps(own))


if __name__ == "__main__":
    config_flags.run(main, Config)
