"""`run`, `session` and `RunOptions` have the same options, types and defaults."""

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import replicator
from replicator import Replicator
from replicator.training.options import RunOptions

ROOT = Path(__file__).parents[1]
OF_METHOD = inspect.signature(Replicator.run)


def test_the_function_run_has_the_signature_of_the_method():
    parameters = list(OF_METHOD.parameters.values())[1:]
    assert inspect.signature(replicator.run) == OF_METHOD.replace(parameters=parameters)
    assert replicator.run.__doc__ == Replicator.run.__doc__


def keywords(function):
    return {
        name: (parameter.annotation, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


@pytest.mark.parametrize("function", [Replicator.session, RunOptions])
def test_all_take_the_keywords_of_run_with_their_types_and_defaults(function):
    assert keywords(function) == keywords(Replicator.run)


def test_an_unknown_keyword_is_refused_as_by_run():
    rep = Replicator(num_replicas=1, compilation_cache=False)
    with pytest.raises(TypeError, match="stepz"):
        rep.session(steps=3, stepz=3)


def test_options_of_a_run_are_behind_one_door():
    from_elsewhere = set(replicator.__all__) | set(replicator.checkpoint.__all__)
    assert not set(replicator.options.__all__) & from_elsewhere
    hints = typing.get_type_hints(RunOptions)
    kinds = {name for hint in hints.values() for name in re.findall(r"\w+", str(hint))}
    assert {"Every", "Follow", "Limits", "Retention", "Spikes"} <= kinds & set(
        replicator.options.__all__
    )


def test_a_run_of_a_subclass_may_take_other_arguments():
    class Own(Replicator):
        def run(self, *args, extra=0, **arguments):
            return super().run(*args, **arguments)

    rep = Own(num_replicas=1, compilation_cache=False)
    result = rep.run(
        lambda state, batch: (state + 1, {}),
        [np.zeros(4, np.float32)],
        init_fn=lambda key: jnp.zeros((), jnp.int32),
        steps=3,
        extra=1,
        display=False,
    )
    assert int(result.state) == 3


@pytest.mark.slow
def test_pyright_shows_one_signature_for_both(tmp_path):
    script = tmp_path / "shown.py"
    script.write_text(
        "import replicator\n"
        "reveal_type(replicator.run)\n"
        "reveal_type(replicator.Replicator().run)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    shown = re.findall(r'Type of ".*?" is "(.*)"', done.stdout)
    assert len(shown) == 2, done.stdout
    assert shown[0] == shown[1]
    for name in list(OF_METHOD.parameters)[1:]:
        assert f"{name}: " in shown[0]
