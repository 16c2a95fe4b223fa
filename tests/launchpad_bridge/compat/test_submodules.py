"""The names that programs import from Launchpad's modules."""

import ast

import pytest

from replicator.launchpad_bridge.compat.submodules import MODULES, PACKAGES
from tests.launchpad_bridge.compat.scripts import run
from tests.launchpad_bridge.compat.wheel import fetched, sources

# How upstream launches, and shows, and stops: not what a program asks for.
INSIDES = [
    "launchpad.launch.run_locally",
    "launchpad.launch.xm_docker",
    "launchpad.launch.local_multi_processing.commands",
    "launchpad.lazy_loader",
    "launchpad.nodes.python.addressing",
    "launchpad.nodes.python.flags_utils",
    "launchpad.nodes.python.process_entry",
]
LEFT_OUT = {
    "launchpad.context": {"set_context"},
    "launchpad.launch.serialization": {"serialize_functions"},
    "launchpad.launch.signal_handling": {
        *("register_exit_handler", "tty_write"),
        "register_exit_handler_and_exit_gracefully_on_sigint",
    },
    "launchpad.launch.worker_manager": {
        *("ThreadWorker", "WorkerManager", "get_worker_manager"),
    },
    "launchpad.nodes.courier.courier_utils": {"make_courier_server"},
    "launchpad.nodes.python.local_multi_processing": {
        *("StrOrFloat", "to_multiprocessing_executables"),
    },
    "launchpad.nodes.python.xm_docker": {"initializer", "to_docker_executables"},
    "launchpad.nodes.reverb.node": {"PriorityTablesFactory", "CheckpointerFactory"},
    "courier.python.client": {"translate_status", "exception_handler"},
}
# Launching modules hold one function and what they need themselves.
ONLY_LAUNCH = "launch.launch"


def public_names(text):
    """Return the classes and functions of a file, and its constants."""
    names = set()
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign) and isinstance(
            statement.targets[0], ast.Name
        ):
            names.add(statement.targets[0].id)
    is_type = {"T", "FLAGS", "HandleType", "ClientType", "ReturnType", "WorkerType"}
    return {name for name in names if not name.startswith("_")} - is_type


def modules_of(wheel):
    for path, text in sources(wheel).items():
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        is_inside = any(name == n or name.startswith(f"{n}.") for n in INSIDES)
        is_library = not path.endswith("_test.py") and ".examples" not in name
        if is_library and not is_inside:
            yield name, text


@pytest.mark.slow
def test_each_public_name_of_each_module_of_the_wheel_is_there(request):
    missing = []
    for module, text in modules_of(fetched(request.config.cache)):
        wanted = public_names(text) - LEFT_OUT.get(module, set())
        if module.endswith(".launch") and module != "launchpad.launch.launch":
            above, _, _ = module.rpartition(".")
            found = {"launch"} if "launch" in MODULES.get(above, {}) else set()
            wanted &= {"launch"}
        else:
            found = {**MODULES, **PACKAGES}.get(module, {}).keys()
        missing += [f"{module}.{name}" for name in wanted - {*found, "tf"}]
    assert not missing


@pytest.mark.slow
def test_each_name_that_the_package_itself_imports_is_there(request):
    text = dict(modules_of(fetched(request.config.cache)))["launchpad"]
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported - PACKAGES["launchpad"].keys() == {"lazy_loader"}


DEEP = """
import functools, os, signal
import cloudpickle
import launchpad as lp
import courier
import launchpad.launch.worker_manager
from courier.python.client import Client, StatusNotOk
from launchpad import context
from launchpad.launch.test_multi_threading import address_builder
from launchpad.nodes import base, dereference
from launchpad.nodes.cacher.node import CacherNode
from launchpad.nodes.courier import node as lp_courier
from launchpad.nodes.python import local_multi_processing
from launchpad.nodes.python.local_multi_processing import PythonProcess
from launchpad.nodes.python import xm_docker
from launchpad.program_stopper import program_stopper
from pybind11_abseil.status import StatusNotOk as Status
from replicator.errors import RpcError

assert Status is RpcError is StatusNotOk
assert lp.context.LaunchType is context.LaunchType is lp.LaunchType
assert lp_courier.CourierNode is lp.CourierNode
assert lp.nodes.python.local_multi_processing is local_multi_processing
assert callable(lp.launch)
assert lp.launch.worker_manager.wait_for_stop is lp.wait_for_stop
assert courier.Client is Client
for name in "test_multi_threading test_multi_processing".split():
    launch = getattr(lp.launch, name).launch
    assert launch.worker_manager.wait_for_stop is lp.wait_for_stop
    launch = getattr(lp.launch, name.replace("test", "local")).launch
    assert launch.worker_manager.wait_for_stop is lp.wait_for_stop
lp.launch.serialization.enable_lru_cache_pickling_once()
cached = functools.lru_cache(lambda: [])
one, other = cloudpickle.loads(cloudpickle.dumps([cached, cached]))
assert one is other and one() is one()
lp.launch.signal_handling.exit_gracefully_on_sigquit()
try:
    os.kill(os.getpid(), signal.SIGQUIT)
except SystemExit as end:
    assert end.code == 0
try:
    lp.nodes.python.node.Nonsense
except AttributeError as error:
    print(error)
try:
    import launchpad.nonsense
except ModuleNotFoundError as error:
    print(error)
"""


def test_programs_import_from_deep_inside(tmp_path):
    script = tmp_path / "deep.py"
    script.write_text(DEEP)
    status, out = run([script], folder=tmp_path)
    assert status == 0, out
    assert "`launchpad.nodes.python.node` has no `Nonsense` here" in out
    assert "No module named 'launchpad.nonsense'" in out
