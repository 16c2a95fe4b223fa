"""The built wheel, alone in an empty environment, runs README's first two screens."""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_readme import README

ROOT = Path(__file__).parents[1]
_LOCK = "py311.txt" if sys.version_info < (3, 12) else "py312.txt"
_SCREENS = README.read_text().split("## What it promises")[0]
_PRELUDE = """
import warnings
warnings.simplefilter("error")
import replicator
replicator.fake_devices(8)
import importlib.util, jax, jax.numpy as jnp, numpy as np
for extra in ("flax", "grain", "tensorboardX", "matplotlib"):
    assert importlib.util.find_spec(extra) is None, extra

def init_params(key):
    return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}

def loss_fn(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()

x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
dataset = [{"x": x, "y": x.sum(1)}] * 3
folder = "checkpoints"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    [found] = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"replicator"}
    assert {"replicator/py.typed", "replicator/cli/digits.npz"} <= set(names)
    pages = "cli/report_page", "launchpad_bridge/view/dashboard"
    assets = {f"replicator/{p}/page.{kind}" for p in pages for kind in ("css", "js")}
    assert assets <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the programs of an environment that has the wheel and no extra."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    # The versions of the lock, of what the wheel asks for; constraints bear no hashes.
    lock = (ROOT / "requirements" / _LOCK).read_text()
    constraints = folder / "constraints.txt"
    constraints.write_text(re.sub(r" \\\n(    --hash.*\n)+", "\n", lock))
    install = [programs / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "-c", constraints, wheel], check=True)
    return programs


@pytest.mark.slow
def test_the_wheel_runs_readmes_first_two_screens_without_extras(installed, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", _SCREENS, re.DOTALL)
    assert len(blocks) >= 4
    script = tmp_path / "screens.py"
    script.write_text("\n".join([_PRELUDE, *blocks, "print('step', result.step)"]))
    done = subprocess.run(
        [installed / "python", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "step 1000"
    assert "WARNING" not in done.stderr


@pytest.mark.slow
def test_the_wheel_runs_the_demo_without_extras(installed, tmp_path):
    done = command(installed, tmp_path, "demo", "--steps", "50")
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "WARNING" not in done.stderr


def command(installed, folder, *words):
    return subprocess.run(
        [installed / "replicator", *words], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.slow
def test_the_command_works_without_extras(installed, tmp_path):
    for words in (["--version"], ["--help"], ["devices"], ["doctor"]):
        done = command(installed, tmp_path, *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    told = " ".join(done.stdout.split())  # lines may be cut
    assert "not installed (it is optional: extra `nnx`)" in told


@pytest.mark.slow
@pytest.mark.parametrize("words", [["completion", "bash"], ["report", "."]])
def test_a_command_that_needs_an_extra_names_it(installed, tmp_path, words):
    (tmp_path / "run.json").write_text("{}")
    done = command(installed, tmp_path, *words)
    assert done.returncode == 1
    assert f"pip install 'jax-replicator[{words[0]}]'" in done.stderr
    assert done.stderr.count("\n") == 1
