"""Every call that a page or a docstring shows fits what it calls."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import replicator
import replicator.hooks
import replicator.launchpad_bridge
import replicator.nnx
import replicator.strategies
import replicator.testing
from replicator import rpc
from replicator.training.session import Session

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "docs/**/", "replicator/**/")
PAGES = [page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md")]
SOURCES = sorted((ROOT / "replicator").rglob("*.py"))
HOMES = [
    replicator,
    replicator.options,
    replicator.hooks,
    replicator.strategies,
    replicator.testing,
    replicator.launchpad_bridge,
    replicator.nnx,
    rpc,
]
ROOTS = {
    "replicator": replicator,
    "options": replicator.options,
    "hooks": replicator.hooks,
    "strategies": replicator.strategies,
    "lp": replicator.launchpad_bridge,
    "rpc": rpc,
    "rep": replicator.Replicator,
    "session": Session,
}


def parsed(code):
    try:
        return [ast.parse(code)]
    except SyntaxError:
        return []


def shown_in(text):
    """Yield what a page or a module shows: in blocks, in examples, within lines."""
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        yield from parsed(block)
    for example in re.findall(r"((?: *(?:>>>|\.\.\.) .*\n)+)", text):
        yield from parsed(re.sub(r"(?m)^ *(>>>|\.\.\.) ", "", example))
    for code in re.findall(r"`([^`\n]*\([^`\n]*)`", text):
        yield from parsed(code)


def called(function):
    """Return what a call may name; nothing for what is not the library's."""
    names = ast.unparse(function).split(".")
    if len(names) == 1:
        found = [vars(home).get(names[0]) for home in HOMES]
        return [each for each in found if callable(each)]
    found = ROOTS.get(names[0])
    for name in names[1:]:
        found = getattr(found, name, None)
    return [found] if callable(found) else []


def fits(call, target):
    of_one = ast.unparse(call.func).startswith(("rep.", "session."))
    given = [None] * (len(call.args) + (of_one and inspect.isfunction(target)))
    try:
        inspect.signature(target).bind_partial(
            *given, **{each.arg: None for each in call.keywords}
        )
    except TypeError:
        return False
    return True


def is_whole(call):
    """Tell whether all of a call is shown: no `...`, no `*args`."""
    given = [*call.args, *(each.value for each in call.keywords)]
    parts = any(isinstance(x, ast.Starred) or ast.unparse(x) == "..." for x in given)
    return not parts and all(each.arg for each in call.keywords)


@pytest.mark.parametrize("files", [PAGES, SOURCES], ids=["pages", "sources"])
def test_each_call_that_is_shown_can_be_made(files):
    calls = [
        (file.name, node)
        for file in files
        for tree in shown_in(file.read_text())
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node.func) and is_whole(node)
    ]
    assert len(calls) > 50
    assert not [
        (name, ast.unparse(call))
        for name, call in calls
        if not any(fits(call, target) for target in called(call.func))
    ]
