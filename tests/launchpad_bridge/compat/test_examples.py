"""The example programs, as they are in Launchpad's wheel, on threads and processes.

None of them needs TensorFlow; `hello_world`, `program_wait` and `batching` need absl,
`batching` NumPy besides; `consumer_producers` lies in two files. What Launchpad needed
TensorFlow for, its courier, is not asked for. `launch_vertex_ai.py` needs Google's.
"""

import re

import pytest

from tests.launchpad_bridge.compat.scripts import run
from tests.launchpad_bridge.compat.wheel import fetched, sources

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def examples(request, tmp_path_factory):
    """Return a folder with `launchpad/examples`, and nothing else of Launchpad."""
    folder = tmp_path_factory.mktemp("wheel")
    for name, text in sources(fetched(request.config.cache)).items():
        if name.startswith("launchpad/examples/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


@pytest.fixture(params=["local_mt", "local_mp"])
def launch(request, examples, tmp_path):
    def launch(name, *flags):
        words = [examples / "launchpad" / "examples" / name, *flags]
        flag = f"--lp_launch_type={request.param}"
        status, out = run([*words, flag], folder=tmp_path, path=[examples])
        assert status == 0, out
        return out

    return launch


def test_hello_world(launch):
    assert launch("hello_world/launch.py").count("Hello World!!!") == 1


def test_consumer_producers(launch):
    out = launch("consumer_producers/launch.py", "--num_producers=3")
    assert out.count("Results: [0, 1, 2]") == 10


def test_program_wait(launch):
    out = launch("program_wait/launch.py")
    nodes = ["_sleep", "_wait_for_stop", "_stop_event", "_register_stop_handler"]
    for node in nodes:
        assert f"Clean termination of {node} node" in out
    assert out.index("Clean termination") < out.index("Program finished.")


def test_batching(launch):
    out = launch("batching/launch.py")
    found = re.findall(r"Result: \[ *(\d+) +(\d+)\]", out)
    # The sums of both clients' numbers, of each batch of two; each is told to both.
    last = ("100", "120")
    assert found.count(last) == 2
    assert len(found) == 20


def test_what_needs_google_is_refused_by_name(examples, tmp_path):
    script = examples / "launchpad/examples/consumer_producers/launch_vertex_ai.py"
    status, out = run([script], folder=tmp_path, path=[examples])
    assert status == 1
    assert "without Google's services, got 'vertex_ai'" in out
    assert "Use 'ray' for a cluster" in out


def test_a_module_runs_as_with_python(examples, tmp_path):
    module = "launchpad.examples.consumer_producers.launch"
    status, out = run(["-m", module], folder=examples)
    assert status == 0, out
    assert out.count("Results: [0, 1]") == 10


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("launchpad/examples/consumer_producers/launch_test.py", 1),
        ("launchpad/nodes/courier/node_test.py", 3),
        ("launchpad/program_test.py", 9),
    ],
)
def test_tests_of_launchpad_itself_pass(request, examples, tmp_path, name, count):
    script = tmp_path / "upstream_test.py"
    script.write_text(sources(fetched(request.config.cache))[name])
    status, out = run([script], folder=tmp_path, path=[examples])
    assert status == 0, out
    assert re.search(rf"Ran {count} tests? in .*\n\nOK", out)
