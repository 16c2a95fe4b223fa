"""Write the pages of the reference that follow from code: names, options, the command.

    python -m benchmarks.docs.reference

`docs/reference/api/` lists the public names for Sphinx, which shows their docstrings;
`options.md` has the fields of `RunOptions`, `command.md` the arguments of the command.
"""

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType

from benchmarks.docs.pages import ROOT
from benchmarks.docs.returned import returned
from replicator.cli.main import make_parser
from replicator.options import RunOptions

FOLDER = ROOT / "docs" / "reference"
_BRIDGE = "replicator.launchpad_bridge"
MODULES = (
    "replicator",
    *(f"replicator.{name}" for name in ("options", "hooks", "writers", "checkpoint")),
    *(f"replicator.{name}" for name in ("strategies", "nnx", "distributed")),
    *("replicator.controller", "replicator.testing", "replicator.testing.faults"),
    *(_BRIDGE, f"{_BRIDGE}.acting", f"{_BRIDGE}.context", "replicator.rpc"),
    *("replicator.compat", "replicator.compat.jax", "replicator.compat.jax_utils"),
    *("replicator.errors", "replicator.exit_codes"),
)
"""The public modules, in the order of the reference."""

_OF_REPLICATOR = {
    "Around a step": (
        "Replicator run choose Session CompiledStep Evaluation fake_devices devices_of"
    ),
    "Inside a step": (
        "all_reduce all_gather reduce_scatter broadcast all_to_all permute map_gather "
        "map_reduce assume_replicated replica_id num_replicas replica_key example_keys "
        "example_places step_number num_microbatches is_last_microbatch"
    ),
    "Gradients and optimizers": (
        "value_and_grad global_loss LocalSum wrap_optimizer OptimizerState scale_loss "
        "DynamicLossScale ema"
    ),
    "Metrics and state": "Mean Sum Max Min Concat PerReplica",
    "Input": "InputContext InputOptions",
}
_GROUPS = {  # of options, by the first of each in `RunOptions`
    "steps": "The run",
    "accumulate": "The step",
    "inputs": "Around the step",
    "checkpoint_dir": "Checkpoints",
    "eval_fn": "Evaluation",
    "directory": "Records",
    "on_nonfinite": "Bad numbers",
    "check_replicas_every": "Flipped bits",
}
_STEP = {"checks", "check_first_updates", "debug"}


def names_of(module: ModuleType) -> list[str]:
    """List the public names of a module: `__all__`, or what is defined in it."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", module.__name__) == module.__name__
        and not isinstance(value, ModuleType)
    ]


def first_line(documented: object) -> str:
    """Return the first line of a docstring, "" for none."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page of public names."""
    rows = []
    for name in MODULES:
        module = module_of(name)
        rows.append(f"| [`{name}`](api/{name}.md) | {first_line(module)} |")
        yield f"api/{name}.md", _module_page(name, module)
    yield "api/objects.md", _objects_page()
    rows.append("| [Objects of calls](api/objects.md) | Returned, not imported. |")
    listed = [f"api/{name}" for name in (*MODULES, "objects")]
    yield "api.md", "\n".join([*_NAMES, *rows, *_TOCTREE, *listed, "```", ""])


_NAMES = (
    *("# Names", "", "Every public name, by the module that it is imported from."),
    *("", "| module | |", "|---|---|"),
)
_TOCTREE = ("", "```{toctree}", ":hidden:", "")
_OBJECTS = """\
# Objects of calls

Classes that calls return, or hand to your code. A program uses their attributes and
methods, and imports none of them.

| class | |
|---|---|"""


def _objects_page() -> str:
    modules = {name: module_of(name) for name in MODULES}
    found = returned(
        {
            f"{name}.{each}": getattr(module, each)
            for name, module in modules.items()
            for each in names_of(module)
        }
    )
    rows = [f"| `{kind.__name__}` | {_summary(kind)} |" for kind in found]
    entries = [
        f".. autoclass:: {kind.__module__}.{kind.__qualname__}\n   :members:\n"
        for kind in found
    ]
    return "\n".join([_OBJECTS, *rows, "", "```{eval-rst}", *entries, "```", ""])


def module_of(name: str) -> ModuleType:
    """Return a module by its public name, which may be another than its own."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, alias = name.rpartition(".")
        return getattr(importlib.import_module(parent), alias)


def _module_page(name: str, module: ModuleType) -> str:
    lines = [f"# {name}", ""]
    directive = "automodule" if name == module.__name__ else "py:module"
    lines += ["```{eval-rst}", f".. {directive}:: {name}", "```", ""]
    names = [each for each in names_of(module) if each != "__version__"]
    values = {each: getattr(module, each) for each in names}
    modules = [each for each, value in values.items() if isinstance(value, ModuleType)]
    if modules:
        links = [_module_link(f"{name}.{each}") for each in modules]
        lines += [f"Modules: {', '.join(links)}.", ""]
        others = [each for each in modules if f"{name}.{each}" not in MODULES]
        lines += ["```{eval-rst}"] if others else []
        lines += [f".. py:module:: {name}.{each}" for each in others]
        lines += ["```", ""] if others else []
    own = {each: value for each, value in values.items() if each not in modules}
    for heading, listed in _sections(name, own).items():
        lines += [f"## {heading}", ""] if heading else []
        lines += ["| name | |", "|---|---|"]
        lines += [f"| `{each}` | {_summary(own[each])} |" for each in listed]
        lines += ["", "```{eval-rst}"]
        for each in listed:
            lines += _directive(f"{name}.{each}", own[each])
        lines += ["```", ""]
    return "\n".join(lines)


def _sections(module: str, own: Mapping[str, object]) -> dict[str, list[str]]:
    if module != "replicator":
        return {"": sorted(own, key=str.lower)}
    sections = {heading: names.split() for heading, names in _OF_REPLICATOR.items()}
    kinds = {name: kind for name, kind in own.items() if inspect.isclass(kind)}
    sections["Warnings"] = [
        name for name, kind in kinds.items() if issubclass(kind, Warning)
    ]
    listed = {each for names in sections.values() for each in names}
    if listed != set(own):
        raise ValueError(
            "`_OF_REPLICATOR` must list each public name once, got another set: "
            f"{sorted(listed ^ set(own))}. Put them under a heading."
        )
    return sections


def _module_link(name: str) -> str:
    return f"[`{name}`]({name}.md)" if name in MODULES else f"`{name}`"


def _summary(value: object) -> str:
    # Docstrings of JAX differ between its versions.
    is_ours = getattr(value, "__module__", "").startswith("replicator")
    is_documented = inspect.isclass(value) or inspect.isroutine(value)
    return first_line(value).replace("|", r"\|") if is_ours and is_documented else ""


def _directive(name: str, value: object) -> list[str]:
    if not inspect.isclass(value):
        return [f".. auto{'function' if callable(value) else 'data'}:: {name}", ""]
    kind = "exception" if issubclass(value, BaseException) else "class"
    # Sphinx knows a class by its own name, too, and takes one entry of it.
    is_second = homes()[value] != name
    options = ["   :members:", *(["   :no-index:"] if is_second else [])]
    return [f".. auto{kind}:: {name}", *options, ""]


@functools.cache
def homes() -> dict[type, str]:
    """Return the public name under which each class has its entry: an error's first."""
    found: dict[type, str] = {}
    for name in sorted(MODULES, key=lambda name: name != "replicator.errors"):
        module = module_of(name)
        for each in names_of(module):
            if inspect.isclass(value := getattr(module, each)):
                found.setdefault(value, f"{name}.{each}")
    return found


def options_page() -> str:
    """Return the page of a run's options."""
    texts = _attributes(inspect.getdoc(RunOptions) or "")
    [declared] = ast.parse(inspect.getsource(RunOptions).lstrip()).body
    assert isinstance(declared, ast.ClassDef)  # it is what the source defines
    types = {
        each.target.id: ast.unparse(each.annotation)
        for each in declared.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    defaults = {each.name: each.default for each in dataclasses.fields(RunOptions)}
    lines = ["# Options of a run", "", _OPTIONS]
    for heading, options in option_groups().items():
        lines += ["", f"## {heading}", "", "| option | type | default | |"]
        lines.append("|---|---|---|---|")
        for name in options:
            is_required = defaults[name] is dataclasses.MISSING
            default = "required" if is_required else f"`{defaults[name]!r}`"
            meaning = texts[name].removeprefix(f"{heading}: ")
            kind = types[name].replace("|", r"\|")
            meaning = meaning[0].upper() + meaning[1:]
            lines.append(f"| `{name}` | `{kind}` | {default} | {meaning} |")
    return "\n".join([*lines, ""])


def option_groups() -> dict[str, list[str]]:
    """Return the names of a run's options by their groups."""
    groups: dict[str, list[str]] = {heading: [] for heading in _GROUPS.values()}
    heading = ""
    for field in dataclasses.fields(RunOptions):
        heading = _GROUPS.get(field.name, heading)
        groups["The step" if field.name in _STEP else heading].append(field.name)
    return groups


_OPTIONS = """\
Keywords of `rep.run` and `rep.session`, and fields of `replicator.options.RunOptions`,
which is all of them as one object: `rep.session_by` takes it.
`lp.ReplicatedLearnerNode` takes those that a learner shares with a run."""


def _attributes(docstring: str) -> dict[str, str]:
    """Return the texts under `Attributes:` of a docstring, each in one line."""
    section = docstring.partition("Attributes:\n")[2]
    parts = re.split(r"(?m)^  (\w+): ", section)[1:]
    return {
        name: " ".join(text.split())
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def command_page() -> str:
    """Return the page of the command `replicator`."""
    [commands] = (
        a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    lines = ["# The command", "", _COMMAND, "", "| command | |", "|---|---|"]
    lines += [
        f"| [`replicator {name}`](#replicator-{name}) | {parser.description} |"
        for name, parser in commands.choices.items()
    ]
    for name, parser in commands.choices.items():
        lines += ["", f"## replicator {name}", "", *_command(parser)]
    return "\n".join([*lines, _FROM_PYTHON])


_COMMAND = """\
`replicator COMMAND`, or `python -m replicator COMMAND`. Each command takes `--help`,
and `--traceback`, which shows the whole traceback of an error and not one line. Exit
codes: that of the command; 2 for bad input, 130 after Ctrl-C, 1 for any other error.
Those of a run and of `replicator launch` are
[here](../guides/reliability.md#exit-codes)."""


_FROM_PYTHON = """
## From Python

```{eval-rst}
.. autofunction:: replicator.cli.main.main
```
"""


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.description or ""
    actions = [a for a in parser._actions if a.dest not in ("help", "traceback")]
    if actions:
        yield from ("", "| argument | |", "|---|---|")
    for action in actions:
        defaults = {**vars(action), "prog": parser.prog}
        meaning = (action.help or "") % defaults
        if action.choices is not None:
            meaning += f" ({', '.join(map(str, action.choices))})"
        if action.required and action.option_strings:
            meaning += "; required"
        yield f"| {_spelled(action)} | {meaning.strip().replace('|', chr(92) + '|')} |"
    if parser.epilog:
        yield from ("", "```text", parser.epilog.strip(), "```")


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def pages() -> dict[str, str]:
    """Return all pages by their paths in `docs/reference`."""
    made = {"options.md": options_page(), "command.md": command_page()}
    return {**dict(api_pages()), **made}


def main() -> None:
    """Write all pages."""
    for name, text in pages().items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
