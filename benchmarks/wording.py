"""Count what makes a reader of the source stop: words, openings, names, missing help.

- `speech_words`: tell, say, word and hear in all their forms, in docstrings, comments
  and other strings, per 1,000 code lines; `_NOT_SPEECH` lists the exceptions;
- `relative_openings`: per cent of docstrings that open with What, Where, Who, How,
  Whether or Of;
- `shared_class_names`: public classes at the top of a file whose name has another home;
- `untyped_options`: look-ups of an option of a run by a string, in `replicator.py`,
  `training/` and the learner;
- `unexplained`: calls that make a lock, a condition, a thread, a selector or shared
  memory, where processes and threads meet (`_SHARED`), with no comment in the lines of
  the statement or right above it; `comments` is comment lines per code line there;
- `examples_functions`: per cent of public functions and methods whose docstring has an
  example (`>>>`); `examples_front`: of the public methods of `Replicator` and
  `Session`.
"""

import ast
import dataclasses
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_SPEECH = re.compile(
    r"\b(tell(s|ing)?|told|say(s|ing)?|said|word(s|ed|ing)?|hear(s|ing)?|heard)\b",
    re.IGNORECASE,
)
# Ten at most: an ordinary use, or a quoted message.
_NOT_SPEECH = re.compile(r"that is to say|32-bit words?|64-bit words?")
_RELATIVE = re.compile(r"(What|Where|Who|How|Whether|Of)\b")
_SHARED = ("rpc", "launchpad_bridge/launchers", "distributed/processes")
_MADE = re.compile(
    r"(threading\.)?(R?Lock|Condition|Thread|(Bounded)?Semaphore)\(|SharedMemory\("
    r"|mmap\.mmap\(|(selectors\.)?\w*Selector\("
)
_OPTIONS_READ = ("replicator.py", "training/", "launchpad_bridge/learner/")
_NO_METHOD = {"property", "functools.cached_property", "overload"}
_FRONT = {"replicator.py": "Replicator", "training/session.py": "Session"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Counts, and the places that were counted.

    Attributes:
      numbers: By key.
      places: By key: `file:line text` of each thing that was counted; of examples, the
        functions that have none.
    """

    numbers: Mapping[str, float]
    places: Mapping[str, list[str]]


def measure(package: Path, code_lines: Mapping[Path, int]) -> Found:
    """Count in all files.

    Args:
      package: Folder of the library.
      code_lines: Of each file.
    """
    places: dict[str, list[str]] = defaultdict(list)
    homes: dict[str, list[str]] = defaultdict(list)
    options = set(_fields(package / "training" / "options.py", "RunOptions"))
    count, shared_comments, shared_lines = Counter(), 0, 0
    for path in code_lines:
        name, text = path.relative_to(package).as_posix(), path.read_text()
        tree, comments = ast.parse(text), dict(_comments(path))
        documents = list(docstrings(tree))

        def add(key: str, line: int, what: str, name: str = name) -> None:
            places[key].append(f"{name}:{line} {what}")

        for line, words in _prose(tree, comments):
            for found in _SPEECH.finditer(_NOT_SPEECH.sub("", words)):
                add("speech_words", line, found.group())
        for document in documents:
            opening = str(document.value).strip().partition("\n")[0]
            if _RELATIVE.match(opening):
                add("relative_openings", document.lineno, opening)
        count["docstrings"] += len(documents)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(f"{name}:{node.lineno}")
        if name.startswith(_OPTIONS_READ):
            for line, option in _looked_up(tree, options):
                add("untyped_options", line, option)
        if name.startswith(_SHARED):
            shared_comments += len(comments)
            shared_lines += code_lines[path]
            for line, made in dict(_unexplained(tree, comments)).items():
                add("unexplained", line, made)
        for owner, function in _public_functions(tree):
            keys = ["examples_functions"]
            keys += ["examples_front"] if owner == _FRONT.get(name, "") != "" else []
            for key in keys:
                count[key] += 1
                if ">>>" not in (ast.get_docstring(function) or ""):
                    add(key, function.lineno, f"{owner}.{function.name}")
    for each, where in homes.items():
        if len(where) > 1:
            places["shared_class_names"].append(f"{each}: {', '.join(where)}")
    thousands = sum(code_lines.values()) / 1000
    numbers = {
        "speech_words": len(places["speech_words"]) / thousands,
        "relative_openings": _per_cent(
            places["relative_openings"], count["docstrings"]
        ),
        "shared_class_names": len(places["shared_class_names"]),
        "untyped_options": len(places["untyped_options"]),
        "unexplained": len(places["unexplained"]),
        "comments": shared_comments / shared_lines,
    }
    for key in ("examples_functions", "examples_front"):
        numbers[key] = 100 - _per_cent(places[key], count[key])
    rounded = {key: round(number, 3) for key, number in numbers.items()}
    return Found(numbers=rounded, places=places)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Find the docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[ast.Expr(ast.Constant(str()) as text), *_])
                | ast.ClassDef(body=[ast.Expr(ast.Constant(str()) as text), *_])
                | ast.FunctionDef(body=[ast.Expr(ast.Constant(str()) as text), *_])
                | ast.AsyncFunctionDef(body=[ast.Expr(ast.Constant(str()) as text), *_])
            ):
                yield text


def _per_cent(part: list[str], whole: int) -> float:
    return 100 * len(part) / whole


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _prose(tree: ast.Module, comments: Mapping[int, str]) -> Iterable[tuple[int, str]]:
    """Yield the line and text of each comment and string, docstrings among them."""
    yield from comments.items()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _fields(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    yield ast.unparse(field.target)


def _looked_up(tree: ast.Module, options: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Subscript(slice=ast.Constant(str(key)), ctx=ast.Load())
                | ast.Call(
                    func=ast.Attribute(attr="get" | "pop"),
                    args=[ast.Constant(str(key)), *_],
                )
            ) if key in options:
                yield node.lineno, ast.unparse(node)


def _unexplained(
    tree: ast.Module, comments: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _MADE.match(made := ast.unparse(node)):
            # The smallest statement around the call.
            first, last = max(
                (each.lineno, -(each.end_lineno or 0))
                for each in statements
                if each.lineno <= node.lineno <= (each.end_lineno or 0)
            )
            if not any(line in comments for line in range(first - 1, 1 - last)):
                yield first, made


def _public_functions(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    """Yield the functions and the methods of classes that a user may call."""
    for node in tree.body:
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, _Function) and not each.name.startswith("_"):
                kinds = {ast.unparse(kind) for kind in each.decorator_list}
                if not owner.startswith("_") and not kinds & _NO_METHOD:
                    yield owner, each
