"""The house stands: imports go down, no circles, thin rooms, one path to each name."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import replicator

ROOT = Path(__file__).parents[1]

# docs/design.md, from the ground up. A folder may import from its own floor and from
# those below.
FLOORS = [
    "errors exit_codes",
    "base",
    "collectives rpc strategies writers",
    "distributed monitoring",
    "inputs checkpoint hooks",
    "engine nnx",
    "tuning controller",
    "training",
    "options replicator launchpad_bridge testing",
    "cli compat",
    "__init__ __main__",
]
FLOOR_OF = {
    room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()
}
ROOT_MODULES = {"__init__", "__main__", "errors", "exit_codes", "options", "replicator"}
LARGEST_FOLDER = 14
# The two objects that users call: each is one idea, and half of it says what for. `run`
# and `session` write out the options of a run, so that editors and checkers see them.
LARGEST_FILE = {
    "replicator/replicator.py": 678,
    "replicator/training/session.py": 467,
}
# Within a floor: these may not know each other's business.
FORBIDDEN = [
    ("replicator.collectives", "replicator.inputs"),
    ("replicator.inputs", "replicator.collectives"),
    # What these would need of a process or a clock, their callers hand them.
    ("replicator.engine", "replicator.distributed"),
    ("replicator.engine", "replicator.monitoring"),
    ("replicator.engine", "replicator.nnx"),
    ("replicator.controller", "replicator.training"),
    ("replicator.training", "replicator.controller"),
    ("replicator.nnx", "replicator.distributed"),
    ("replicator.nnx", "replicator.monitoring"),
    ("replicator.rpc.client", "replicator.rpc.server"),
    ("replicator.rpc.server", "replicator.rpc.client"),
    ("replicator.rpc.codec", "replicator.rpc.transports"),
    ("replicator.rpc.codec", "replicator.rpc.security"),
    ("replicator.rpc.transports", "replicator.rpc.client"),
    ("replicator.rpc.transports", "replicator.rpc.server"),
    ("models", "replicator.replicator"),
    ("replicator", "models"),
    ("replicator", "experiments"),
    ("replicator", "benchmarks"),
    ("models", "experiments"),
]
HEAVY = {
    "cloudpickle": {
        "replicator/launchpad_bridge/recipes.py",
        "replicator/distributed/child.py",
    },
    "ray": {
        "replicator/launchpad_bridge/launchers/on_ray/ray_cluster.py",
        "replicator/launchpad_bridge/launchers/on_ray/ray_session.py",
    },
    "cryptography": {"replicator/rpc/security/certificates.py"},
    "grpc": {"replicator/rpc/transports/between_hosts/grpc_stream.py"},
    "grpc_health": {"replicator/rpc/transports/between_hosts/grpc_stream.py"},
    "flax": {
        "replicator/nnx/batch_norm.py",
        "replicator/nnx/parameters.py",
        "replicator/nnx/spectral_norm.py",
    },
    "tensorstore": {
        "replicator/checkpoint/pieces/arrays.py",
        "replicator/checkpoint/buckets/bucket.py",
        "replicator/checkpoint/pieces/format1.py",
    },
    "rich": {"replicator/monitoring/display.py", "replicator/cli/tables.py"},
    "shtab": {"replicator/cli/completion.py"},
    "tensorboardX": {"replicator/writers/tensorboard.py"},
    "wandb": {"replicator/writers/weights_and_biases.py"},
    "yaml": {
        "replicator/strategies/cluster_file.py",
        "replicator/strategies/text.py",
    },
}
SOURCES = sorted(
    path
    for folder in ("replicator", "models", "experiments", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "replicator")]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes(path):
    """List all nodes of a file's syntax tree; the module is the first."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path):
    """List the modules that a file imports, anywhere in it."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / inner.replace(".", "/")).with_suffix(".py").exists()
                is_package = (ROOT / inner.replace(".", "/")).is_dir()
                found.add(inner if is_module or is_package else node.module)
    return found


def room(module):
    """Name the room of a module: the file or folder right under `replicator`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def relative(path):
    return str(path.relative_to(ROOT))


def is_within(module, package):
    return module == package or module.startswith(package + ".")


def test_imports_go_down_only():
    assert not [
        f"{relative(path)} imports {module}, above it"
        for path in PACKAGE
        for module in imports(path)
        if is_within(module, "replicator") and module != "replicator"
        if FLOOR_OF[room(module)] > FLOOR_OF[room(module_name(path))]
    ]


def test_no_other_module_lies_in_the_root():
    assert {path.stem for path in (ROOT / "replicator").glob("*.py")} == ROOT_MODULES


def test_a_folder_is_small_and_begins_with_its_sentence():
    for folder in sorted({path.parent for path in PACKAGE}):
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert len(modules) <= LARGEST_FOLDER, relative(folder)
        assert ast.get_docstring(nodes(folder / "__init__.py")[0]), relative(folder)


def test_rooms_that_must_not_know_each_other_do_not():
    assert not [
        f"{relative(path)} imports {module}"
        for path in SOURCES
        for importer, imported in FORBIDDEN
        if is_within(module_name(path), importer)
        for module in imports(path)
        if is_within(module, imported)
    ]


def test_no_module_imports_itself_by_way_of_others():
    graph = {module_name(path): imports(path) for path in SOURCES}
    done = set()

    def visit(module, above):
        assert module not in above, f"circle: {' -> '.join([*above, module])}"
        if module not in done:
            for child in graph.get(module, ()):
                # A package's `__init__` re-exports its files; inside, files are named.
                if child in graph and child != module:
                    visit(child, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def names(node):
    """List the names that a node uses or imports."""
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    return [getattr(node, "attr", None), getattr(node, "id", None)]


def test_only_an_engine_spreads_a_function_over_devices():
    assert not [
        f"{relative(path)} must use a layout"
        for path in PACKAGE
        if room(module_name(path)) not in ("engine", "compat")
        and any("shard_map" in names(node) for node in nodes(path))
    ]


# Where the size of a mesh is meant: how many devices there are, in all processes.
COUNTS_DEVICES = {
    "replicator/base/mesh.py",
    "replicator/engine/program_cost.py",
    "replicator/engine/replicated.py",  # the one layout that gives each a replica
}


def test_the_size_of_a_mesh_is_no_number_of_replicas():
    sizes = [
        (relative(path), ast.unparse(node.value))
        for path in PACKAGE
        if relative(path) not in COUNTS_DEVICES and room(module_name(path)) != "compat"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "size"
    ]
    assert not [
        each for each in sizes if "mesh" in each[1] and "devices" not in each[1]
    ]


@pytest.mark.parametrize(("package", "allowed"), HEAVY.items())
def test_a_heavy_package_is_imported_in_the_one_file_about_it(package, allowed):
    importers = {
        relative(path)
        for path in PACKAGE
        if any(is_within(module, package) for module in imports(path))
    }
    assert importers <= allowed


# To a full disk, a closed pipe or nothing at all: what it writes is lost and counted.
FAILS_NOBODY = "replicator/base/host/standard_streams.py"


def test_nothing_is_printed_that_would_fail_where_it_cannot_be_written():
    assert not [
        f"{relative(path)}:{node.lineno} must print by {FAILS_NOBODY}"
        for path in PACKAGE
        if relative(path) != FAILS_NOBODY
        for node in nodes(path)
        if isinstance(node, ast.Call) and may_fail(node, room(module_name(path)))
    ]


def may_fail(call, where):
    """Tell whether a call writes to an output of the process as it is."""
    text = ast.unparse(call)
    # A command runs with its own output lent to it.
    prints = where != "cli" and text.startswith("print(") and "file=" not in text
    return prints or re.match(r"os\.write\((1|2|_STD)|sys\.std\w+\.(wr|fl)", text)


def test_files_stay_small():
    lengths = {relative(path): path.read_text().count("\n") for path in SOURCES}
    # Past 400 lines a file holds two ideas.
    assert not {
        path: lines
        for path, lines in lengths.items()
        if lines > LARGEST_FILE.get(path, 400)
    }


def test_functions_stay_small():
    assert not [
        f"{relative(path)}: {node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - first_line(node) > 60
    ]


def first_line(function):
    """Return the line of a function after which its body begins."""
    docstring = ast.get_docstring(function)
    return function.body[0].end_lineno if docstring else function.lineno


def test_no_file_bears_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "core", "misc"}
    assert not empty & {path.stem for path in SOURCES}
    in_root = {path.stem for path in (ROOT / "replicator").glob("*.py")}
    assert not in_root & sys.stdlib_module_names


def test_each_public_name_has_one_home_and_a_docstring():
    homes = {}
    for name in replicator.__all__:
        value = getattr(replicator, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name
            assert id(value) not in homes, f"{name} is also {homes.get(id(value))}"
            homes[id(value)] = name


def test_each_public_module_can_be_imported_from():
    modules = {
        name: value
        for name in replicator.__all__
        if inspect.ismodule(value := getattr(replicator, name))
    }
    assert len(modules) >= 9
    for name, module in modules.items():
        assert importlib.import_module(f"replicator.{name}") is module


def test_each_public_name_opens_where_no_other_was_used_before():
    # One module: to look a name up loads what it needs, and the next finds that.
    code = (
        "import sys, replicator\n"
        "known = set(sys.modules)\n"
        "for name in replicator.__all__:\n"
        "    getattr(replicator, name)\n"
        "    for module in set(sys.modules) - known:\n"
        "        if module.startswith('replicator'):\n"
        "            del sys.modules[module]\n"
        "    vars(replicator).pop(name, None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_subpackages_do_not_offer_a_second_path_to_a_top_level_name():
    for package in ("checkpoint", "errors", "hooks", "testing", "writers"):
        module = importlib.import_module(f"replicator.{package}")
        offered = set(getattr(module, "__all__", ()))
        assert not offered & set(replicator.__all__)


def test_public_functions_are_annotated():
    for name in replicator.__all__:
        value = getattr(replicator, name)
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, name


def test_types_are_checked_in_all_that_is_not_a_test():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and any(path.rglob("*.py"))
    }
    made = {"build", "dist", "runs"}
    assert set(settings["tool"]["pyright"]["include"]) == folders - {"tests"} - made


def test_importing_starts_no_backend_no_thread_and_no_heavy_package():
    code = """
import sys, threading, replicator
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend started"
assert threading.active_count() == 1, threading.enumerate()
heavy = {"flax", "rich", "tensorboardX", "wandb", "grain", "torch", "tensorflow"}
heavy |= {"matplotlib"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
