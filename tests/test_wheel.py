"""The built wheel, alone in an empty environment, runs README and the page on `jit`."""

import email
import re
import subprocess
import sys
import venv
import zipfile

import pytest

from benchmarks.docs.pages import README, ROOT, blocks_of

_LOCK = "py311.txt" if sys.version_info < (3, 12) else "py312.txt"
_PAGES = README, ROOT / "docs" / "start" / "from_jit.md"
_PRELUDE = """
import warnings
warnings.simplefilter("error")
import importlib.util
for extra in ("flax", "grain", "tensorboardX", "matplotlib"):
    assert importlib.util.find_spec(extra) is None, extra
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
    pages = "cli/look/report_page", "launchpad_bridge/view/dashboard"
    assets = {f"replicator/{p}/page.{kind}" for p in pages for kind in ("css", "js")}
    assert assets <= set(names)
    assert "replicator/strategies/hardware.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheels_description_has_no_pictures_and_no_links_into_a_clone(wheel):
    with zipfile.ZipFile(wheel) as opened:
        [name] = [n for n in opened.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "## Ten lines" in text
    assert "![" not in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert not [each for each in targets if not each.startswith("https://")]


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
def test_the_wheel_runs_readme_and_the_page_on_jit_without_extras(installed, tmp_path):
    blocks = [block.code for page in _PAGES for block in blocks_of(page) if block.runs]
    assert len(blocks) >= 4
    script = tmp_path / "pages.py"
    script.write_text("\n".join([_PRELUDE, *blocks, "print('step', result.step)"]))
    done = subprocess.run(
        [installed / "python", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "step 200"
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
