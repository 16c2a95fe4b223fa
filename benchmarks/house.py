"""Measure the plan of the library: its root, its folders, its circles, its size.

Code lines bear a token of code: no docstrings, comments or empty lines.
"""

import ast
import json
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import app

PACKAGE = Path(__file__).parents[1] / "replicator"
_NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
        *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def code_lines(path: Path) -> int:
    """Count lines that bear code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.Module(body=[ast.Expr(ast.Constant(str())) as text, *_])
                | ast.ClassDef(body=[ast.Expr(ast.Constant(str())) as text, *_])
                | ast.FunctionDef(body=[ast.Expr(ast.Constant(str())) as text, *_])
                | ast.AsyncFunctionDef(body=[ast.Expr(ast.Constant(str())) as text, *_])
            ):
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
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(imports(path, modules)) for name, path in modules.items()}
    folders = {path.parent for path in modules.values()}
    sizes = {
        folder: sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        for folder in folders
    }
    print(
        json.dumps(
            {
                "root_modules": sum(1 for _ in PACKAGE.glob("*.py")),
                "largest_folder": max(sizes.values()),
                "circles": circles(graph),
                "code_lines": sum(map(code_lines, modules.values())),
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
