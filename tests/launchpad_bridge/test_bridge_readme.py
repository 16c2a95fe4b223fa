"""What the README of the wing shows runs, and what it names is there."""

import re
from pathlib import Path

import replicator.launchpad_bridge as lp

README = Path(lp.__file__).with_name("README.md").read_text()


def test_its_first_program_runs_and_prints_what_an_actor_returned(capsys):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    numbers = eval(capsys.readouterr().out)
    assert len(numbers) == 10


def test_each_name_that_it_uses_exists():
    names = set(re.findall(r"\blp\.([A-Za-z_]+)", README))
    assert names <= set(lp.__all__) | {"md"}, names - set(lp.__all__)


def test_each_name_is_public_once():
    assert len(lp.__all__) == len(set(lp.__all__))
    assert all(hasattr(lp, name) for name in lp.__all__)
