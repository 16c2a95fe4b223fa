"""Plan BigGAN-128 and ResNet-50 for pods of TPUs that are not there.

`fits`: whether BigGAN-128 at batch 2,048 (Brock et al. 2019) fits on 512 cores of v3,
by the compiler, and `bytes_per_core` it needs there. `predicted_efficiency`: speed of a
core on 512 against that on 8, 4 images on each, by the cost model, nothing hidden.
`most_images`: of a core, replicating and with the optimizer's state cut, estimated from
what was compiled. `resnet_fits`, and `images_per_s`, of ResNet-50 with 64 images a
device on 16 x 16 chips, 32,768 on v3. `stale`: number of kept compilations whose step
is lowered to another text today.

Compiling takes minutes, so what was found is kept in `plan_biggan.json`, with the hash
of the program as it is lowered for a CPU, and the versions that compiled it.
`--fresh=CASE` compiles again, which needs libtpu.
"""

import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import app, flags

from experiments import biggan, imagenet_resnet50
from replicator import Replicator, strategies
from replicator.strategies.machine import Machine
from replicator.tuning.compiling import CompileOrder, compile_step
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.problem import ProblemFn

_FILE = pathlib.Path(__file__).with_suffix(".json")
_LIMIT_S = 7200.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step that was compiled, and what came of it is kept."""

    problem: ProblemFn
    topology: str
    strategy: strategies.Strategy | None = None

    def order(self, *, compiles: bool) -> CompileOrder:
        """Return the order to compile it, or to trace it for fake devices."""
        devices = Machine.from_topology(self.topology).num_devices
        return CompileOrder(
            problem=self.problem,
            make_replicator=Replicator,
            strategy=self.strategy,
            devices=self.topology if compiles else f"cpu:{devices}",
            compiles=compiles,
        )


CASES = {
    "biggan": Case(problem=biggan.problem, topology="v3:16x16"),
    "resnet.v3": Case(problem=imagenet_resnet50.problem, topology="v3:16x16"),
    "resnet.v5e": Case(problem=imagenet_resnet50.problem, topology="v5e:16x16"),
}
_CUT = dataclasses.replace(CASES["biggan"], strategy=strategies.zero1())
_FRESH = flags.DEFINE_multi_enum("fresh", [], list(CASES), "Compile these again.")
_TINY = flags.DEFINE_bool("tiny", False, "ResNet-50 for v5e alone.")
_SIZES = ("v3:16x16", "v3:2x2")
_TINY_CASES = ("resnet.v5e",)


def read() -> dict[str, Any]:
    """Return what is kept of each case: the key of its text, and the outcome."""
    return json.loads(_FILE.read_text()) if _FILE.exists() else {}


def compile_again(name: str) -> None:
    """Compile a case, and keep what came of it."""
    case, kept = CASES[name], read()
    lowered = compile_step(case.order(compiles=False), limit_s=_LIMIT_S)
    outcome = compile_step(case.order(compiles=True), limit_s=_LIMIT_S)
    print(name, dataclasses.replace(outcome, features=None))
    kept[name] = {"key": lowered.key, "outcome": json.loads(outcome.to_json())}
    _FILE.write_text(json.dumps(kept, indent=1) + "\n")


def kept_outcome(kept: dict[str, Any], name: str) -> CompileOutcome:
    """Return the outcome that is kept of a case."""
    return CompileOutcome.from_json(json.dumps(kept[name]["outcome"]))


def lowered_today(case: Case) -> CompileOutcome:
    """Return the outcome of a case that is traced and lowered now, and not compiled."""
    found = compile_step(case.order(compiles=False), limit_s=_LIMIT_S)
    assert found.status == "forecast", found.reason
    return found


def seconds_of(outcome: CompileOutcome, topology: str) -> float:
    """Return the seconds of a step by the cost model, nothing of it hidden."""
    assert outcome.features is not None, outcome.reason
    machine = Machine.from_topology(topology)
    return strategies.predict(outcome.features, machine).high_s


def efficiency(outcome: CompileOutcome) -> float:
    """Return the speed of a core on the largest slice against the smallest.

    Each core does the same on both: its program differs in the groups of its sums.
    """
    largest, smallest = _SIZES
    assert outcome.features is not None, outcome.reason
    devices = Machine.from_topology(smallest).num_devices
    share = (1 - 1 / devices) / (1 - 1 / outcome.features.num_devices)
    fewer = dataclasses.replace(
        outcome.features,
        num_devices=devices,
        traffic=tuple(
            dataclasses.replace(
                each, span=devices, wire_bytes=round(each.wire_bytes * share)
            )
            for each in outcome.features.traffic
        ),
    )
    of_smallest = strategies.predict(fewer, Machine.from_topology(smallest))
    of_largest = strategies.predict(outcome.features, Machine.from_topology(largest))
    print(f"4 images a core of {smallest}: {of_smallest}; of {largest}: {of_largest}")
    return round(of_smallest.high_s / of_largest.high_s, 3)


def most_images(outcome: CompileOutcome, state_bytes: int) -> int:
    """Estimate the most images of a core, with a state of so many bytes.

    As if all beside the state grew with the number of images.
    """
    assert outcome.memory_bytes is not None, outcome.reason
    assert outcome.limit_bytes is not None, "libtpu names it"
    images = outcome.examples // outcome.mesh["replica"]
    each = (outcome.memory_bytes - outcome.state_bytes) / images
    return int((outcome.limit_bytes - state_bytes) / each)


def main(argv: list[str]) -> None:
    del argv
    started_s = time.monotonic()
    for name in _FRESH.value:
        compile_again(name)
    kept = read()
    found = {name: kept_outcome(kept, name) for name in CASES}
    for name, outcome in found.items():
        print(name, dataclasses.replace(outcome, features=None))
    looked_at = _TINY_CASES if _TINY.value else tuple(CASES)
    lowered = {name: lowered_today(CASES[name]) for name in looked_at}
    stale = [name for name in looked_at if lowered[name].key != kept[name]["key"]]
    state_bytes = {"data_parallel": found["biggan"].state_bytes}
    if not _TINY.value:
        state_bytes["zero1"] = lowered_today(_CUT).state_bytes
    resnet = {name: each for name, each in found.items() if "resnet" in name}
    result = {
        "fits": int(found["biggan"].status == "compiled"),
        "bytes_per_core": found["biggan"].memory_bytes,
        "predicted_efficiency": efficiency(found["biggan"]),
        "most_images": {
            name: most_images(found["biggan"], size)
            for name, size in state_bytes.items()
        },
        "resnet_fits": int(all(o.status == "compiled" for o in resnet.values())),
        "images_per_s": {
            name.removeprefix("resnet."): round(
                outcome.examples / seconds_of(outcome, CASES[name].topology)
            )
            for name, outcome in resnet.items()
        },
        "stale": len(stale),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
