"""Bars of all benchmarks, and whether a number reaches its bar. Data, no effects."""

import dataclasses
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The bar of one number of one benchmark.

    Attributes:
      benchmark: The module's name, with flags if it is measured by others, too.
      key: The number's name in the JSON object.
      rule: How the number and the limit compare.
      limit: The other side.
    """

    benchmark: str
    key: str
    rule: Literal["<=", ">=", "=="]
    limit: float

    def holds(self, number: float) -> bool:
        """Return whether `number` reaches the bar."""
        match self.rule:
            case "<=":
                return number <= self.limit
            case ">=":
                return number >= self.limit
            case "==":
                return number == self.limit


def _bar(benchmark: str, key: str, rule: Literal["<=", ">=", "=="], limit: float):
    return Bar(benchmark=benchmark, key=key, rule=rule, limit=limit)


_CHEETAH = "d4pg_control --env=HalfCheetah-v5 --seeds=1"

BARS = (
    _bar("step_overhead", "same_program", "==", 1),
    _bar("step_overhead", "ratio_low", "<=", 1.01),
    _bar("step_overhead", "aa_ratio", "<=", 1.01),
    _bar("step_overhead", "bare_ratio_low", "<=", 1.01),
    _bar("step_overhead", "overhead_us", "<=", 150),
    _bar("step_overhead", "overhead_ratio", "<=", 2),
    _bar("step_overhead", "checksum_us", "<=", 200),
    _bar("accumulation", "speedup", ">=", 4),
    _bar("accumulation", "reduces_per_update", "==", 1),
    _bar("steps_per_call", "speedup", ">=", 1.5),
    _bar("no_hang", "failures", "==", 0),
    _bar("import_time", "ratio", "<=", 1.15),
    _bar("kill_resume", "failures", "==", 0),
    _bar("kill_resume", "lost_steps", "==", 0),
    _bar("kill_resume", "lost_on_sigterm", "==", 0),
    _bar("kill_resume", "in_saves", ">=", 5),
    _bar("kill_resume", "first_step_s", "<=", 3.0),
    _bar("emergency", "seconds", "<=", 5),
    _bar("emergency", "host_seconds", "<=", 8),
    _bar("emergency", "lost_steps", "<=", 5),
    _bar("session", "ratio_low", "<=", 1.02),
    _bar("session", "step_ratio_low", "<=", 1.02),
    _bar("session", "failures", "==", 0),
    _bar("corruption", "silent", "==", 0),
    _bar("fingerprints", "found", ">=", 1000),
    _bar("fingerprints", "false_alarms", "==", 0),
    _bar("fingerprints", "cost", "<=", 0.05),
    _bar("fingerprints", "seconds", "<=", 600),
    _bar("bucket_faults", "failures", "==", 0),
    _bar("checkpoint_stall", "ratio", "<=", 1.10),
    _bar("checkpoint_stall", "blocked_ms", "<=", 50),
    _bar("checkpoint_stall", "seconds_per_save_ratio", "<=", 1.3),
    _bar("checkpoint_shards", "peak_ratio", "<=", 1.25),
    _bar("checkpoint_shards", "bytes_ratio", "<=", 1.02),
    _bar("checkpoint_shards", "restore_reads", "<=", 1.05),
    _bar("checkpoint_shards", "reshard_reads", "<=", 1.3),
    _bar("checkpoint_shards", "seconds_ratio", "<=", 1.3),
    _bar("checkpoint_shards", "blocked_ratio", "<=", 2),
    _bar("goodput", "goodput", ">=", 0.90),
    _bar("metrics_cost", "ratio_low", "<=", 1.03),
    _bar("eval_exact", "failures", "==", 0),
    _bar("first_hour", "failures", "==", 0),
    _bar("first_hour", "long", "==", 0),
    _bar("first_hour", "hangs", "==", 0),
    _bar("first_hour", "silent", "==", 0),
    _bar("proof", "wrong_accepted", "==", 0),
    _bar("proof", "right_refused", "<=", 2),
    _bar("proof", "mislabelled", "==", 0),
    _bar("truth", "failed", "==", 0),
    _bar("strategy_matrix", "failed", "==", 0),
    _bar("choose", "pruned_best", "==", 0),
    _bar("choose", "flips", "==", 8),
    _bar("choose", "seconds", "<=", 180),
    _bar("wire_bytes", "worst_error", "<=", 0.01),
    _bar("slow_links", "int8_speedup", ">=", 2.5),
    _bar("slow_links", "hierarchical_speedup", ">=", 1.2),
    _bar("slow_links", "rows_speedup", ">=", 5),
    _bar("slow_links", "pairs_right", ">=", 0.95),
    _bar("slow_links", "right_without_trials", ">=", 5),
    _bar("slow_links", "regret_high", "<=", 1.15),
    _bar("slow_links", "vs_dp_low", "<=", 1.02),
    _bar("first_update", "missed", "==", 0),
    _bar("first_update", "false_alarms", "==", 0),
    _bar("partition_overhead", "same_program", "==", 1),
    _bar("partition_overhead", "ratio_low", "<=", 1.02),
    _bar("batch_norm", "time_ratio", "<=", 1.15),
    _bar("batch_norm", "bytes_ratio", "<=", 1.0),
    _bar("batch_norm", "fast_time_ratio", "<=", 1.3),
    _bar("rpc_fuzz", "failures", "==", 0),
    _bar("house", "root_modules", "<=", 6),
    _bar("house", "largest_folder", "<=", 14),
    _bar("house", "circles", "==", 0),
    _bar("house", "code_lines", "<=", 45_330),  # 600 fewer than at e306ca1
    _bar("house", "speech_words", "<=", 6),
    _bar("house", "relative_openings", "<=", 2),
    _bar("house", "shared_class_names", "<=", 15),
    _bar("house", "untyped_options", "==", 0),
    _bar("house", "unexplained", "==", 0),
    _bar("house", "examples_functions", ">=", 12),
    _bar("house", "examples_front", ">=", 100),
    *(_bar("docs", key, "==", 0) for key in ("missing", "warnings", "broken")),
    *(_bar("docs", key, "==", 0) for key in ("unrun", "unpaged", "long_lines")),
    _bar("docs", "fragments", "<=", 0.15),
    _bar("docs", "readme_lines", "<=", 160),
    _bar("docs", "notebook_seconds", "<=", 60),
    _bar("rpc_attack", "failures", "==", 0),
    _bar("join_attack", "failures", "==", 0),
    _bar("join_attack", "newest", "==", 1),
    _bar("join_attack", "seconds", "<=", 0.5),
    _bar("rpc", "noop_us", "<=", 45),
    _bar("rpc", "noop_ratio", "<=", 3.0),
    _bar("rpc", "futures_per_s", ">=", 25_000),
    _bar("rpc", "clients16_per_s", ">=", 25_000),
    _bar("rpc", "echo_1k_ratio", "<=", 3),
    _bar("rpc", "echo_1m_ratio", "<=", 1.5),
    _bar("rpc", "push_1m_ratio", "<=", 4),
    _bar("rpc", "push_32m_ratio", "<=", 1.5),
    _bar("rpc", "grpc_noop_ratio", "<=", 1.5),
    _bar("rpc", "grpc_push_ratio", ">=", 0.9),
    _bar("rpc", "ray_noop_speedup", ">=", 5),
    _bar("rpc", "ray_array_speedup", ">=", 1.5),
    _bar("rpc", "unauth_growth_ratio", "<=", 2),
    _bar("rpc", "stop_noticed_s", "<=", 5),
    _bar("rpc_soak", "errors", "==", 0),
    _bar("rpc_soak", "memory_growth", "<=", 0.01),
    _bar("rpc_soak", "thread_growth", "<=", 0),
    _bar("rpc_soak", "descriptor_growth", "<=", 0),
    _bar("launch_time", "seconds_1", "<=", 1.0),
    _bar("launch_time", "seconds_8", "<=", 2.5),
    _bar("launch_time", "seconds_32", "<=", 8),
    _bar("launchers", "alone", "==", 0),
    _bar("launchers", "wrong", "==", 0),
    _bar("launchers", "started_missing", "==", 0),
    _bar("program_overhead", "ratio", "<=", 1.1),
    _bar("variable_service", "speedup", ">=", 3),
    _bar("replay", "sample_ratio", ">=", 0.65),
    _bar("replay", "uniform_ratio", ">=", 0.9),
    _bar("replay", "sample_over_tree", "<=", 4),
    _bar("replay", "update_over_tree", "<=", 1.5),
    _bar("replay", "served_ratio", ">=", 0.5),
    _bar("replay", "served_trusted_ratio", ">=", 0.8),
    _bar("replay", "mixed", ">=", 0.8),
    _bar("replay", "hold_ms", "<=", 20),
    _bar("replay_laws", "failures", "==", 0),
    _bar("gradient_coding", "speedup", ">=", 1.3),
    _bar("orphans", "left", "==", 0),
    _bar("hosts", "failures", "==", 0),
    _bar("learner_faults", "failures", "==", 0),
    _bar("learner_faults", "restart_s", "<=", 20),
    _bar("upstream_launchpad", "passed", ">=", 45),
    _bar("strategy_memory", "worst_error", "<=", 0.02),
    _bar("strategy_memory", "temp_ratio", "<=", 1.1),
    _bar("strategy_memory", "fits", "==", 1),
    _bar("strategy_memory", "activation_gathers", "==", 0),
    _bar("rehearse", "failures", "==", 0),
    _bar("rehearse", "missed", "==", 0),
    _bar("rehearse", "seconds", "<=", 600),
    _bar("plan_published", "worst_ratio", "<=", 1.2),
    _bar("plan_published", "efficiency_error", "<=", 0.07),
    _bar("plan_published", "stale", "==", 0),
    _bar("plan_biggan", "fits", "==", 1),
    _bar("plan_biggan", "predicted_efficiency", ">=", 0.9),
    _bar("plan_biggan", "resnet_fits", "==", 1),
    _bar("plan_biggan", "stale", "==", 0),
    _bar("actor_learner", "bridge_ratio", ">=", 0.85),
    _bar("actor_learner", "cpu_ratio", ">=", 0.85),
    _bar("actor_learner", "async_over_sync", ">=", 1.3),
    _bar("actor_learner", "rllib_speedup", ">=", 1.5),
    _bar("control_peers", "sb3_speedup", ">=", 1.5),
    _bar("control_peers", "sbx_ratio", ">=", 1.0),
    _bar("controller_reshard", "failures", "==", 0),
    _bar("controller_reshard", "host_copies", "==", 0),
    _bar("controller_reshard", "call_ms", "<=", 20),
    _bar("controller_overlap", "in_process", "<=", 1.15),
    _bar("controller_pipeline", "ratio", "<=", 1.2),
    _bar("controller_pipeline", "process_ratio", "<=", 1.2),
    _bar("controller_pipeline", "train_ratio", "<=", 1.25),
    _bar("controller_pipeline", "enqueue_share", "<=", 0.05),
    _bar("controller_pipeline", "live", "==", 4),
    _bar("controller_share", "worst_error", "<=", 0.10),
    _bar("controller_share", "throughput", ">=", 0.95),
    _bar("controller_order", "failures", "==", 0),
    _bar("controller_order", "unordered_failures", ">=", 1),
    _bar("controller_soak", "growth", "<=", 1.05),
    _bar("controller_soak", "leaks", "==", 0),
    _bar("controller_overlap", "processes", "<=", 1.15),
    _bar("controller_recovery", "failures", "==", 0),
    _bar("controller_recovery", "spare_s", "<=", 1.5),
    _bar("controller_recovery", "cold_s", "<=", 10),
    _bar("controller_recovery", "stopped_s", "<=", 6),
    _bar("controller_dispatch", "chained_ratio", "<=", 1.5),
    _bar("controller_dispatch", "ray_speedup", ">=", 5),
    _bar("controller_dispatch", "read_ratio", "<=", 1.1),
    _bar("controller_vs_spmd", "ratio_low", "<=", 1.05),
    _bar("accelerator", "failures", "==", 0),
    _bar("accelerator", "missing_keys", "==", 0),
    _bar("ppo_cartpole", "average_return", ">=", 475),
    _bar("ppo_cartpole", "seconds", "<=", 300),
    _bar("d4pg_control", "average_return", ">=", 950),
    _bar("d4pg_control", "seconds", "<=", 300),
    _bar(_CHEETAH, "average_return", ">=", 2_000),
    _bar(_CHEETAH, "seconds", "<=", 1_200),
    _bar("weights", "failures", "==", 0),
    _bar("lm", "bits_per_byte", "<=", 2.2),
    _bar("lm", "one_device_difference", "<=", 1e-5),
    _bar("lm", "seconds", "<=", 600),
    _bar("imagenet_resnet50", "accuracy", ">=", 0.8),
    _bar("imagenet_resnet50", "damaged", "==", 3),
)

_EXPERIMENTS = {"d4pg_control", "imagenet_resnet50", "lm", "ppo_cartpole"}

BENCHMARKS = tuple(dict.fromkeys(bar.benchmark for bar in BARS))
"""The names of all benchmarks, in the order of the bars."""


def command_of(benchmark: str) -> list[str]:
    """Return what follows `python -m`: some experiments have a bar, too.

    >>> command_of("lm --steps=2")
    ['experiments.lm', '--steps=2']
    """
    module, *flags = benchmark.split()
    folder = "experiments" if module in _EXPERIMENTS else "benchmarks"
    return [f"{folder}.{module}", *flags]


Results = Mapping[str, Mapping[str, float | None]]
"""By benchmark, the JSON object that it printed; one that broke is not there, and a
number that cannot be measured here (a peer is not installed) is null."""


def missed(results: Results) -> list[Bar]:
    """List the bars that were not reached, those of a broken benchmark included."""
    return [bar for bar in BARS if _is_missed(bar, results.get(bar.benchmark))]


def _is_missed(bar: Bar, found: Mapping[str, float | None] | None) -> bool:
    if found is None:
        return True
    number = found[bar.key]
    return number is not None and not bar.holds(number)
