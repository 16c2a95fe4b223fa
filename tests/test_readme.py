"""What README and the pages of `docs` say is so: their code runs, their links lead."""

import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicator
import replicator.launchpad_bridge as lp
from benchmarks.docs.pages import (
    README,
    ROOT,
    blocks_of,
    broken_links,
    pages,
)
from experiments import impala_catch
from replicator import exit_codes, hooks, strategies
from replicator.training.watchdog import Limits
from tests.experiments.test_off_policy import AGENT, reach
from tests.steps import (
    adam,
    assert_equal_bits,
    regression_batch,
    replicas,
    trainer,
)

RELIABILITY = "".join(
    (ROOT / "docs" / "guides" / name).read_text()
    for name in ("reliability.md", "week.md")
)


def init_params(key):
    return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}


def loss_fn(params, batch):
    predicted = batch["x"] @ params["w"] + params["b"]
    return ((predicted - batch["y"]) ** 2).mean()


def line_of(examples):
    x = np.random.default_rng(0).normal(size=(examples, 4)).astype(np.float32)
    return {"x": x, "y": x @ np.arange(4, dtype=np.float32)}


def shortened(code):
    """Return code that trains for ten steps: thousands prove no more."""
    return re.sub(r"steps=\d000\b", "steps=10", code)


@contextlib.contextmanager
def as_jax_comes():
    """Promote as for a reader, in all threads: optax schedules promote int32 counts."""
    usual = {
        "jax_numpy_dtype_promotion": "standard",
        "jax_numpy_rank_promotion": "allow",
    }
    before = {name: getattr(jax.config, name) for name in usual}
    for name, value in usual.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def names_of_all_pages(folder):
    """Return what every page may use: README's ten lines, and what it mentions."""
    rep = replicator.Replicator()
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))
    init_fn, step_fn = trainer(optimizer, loss_fn, init_params)

    def eval_fn(state, batch):
        predicted = batch["x"] @ state["params"]["w"] + state["params"]["b"]
        return {"loss": (predicted - batch["y"]) ** 2}

    return {
        **{"jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx},
        **{"replicator": replicator, "strategies": strategies, "hooks": hooks},
        **{"lp": lp, "rep": rep, "optimizer": optimizer, "tx": optimizer},
        **{"init_params": init_params, "loss_fn": loss_fn, "eval_fn": eval_fn},
        **{"init_fn": init_fn, "step_fn": step_fn, "key": jax.random.key(0)},
        "agent": impala_catch.make_agent(impala_catch.Config()),
        "make_environment": functools.partial(impala_catch.make_boards, 8),
        "make_model": lambda key: nnx.Linear(4, 1, rngs=nnx.Rngs(key)),
        **{"dataset": [line_of(32)] * 3, "batch": line_of(32)},
        **{"loader": [line_of(32), line_of(32), line_of(19)], "folder": folder},
    }


def run_blocks(blocks, names):
    """Run blocks in their order, each at the lines of its page."""
    with as_jax_comes():
        for block in blocks:
            code = "\n" * (block.line - 1) + shortened(block.code)
            exec(compile(code, str(block.page), "exec"), names)


OUTCOMES = {  # what a page comes to, where its text gives a number
    "README.md": lambda names: names["result"].step == 10,
    "docs/start/from_accelerate.md": lambda names: names["result"].step == 12,
    "docs/start/from_jit.md": lambda names: names["result"].step == 200,
    "docs/start/from_pmap.md": lambda n: n["result"].evaluation["examples"] == 640,
}
WITH_CODE = {page: [b for b in blocks_of(page) if b.runs] for page in pages()}


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page == README else [pytest.mark.slow])
        for page, blocks in WITH_CODE.items()
        if blocks
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    for name in imported_by(WITH_CODE[page]) - sys.stdlib_module_names:
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names = {**names_of_all_pages(tmp_path), "__name__": "page"}
    run_blocks(WITH_CODE[page], names)
    assert OUTCOMES.get(str(page.relative_to(ROOT)), lambda names: True)(names)


def test_each_python_block_runs_or_is_marked():
    shown = [block for page in pages() for block in blocks_of(page) if block.is_python]
    where = [f"{b.page.name}:{b.line}" for b in shown if not (b.runs or b.mark)]
    assert not where
    elsewhere = [b.mark.split()[2] for b in shown if b.mark.startswith("run by")]
    assert not [test for test in elsewhere if not (ROOT / test).exists()]
    fragments = [block for block in shown if block.mark.startswith("fragment")]
    assert len(fragments) <= 0.15 * len(shown)


PORTS = [
    ("init_net", "norm_step"),
    ("init_both", "both_step"),
    ("init_train_state", "token_step"),
    ("init_train_state", "noisy_step"),
]


@functools.cache
def ports(devices, strategy=None):
    """Run the section on ports; return all that it names."""
    names = {
        **{"jax": jax, "jnp": jnp, "np": np, "optax": optax, "replicator": replicator},
        **{"init_params": init_params, "loss_fn": loss_fn},
        "rep": replicas(devices, strategy=strategy),
    }
    porting = ROOT / "docs" / "start" / "porting.md"
    run_blocks(WITH_CODE[porting][1:], names)  # the first makes a `rep` of its own
    return names


@pytest.mark.slow
@pytest.mark.parametrize(("init_fn", "step_fn"), PORTS)
@pytest.mark.parametrize(
    ("devices", "strategy", "accumulate"),
    [(8, None, 1), (2, None, 2), (4, strategies.fsdp(), 1)],
)
def test_what_ports_became_is_the_same_everywhere(
    init_fn, step_fn, devices, strategy, accumulate
):
    def after(names, accumulate):
        options = {"init_fn": names[init_fn], "steps": 2, "display": False}
        run = functools.partial(names["rep"].run, names[step_fn], **options)
        with as_jax_comes():
            done = run([line_of(32)] * 2, accumulate=accumulate)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(done.state)]

    if step_fn == "norm_step" and accumulate > 1:
        expected = after(ports(1), accumulate)  # a norm speaks for its microbatch
    else:
        expected = after(ports(1), 1)
    for found, leaf in zip(
        after(ports(devices, strategy), accumulate), expected, strict=True
    ):
        np.testing.assert_allclose(found, leaf, rtol=2e-4, atol=2e-5)


def test_a_run_takes_a_buffer_that_is_filled_anew():
    names = ports(1)
    options = {"init_fn": names["init_net"], "steps": 3, "display": False}
    with as_jax_comes():
        done = names["rep"].run(
            names["norm_step"], lambda _: names["refilled"](), **options
        )
    assert_equal_bits(done.state, names["state"])


@pytest.mark.parametrize(("devices", "sizes"), [(8, (2, 4, 1)), (1, (1, 1, 1))])
def test_the_page_of_strategies_runs(devices, sizes):
    init_fn, step_fn = trainer(adam())
    names = {"init_fn": init_fn, "step_fn": step_fn, "batch": regression_batch()}
    names["dataset"] = [names["batch"]]
    for block in blocks_of(ROOT / "replicator" / "strategies" / "README.md"):
        if block.is_python:
            code = block.code.replace("Replicator(", f"Replicator({devices}, ")
            run_blocks([dataclasses.replace(block, code=code)], names)
    names["rep"].init(init_fn)
    assert tuple(names["rep"].mesh.shape.values()) == sizes


@pytest.mark.slow
@pytest.mark.nightly
def test_the_program_prints_what_its_page_says_on_threads_processes_and_ray(tmp_path):
    pytest.importorskip("ray")
    page = (ROOT / "replicator" / "launchpad_bridge" / "README.md").read_text()
    section = page.split("## On threads, processes or a cluster")[1]
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", section, re.DOTALL)
    assert found is not None
    script = tmp_path / "squares.py"
    script.write_text(found[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.stdout == found[2], done.stderr


@pytest.mark.slow
def test_the_program_with_a_replay_table_learns():
    [block] = [b for b in blocks_of(README) if b.mark]
    code = block.code.replace("200_000", "8").replace('"processes"', '"threads"')
    names = {"lp": lp, "agent": AGENT, "make_env": functools.partial(reach, 1)}
    run_blocks([dataclasses.replace(block, code=code)], names)
    assert names["run"].results["learner"]["step"] == 8


def test_the_ten_lines_are_those_of_the_design():
    first = WITH_CODE[README][0].code
    assert first.count("\n") <= 22
    assert "rep.run(step_fn, dataset, init_fn=init_fn, steps=1000, seed=0)" in first


def test_the_script_that_readme_kills_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = (ROOT / "docs" / "train.py").read_text()
    with as_jax_comes():
        exec(compile(shortened(code), "train.py", "exec"), {"__name__": "__main__"})
    assert "'examples': 389" in capsys.readouterr().out


def test_the_script_with_a_loop_of_its_own_has_the_bits_of_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    code = shortened((ROOT / "docs" / "train_own_loop.py").read_text())
    with as_jax_comes():
        exec(compile(code, "train_own_loop.py", "exec"), names)
        run = names["rep"].run(
            *(names[name] for name in ("step_fn", "batches")),
            init_fn=names["init_fn"],
            steps=10,
            display=False,
        )
    assert_equal_bits(names["state"], run.state)


# What `docs/guides/equinox.md` and `data.md` are about.
NOT_OURS = {"equinox", "grain"}


def imported_by(blocks):
    """Name the packages that blocks of Python import."""
    imported = set()
    for node in (n for b in blocks for n in ast.walk(ast.parse(b.code))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    return imported


def test_the_extra_all_brings_what_the_pages_import():
    shown = [b for found in WITH_CODE.values() for b in found if b.is_python]
    imported = imported_by(shown)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    [named] = re.findall(r"\[(.*)\]", extras["all"][0])
    required = [
        *project["dependencies"],
        *(r for e in named.split(",") for r in extras[e]),
    ]
    brought = {re.split(r"[>\[]", each)[0].lower() for each in required}
    found = imported - sys.stdlib_module_names - NOT_OURS - {"replicator"}
    dists = importlib.metadata.packages_distributions()
    assert {n for n in found if not brought & {*map(str.lower, dists[n])}} == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert not broken_links(page)


def test_every_test_and_benchmark_that_is_named_is_there():
    paths = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", RELIABILITY)
    modules = re.findall(r"python -m benchmarks\.(\w+)", RELIABILITY)
    assert len({*paths, *modules}) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert not [name for name in modules if find_spec(f"benchmarks.{name}") is None]


def test_every_limit_and_exit_code_is_in_a_page():
    rows = {
        line.split("|")[1].strip() for line in RELIABILITY.splitlines() if "|" in line
    }
    assert {f"`{field.name}`" for field in dataclasses.fields(Limits)} <= rows
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert set(map(str, codes)) <= rows


@pytest.mark.parametrize("name", ["train.py", "train_own_loop.py"])
def test_a_script_of_the_docs_needs_nothing_that_is_not_installed_with_us(name):
    tree = ast.parse((ROOT / "docs" / name).read_text())
    wanted = {
        (each.module if isinstance(each, ast.ImportFrom) else each.names[0].name)
        for each in ast.walk(tree)
        if isinstance(each, ast.Import | ast.ImportFrom)
    }
    packages = {each.split(".")[0] for each in wanted} - sys.stdlib_module_names
    assert packages == {"jax", "numpy", "optax", "replicator"}
