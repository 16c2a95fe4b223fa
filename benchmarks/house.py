"""Measure the library's source: its plan, its size, its words, its examples.

Prints where each of the last three is met, if `--show=KEY` asks for it, and one JSON
object:

- `root_modules`, `largest_folder`: Python files, in the latter without `__init__`;
- `circles`: modules that import themselves by way of others;
- `code_lines`: lines that bear a token of code: no docstrings, comments or empty lines;
  `core_lines` are those outside of `rpc`, `launchpad_bridge` and `compat`;
- the other keys are counted by the rules of `benchmarks/wording.py`.
"""

import ast
import json
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import app, flags

from benchmarks import wording

PACKAGE = Path(__file__).parents[1] / "replicator"
_NOT_CORE = frozenset({"rpc", "launchpad_bridge", "compat"})
_NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
        *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
    }
)
_SHOW = flags.DEFINE_string("show", None, "A key of `wording`: list its places.")


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def code_lines(path: Path) -> int:
    """Count lines that bear code."""
    documented: set[int] = set()
    for text in wording.docstrings(ast.parse(path.read_text())):
        documented.update(range(text.lineno, (text.end_lineno or 0) + 1))
    found: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in _NO_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Name the modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name in modules)
            case ast.ImportFrom(module=str(module), names=names):
                for each in names:
                    inner = f"{module}.{each.name}"
                    found = inner if inner in modules else module
                    if found in modules:
                        yield found


def circles(graph: Mapping[str, set[str]]) -> int:
    """Count modules that import themselves by way of others."""

    def reaches_itself(start: str) -> bool:
        seen: set[str] = set()
        waiting = list(graph[start] - {start})
        while waiting:
            module = waiting.pop()
            if module == start:
                return True
            if module not in seen:
                seen.add(module)
                waiting.extend(graph[module])
        return False

    return sum(map(reaches_itself, graph))


def main(_: list[str]) -> None:
    """Print the numbers as one JSON object."""
    modules = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    graph = {name: set(imports(path, modules)) for name, path in modules.items()}
    folders = {path.parent for path in modules.values()}
    sizes = {
        folder: sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        for folder in folders
    }
    lines = {path: code_lines(path) for path in modules.values()}
    core = {
        path for path in lines if path.relative_to(PACKAGE).parts[0] not in _NOT_CORE
    }
    found = wording.measure(PACKAGE, lines)
    if _SHOW.value:
        print("\n".join(found.places[_SHOW.value]))
    print(
        json.dumps(
            {
                "root_modules": sum(1 for _ in PACKAGE.glob("*.py")),
                "largest_folder": max(sizes.values()),
                "circles": circles(graph),
                "code_lines": sum(lines.values()),
                "core_lines": sum(lines[path] for path in core),
                **found.numbers,
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
