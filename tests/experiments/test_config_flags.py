"""One table over all experiments: what flags refuse, and that `--help` lists them."""

import dataclasses
import importlib
import re
import typing
from typing import Literal

import pytest
from absl import flags

from experiments import config_flags
from experiments.config_flags import Amount, Count, Settings, check_shares
from replicator.errors import ArgumentError
from tests.experiments.command import EXPERIMENTS, command

# An integer below the least of each rule, and floats that keep none.
BELOW = {"at least 1": 0, "at least 0": -1}
NO_NUMBERS = [float("nan"), float("inf"), -1e-3]


def config_of(name):
    return importlib.import_module(f"experiments.{name}").Config


def numbers_of(config):
    """Yield the field, the type and the rule, None if it has none, of each number."""
    kinds = typing.get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        kind, *rule = typing.get_args(kinds[field.name]) or [kinds[field.name]]
        if kind in (int, float):
            yield field, kind, rule[0] if rule else None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_number_of_an_experiment_has_a_rule_and_is_refused_by_name(name):
    config = config_of(name)
    for field, kind, rule in numbers_of(config):
        assert rule is not None, f"{name}: --{field.name} takes any number"
        wrong = [BELOW[rule.text]] if kind is int else NO_NUMBERS
        for value in wrong:
            with pytest.raises(ArgumentError, match=f"^`--{field.name}` must be "):
                config(**{field.name: value})


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_defaults_keep_their_rules_and_free_flags_are_flags(name):
    module = importlib.import_module(f"experiments.{name}")
    names = {field.name for field in dataclasses.fields(module.Config())}
    assert names >= getattr(module, "FREE", set())


def test_a_word_that_is_none_of_the_choices_is_refused_by_name():
    with pytest.raises(ArgumentError, match="`--stats` must be one of all, replica, g"):
        config_of("biggan")(stats="some")


def test_a_number_of_another_kind_is_refused_by_name():
    with pytest.raises(ArgumentError, match="`--steps` must be a whole number"):
        config_of("biggan")(steps=2.5)


def test_what_does_not_divide_is_refused_with_what_does():
    with pytest.raises(ArgumentError, match=r"over 8 replicas, got 30\. Use 24"):
        check_shares("global_batch", 30, 8, "replicas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried(Settings):
    """Flags of no experiment.

    Attributes:
      tried_count: A number.
      tried_amount: Another,
        in two lines.
      tried_word: A word.
    """

    tried_count: Count = 1
    tried_amount: Amount = 0.5
    tried_word: Literal["a", "b"] = "a"


def test_flags_are_those_of_the_module_that_defines_them():
    try:
        config_flags.define(Tried)
        own = flags.FLAGS.get_key_flags_for_module(__name__)
        assert {flag.name: flag.help for flag in own} == {
            "tried_count": "A number.",
            "tried_amount": "Another, in two lines.",
            "tried_word": "<a|b>: A word.",
        }
    finally:
        for field in dataclasses.fields(Tried):
            delattr(flags.FLAGS, field.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_lists_the_flags_of_an_experiment(name):
    shown = command(name, "--help", devices=1).stdout
    listed = set(re.findall(r"--(?:\[no\])?(\w+):", shown))
    assert {field.name for field in dataclasses.fields(config_of(name))} <= listed


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag",
    [
        "biggan --latent=0",
        "biggan --strategy=fsdp",
        "biggan --accumulate=3",
        "char_lm --minutes=nan",
        "char_lm --strategy=fsdp",
        "digits_resnet --strategy=tensor_parallel",
        "impala_atari --actors=0",
        "impala_catch --scale=program --actors=3",
        "sngan_study --shared=3",
        "unmodified --steps=0",
        "unmodified --fake_devices=1",
    ],
)
def test_bad_input_is_refused_by_name_before_there_is_a_folder(flag, tmp_path):
    name, *arguments = flag.split()
    folder = tmp_path / "run"
    if name != "unmodified":
        arguments.append(f"--directory={folder}")
    done = command(name, *arguments, devices=1)
    wrong = {"accumulate": "global_batch", "actors": r"(actors|environments)"}
    about = re.search(r"--(\w+)=", flag.split("--scale=program")[-1])[1]
    assert done.returncode != 0
    assert re.search(f"`(--)?{wrong.get(about, about)}` must", done.stderr), done.stderr
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unmodified", "programs.word_count"])
def test_what_is_no_flag_is_refused(name):
    done = command(name, "launch_type=ray", devices=2)
    assert done.returncode != 0
    assert "Flags begin with `--`, got launch_type=ray." in done.stderr
