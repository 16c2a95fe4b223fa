import json
import subprocess
import sys

import pytest

from benchmarks import namespaces
from benchmarks.bars import BARS, BENCHMARKS, command_of
from benchmarks.no_hang import run_once
from benchmarks.runs import ssh_server

CHEETAH = "d4pg_control --env=HalfCheetah-v5 --seeds=1"
CONTROL = [
    *("--seeds=1", "--steps=4", "--steps_per_call=2", "--hidden=8", "--least=32"),
    *("--batch_size=16", "--episodes=1", "--directory="),
]

TINY = {
    "step_overhead": ["--rounds=2", "--steps=2", "--width=2", "--empty_steps=5"],
    "accumulation": ["--rounds=2", "--updates=1", "--microbatch=8"],
    "steps_per_call": ["--rounds=2", "--calls=1", "--global_batch=4"],
    "no_hang": ["--runs=2", "--steps=20", "--devices=2", "--devices=4"],
    "import_time": ["--rounds=1"],
    "kill_resume": [
        *("--kills=8", "--terms=2", "--starts=1"),  # over one and two processes
    ],
    "emergency": ["--kills=1", "--processes=2", "--megabytes=4", "--settled_s=1"],
    "session": ["--rounds=2", "--steps=2", "--kills=4"],
    "corruption": ["--cases=40"],
    "fingerprints": ["--damages=30", "--checks=30", "--rounds=2", "--mb=1"],
    "bucket_faults": ["--rounds=2"],
    "checkpoint_stall": [
        *("--state_mb=8", "--step_ms=2", "--interval_s=3", "--rounds=2", "--saves=2"),
    ],
    "checkpoint_shards": ["--processes=2", "--state_mb=16", "--rounds=2"],
    "goodput": ["--kills=1", "--interval_s=15", "--task=mlp", "--pace_s=1"],
    "metrics_cost": ["--rounds=2", "--steps_per_block=5", "--task=mlp"],
    "eval_exact": ["--sizes=7", "--sizes=100", "--drawn=1"],
    "first_hour": ["--only=a cycle", "--only=one column", "--only=parms"],
    "proof": ["--norun"],
    "truth": ["--only=lagrangian", "--only=cg-local"],
    "strategy_matrix": ["--only=gan", "--only=rules"],
    "wire_bytes": ["--only=mlp", "--only=int8"],
    "first_update": ["--only=sound norm under fsdp with adam", "--nocost"],
    "partition_overhead": ["--rounds=2", "--steps=1", "--width=64", "--context=8"],
    "batch_norm": ["--rounds=2", "--calls=1", "--shape=4,4,4,32"],
    "house": [],
    "docs": [],
    "rpc_fuzz": ["--cases=3000", "--frames=300"],
    "rpc_attack": [
        *("--only=replay_", "--only=half_open", "--only=page_", "--only=folders"),
        *("--only=strangers_at", "--only=ranges_for", "--only=waiting_inserts"),
        *("--only=names_of_hosts", "--only=yaml_with_tags"),
    ],
    "join_attack": ["--only=replaying", "--only=another_runs", "--pairs=1"],
    "rpc": ["--rpc_rounds=2", "--rpc_calls=20", "--rpc_window_s=0.1"],
    "rpc_soak": [
        *("--clients=8", "--client_processes=2", "--minutes=0.2", "--readings=1"),
    ],
    "launchers": [],
    "launch_time": ["--rounds=1"],
    "program_overhead": ["--overhead_rounds=2", "--overhead_calls=20"],
    "gradient_coding": ["--rounds=2", "--steps=3"],
    "orphans": ["--rounds=2"],
    "hosts": ["--only=process 1"],
    "slow_links": ["--mbit=400", "--only=W 128", "--turns=2"],
    "variable_service": ["--variable_rounds=1", "--variable_pulls=2"],
    "replay": [
        *("--frames=3000", "--rows=10000", "--rounds=1", "--calls=2"),
        *("--batches=8", "--best_of=5"),
    ],
    "replay_laws": ["--draws=40000", "--moves=40"],
    "learner_faults": ["--rounds=5"],
    "upstream_launchpad": ["--only=test_nested_groups"],
    "strategy_memory": ["--width=64", "--notpu"],
    "choose": ["--tiny"],
    "plan_published": ["--tiny"],
    "rehearse": ["--only=fault shifted"],
    "plan_biggan": ["--tiny"],
    "actor_learner": [
        *("--rounds=1", "--window_s=0.2", "--actors=1", "--games=2", "--batch=4"),
        *("--unroll=4", "--norllib"),
    ],
    "control_peers": [
        *("--env=Pendulum-v1", "--seconds=0.2", "--warm=2", "--peers=none"),
    ],
    "controller_reshard": ["--meshes=2"],
    "controller_overlap": ["--rounds=1", "--sleep_s=0.01"],
    "controller_pipeline": ["--rounds=1", "--sleep_s=0.002"],
    "controller_share": ["--rounds=1", "--ops=3"],
    "controller_order": ["--rounds=4"],
    "controller_soak": ["--dataflows=200"],
    "controller_vs_spmd": ["--rounds=1", "--steps=2", "--ms=20"],
    "controller_recovery": ["--rounds=3", "--nogroups"],
    "controller_dispatch": [
        *("--rounds=1", "--ops=2", "--steps=1", "--step_s=0.01", "--noray"),
    ],
    "accelerator": ["--tiny", "--only=checkpoint", "--only=islands"],
    "ppo_cartpole": [
        *("--seeds=1", "--steps=2", "--hidden=8", "--epochs=1", "--directory="),
    ],
    "d4pg_control": CONTROL,
    CHEETAH: CONTROL,
    "weights": [],
    "lm": [
        *("--steps=2", "--layers=1", "--width=16", "--heads=2", "--kv_heads=1"),
        *("--vocabulary=300", "--context=16", "--global_batch=8", "--directory="),
        *("--text=CHANGELOG.md", "--held_out=README.md"),
    ],
    "imagenet_resnet50": ["--depth=18", "--width=2", "--epochs=1"],
}

# What must hold at any size and under any load; times do not.
EXACT = {
    "step_overhead": {"same_program": 1, "devices": 8},
    "accumulation": {"reduces_per_update": 1, "devices": 8},
    "steps_per_call": {"steps_per_call": 20, "devices": 2},
    "no_hang": {"failures": 0, "runs": 2},
    "import_time": {},
    "kill_resume": {
        **{"kills": 8, "failures": 0, "lost_steps": 0, "lost_on_sigterm": 0},
    },
    "emergency": {"kills": 1},
    "session": {"kills": 4, "failures": 0, "lost_steps": 0},
    "corruption": {"silent": 0, "cases": 40},
    "fingerprints": {"found": 30, "false_alarms": 0, "damages": 30},
    "bucket_faults": {"failures": 0, "rounds": 2},
    "checkpoint_stall": {},
    "checkpoint_shards": {"processes": 2, "state_mb": 16},
    "goodput": {"kills": 1},
    "metrics_cost": {},
    "eval_exact": {"failures": 0, "largest": 100},
    "first_hour": {"failures": 0, "long": 0, "hangs": 0, "silent": 0},
    "proof": {"wrong_accepted": 0, "right_refused": 1, "broken": 0},
    "truth": {"failed": 0, "total": 2},
    "strategy_matrix": {"failed": 0, "total": 1},
    "wire_bytes": {"worst_error": 0.0, "cases": 4},
    "first_update": {"missed": 0, "false_alarms": 0, "total": 2},
    "partition_overhead": {"same_program": 1, "devices": 8},
    "batch_norm": {"bytes_ratio": 1.0, "collectives": 3, "devices": 8},
    "house": {
        **{"root_modules": 6, "largest_folder": 14, "circles": 0},
        **{"untyped_options": 0, "unexplained": 0, "examples_front": 100.0},
    },
    "docs": {"missing": 0, "warnings": 0, "broken": 0, "unrun": 0},
    "rpc_fuzz": {"failures": 0, "cases": 3000},
    "rpc_attack": {"failures": 0, "total": 34},
    "join_attack": {"failures": 0},
    "rpc": {},
    "rpc_soak": {"errors": 0, "thread_growth": 0, "descriptor_growth": 0},
    "launchers": {"alone": 0, "wrong": 0, "started_missing": 0},
    "launch_time": {},
    "program_overhead": {},
    "gradient_coding": {"parts_per_worker": 3},
    "orphans": {"left": 0, "rounds": 4},
    "hosts": {"failures": 0, "cases": 1},
    "slow_links": {"cases": 1},
    "variable_service": {},
    "replay": {},
    "replay_laws": {"failures": 0, "draws": 40_000},
    "learner_faults": {"failures": 0, "rounds": 5},
    "controller_reshard": {"failures": 0, "host_copies": 0, "moves": 36},
    "controller_overlap": {},
    "controller_pipeline": {"live": 4},
    "controller_share": {},
    "controller_order": {"failures": 0},
    "controller_soak": {"leaks": 0},
    "controller_recovery": {"failures": 0, "lost_after_s": 4.0},
    "controller_dispatch": {"ray_speedup": None},
    "controller_vs_spmd": {},
    "upstream_launchpad": {},
    "strategy_memory": {"devices": 8, "fits": None, "activation_gathers": None},
    "choose": {"pruned_best": 0, "flips": 1},
    "plan_published": {"stale": 0},
    "rehearse": {"failures": 0, "missed": 0, "found": 1},
    "plan_biggan": {"stale": 0, "resnet_fits": 1},
    "actor_learner": {"rllib_speedup": None},
    "control_peers": {"sb3_speedup": None, "sbx_ratio": None, "returns": None},
    "accelerator": {"failures": 0, "missing_keys": 0, "platform": "cpu"},
    "ppo_cartpole": {"steps": 2, "scale": "process"},
    "d4pg_control": {"steps": 4, "scale": "process"},
    CHEETAH: {"steps": 4, "scale": "process"},
    "weights": {"failures": 0, "kinds": 4},
    "lm": {"steps": 2, "devices": 8, "strategy": "fsdp"},
    "imagenet_resnet50": {"damaged": 3, "held_out": 360, "devices": 8},
}
NIGHTLY = {
    *(
        "actor_learner",
        "checkpoint_stall",
        "control_peers",
        "controller_order",
        "controller_recovery",
        "docs",
        "goodput",
        "imagenet_resnet50",
    ),
    *("emergency", "hosts", "launch_time", "launchers"),
    *("kill_resume", "learner_faults", "lm", "no_hang", "orphans"),
    *("program_overhead", "rpc_soak", "session", "slow_links"),
}
TIMED = {
    *("actor_learner", "control_peers", "d4pg_control", CHEETAH, "learner_faults"),
    *("replay", "replay_laws"),
}
TIMEOUT_S = 1200  # for killing a run ten times on a busy machine


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in BENCHMARKS
    ],
)
def test_benchmark_ends_with_its_numbers_as_json(name, tmp_path):
    if name.startswith("d4pg_control"):
        pytest.importorskip("mujoco", reason="jax-replicator[control]")
    if name == "bucket_faults":
        pytest.importorskip("moto")
    if name in ("hosts", "slow_links"):
        skip_without_hosts(tmp_path)
    command = [sys.executable, "-m", *command_of(name), *TINY[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {bar.key for bar in BARS if bar.benchmark == name} <= set(found)
    assert found.items() >= EXACT[name].items()
    assert name not in TIMED or "seconds" in found


def skip_without_hosts(folder):
    try:
        with namespaces.Namespaces(1), ssh_server.SshServer(folder):
            return
    except (namespaces.Unavailable, ssh_server.Unavailable) as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_run_that_does_not_end_in_time_fails_by_name():
    assert run_once(devices=2, steps=20, limit_s=0.1) == "killed after 0.1 s"


@pytest.mark.slow
def test_run_that_raises_fails_with_its_last_line():
    problem = run_once(devices=0, steps=1, limit_s=60)
    assert problem is not None
    assert problem.startswith("exit status 1: ")
    assert "must be at least 1, got 0" in problem
