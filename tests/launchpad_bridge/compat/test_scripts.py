"""A script runs under the drop-in as it does under Python."""

import pytest

from tests.launchpad_bridge.compat.scripts import run

PROGRAM = """
import sys
import launchpad as lp

class Adder:
    def add(self, a, b):
        return a + b

class Caller:
    def __init__(self, adder):
        self._adder = adder

    def run(self):
        print("sum", self._adder.add(1, 2))
        lp.stop()

def make_program():
    program = lp.Program("sum")
    adder = program.add_node(lp.CourierNode(Adder), label="adder")
    program.add_node(lp.CourierNode(Caller, adder), label="caller")
    return program
"""


def test_a_program_that_nobody_waits_for_runs_to_its_end(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(f"{PROGRAM}\nlp.launch(make_program())\nprint('launched')")
    status, out = run([script], folder=tmp_path)
    assert status == 0, out
    assert "launched" in out
    assert "sum 3" in out


LEARNING = """
import threading
from absl import app
import courier
import launchpad as lp
import numpy as np
from launchpad.nodes.dereference import Deferred
from launchpad.nodes.python.local_multi_processing import PythonProcess

class Parameters:
    def __init__(self, size):
        self._values = np.zeros(size)
        self._lock = threading.Lock()

    def set_courier_server(self, server):
        self._server = server

    def get(self, names=()):
        return {"values": self._values}

    def push(self, gradient):
        with self._lock:
            self._values = self._values - gradient

    def run(self):
        self._server.Start()
        lp.wait_for_stop()
        self._server.Stop()
        self._server.Join()

class Actor:
    def __init__(self, parameters, steps, environment):
        self._parameters = parameters["server"]
        self._steps = steps
        assert isinstance(self._parameters, (lp.CourierClient, courier.Client))
        assert environment == [1, 2]

    def run(self):
        for _ in range(self._steps):
            self._parameters.push(np.ones(3))

class Judge:
    def __init__(self, cached, counter):
        self._cached, self._counter = cached, counter

    def run(self):
        while self._cached.get()["values"][0] > -6:
            assert not lp.wait_for_stop(0.01)
        print("learned", self._counter.futures.get().result()["values"])
        lp.stop()

def main(argv):
    program = lp.Program("learning")
    parameters = program.add_node(
        lp.CourierNode(Parameters, 3, courier_kwargs={"thread_pool_size": 4}),
        label="parameters")
    cached = program.add_node(
        lp.CacherNode(parameters, refresh_interval_ms=10, stale_after_ms=1000),
        label="cacher")
    with program.group("actors"):
        nodes = [
            lp.PyClassNode(Actor, {"server": parameters}, 3, Deferred(list, (1, 2)))
            for _ in range(2)]
        program.add_node(lp.MultiThreadingColocation(nodes))
    program.add_node(lp.CourierNode(Judge, cached, counter=parameters), label="judge")
    controller = lp.launch(
        program, terminal="current_terminal",
        local_resources={"parameters": PythonProcess(env={"CUDA_VISIBLE_DEVICES": ""})})
    controller.wait()

if __name__ == "__main__":
    app.run(main)
"""


@pytest.mark.parametrize(
    "kind", ["local_mt", pytest.param("local_mp", marks=pytest.mark.slow)]
)
def test_a_parameter_server_with_a_cacher_and_colocated_actors(tmp_path, kind):
    script = tmp_path / "learning.py"
    script.write_text(LEARNING)
    status, out = run([script, f"--lp_launch_type={kind}"], folder=tmp_path)
    assert status == 0, out
    assert "learned [-6. -6. -6.]" in out


OFFERING = """
import threading
import courier
import launchpad as lp
import numpy as np

class Learner:
    def __init__(self, judge=None):
        self._judge = judge
        self.made = lambda x: x + 1
        self._handler = lp.batched_handler(batch_size=1, pad_batch=True)(np.negative)
        self._hidden = lambda: 1

    @property
    def handler(self):
        return self._handler

    @property
    def count(self):
        return 7

    def get_variables(self, names):
        return [np.ones(2) for _ in names]

class Runner:
    def __init__(self, wrapped):
        self._wrapped = wrapped

    def run(self):
        lp.wait_for_stop()

    def __dir__(self):
        return dir(self._wrapped)

    def __getattr__(self, name):
        return getattr(self._wrapped, name)

class Judge:
    def __init__(self, learner):
        self._learner = learner

    def run(self):
        learner = self._learner
        print("offered", courier.list_methods(learner))
        print("told", learner.get_variables(["a", "b"])[1], learner.made(1))
        print("batched", learner.handler(np.arange(2)))
        lp.stop()

def make_learner(**kwargs):
    return Runner(Learner(**kwargs))

program = lp.Program("offering")
learner = lp.CourierNode(make_learner)
judge = lp.CourierNode(Judge, learner.create_handle())
learner._kwargs["judge"] = judge.create_handle()
program.add_node(learner, label="learner")
program.add_node(judge, label="judge")
lp.launch(program).wait()
"""


@pytest.mark.parametrize(
    "kind", ["local_mt", pytest.param("local_mp", marks=pytest.mark.slow)]
)
def test_what_launchpad_would_offer_of_an_object_is_offered(tmp_path, kind):
    script = tmp_path / "offering.py"
    script.write_text(OFFERING)
    status, out = run([script, f"--lp_launch_type={kind}"], folder=tmp_path)
    assert status == 0, out
    assert "offered ['get_variables', 'handler', 'made', 'run']" in out
    assert "told [1. 1.] 2" in out
    assert "batched [ 0 -1]" in out


SENDING = """
import dataclasses, enum
import launchpad as lp
import numpy as np
import neighbour

class Kind(enum.Enum):
    FIRST = 1

@dataclasses.dataclass
class Step:
    kind: Kind
    observation: np.ndarray

class Learner:
    def push(self, step, transition):
        assert type(step) is Step and step.kind is Kind.FIRST
        return neighbour.Transition(step.observation, transition.reward + 1)

class Actor:
    def __init__(self, learner):
        self._learner = learner

    def run(self):
        step = Step(Kind.FIRST, np.arange(2))
        found = self._learner.push(step, neighbour.Transition(1.0, 2))
        print("pushed", type(found).__name__, found.observation, found.reward)
        lp.stop()

program = lp.Program("sending")
learner = program.add_node(lp.CourierNode(Learner), label="learner")
program.add_node(lp.CourierNode(Actor, learner), label="actor")
lp.launch(program).wait()
"""


@pytest.mark.parametrize(
    "kind", ["local_mt", pytest.param("local_mp", marks=pytest.mark.slow)]
)
def test_data_classes_of_the_program_travel(tmp_path, kind):
    script = tmp_path / "sending.py"
    script.write_text(SENDING)
    (tmp_path / "neighbour.py").write_text(
        "import collections\n"
        "Transition = collections.namedtuple('Transition', 'observation reward')\n"
    )
    status, out = run([script, f"--lp_launch_type={kind}"], folder=tmp_path)
    assert status == 0, out
    assert "pushed Transition [0 1] 3" in out


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return what a script prints beside a neighbour and a copy of Launchpad."""
    above = tmp_path_factory.mktemp("above")
    folder = above / "inner"
    (folder / "launchpad").mkdir(parents=True)
    (folder / "launchpad" / "__init__.py").write_text("raise ImportError('upstream')")
    (folder / "neighbour.py").write_text("import launchpad\nNAME = launchpad.__name__")
    (folder / "script.py").write_text(
        "import sys, neighbour, launchpad\n"
        "import __main__\n"
        "print(__name__, __main__.__file__ == __file__, sys.argv, neighbour.NAME)\n"
        "print(launchpad.Program)\n"
    )
    status, out = run(["inner/script.py", "--a", "b"], folder=above)
    assert status == 0, out
    return out


def test_a_script_finds_its_name_its_arguments_and_its_neighbours(told):
    assert "__main__ True ['inner/script.py', '--a', 'b'] launchpad" in told


def test_a_copy_of_launchpad_beside_the_script_is_not_taken(told):
    assert "replicator.launchpad_bridge.program.Program" in told


@pytest.mark.slow
def test_a_module_runs_with_its_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("WORD = 'word'")
    (package / "__main__.py").write_text(
        "import launchpad, sys\nfrom . import WORD\nprint(__name__, WORD, sys.argv[1:])"
    )
    status, out = run(["-m", "package", "x"], folder=tmp_path)
    assert status == 0, out
    assert "__main__ word ['x']" in out


def test_a_node_that_fails_fails_the_script_and_is_named(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(
        f"{PROGRAM}\nprogram = lp.Program('p')\n"
        "program.add_node(lp.PyNode(int, 'x'), label='bad')\nlp.launch(program)"
    )
    status, out = run([script], folder=tmp_path)
    assert status == 1
    assert "`bad` raised ValueError: invalid literal" in out


@pytest.mark.slow
def test_a_script_that_ends_with_a_status_has_it(tmp_path):
    script = tmp_path / "status.py"
    script.write_text("import sys\nsys.exit(7)")
    assert run([script], folder=tmp_path)[0] == 7


@pytest.mark.slow
def test_what_is_no_script_is_refused_by_name(tmp_path):
    status, out = run(["nothing.py"], folder=tmp_path)
    assert status == 1
    assert "`path` must be a script that can be read, got 'nothing.py'" in out
    status, out = run(["-m", "nothing.at_all"], folder=tmp_path)
    assert status == 1
    assert "`name` must be a module that can be run, got 'nothing.at_all'" in out


@pytest.mark.slow
def test_the_command_says_how_it_is_used(tmp_path):
    status, out = run([], folder=tmp_path)
    assert status == 2
    assert "--lp_launch_type=TYPE" in out
    assert run(["--help"], folder=tmp_path) == (0, out)
