import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from benchmarks.weights.__main__ import (
    KEPT,
    TOLERANCE,
    changed_files,
    logit_difference,
    read_model,
)
from experiments.language import layouts, pretrained
from models.transformer import Transformer
from replicator.errors import ArgumentError

KINDS = ["gpt2", "llama", "llama_grouped", "llama_scaled"]


def shapes_of(directory):
    arguments = pretrained.read_arguments(directory)
    return nnx.eval_shape(lambda: Transformer(**arguments, rngs=nnx.Rngs(0)))


@pytest.fixture
def folder(tmp_path):
    """Return a copy of a model's folder that a test may change."""
    return shutil.copytree(KEPT / "llama", tmp_path / "llama")


def changed(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_all_kinds_are_kept_in_a_small_folder():
    assert sorted(path.name for path in KEPT.iterdir()) == KINDS
    assert sum(path.stat().st_size for path in KEPT.rglob("*.*")) < 200_000


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind):
    assert logit_difference(KEPT / kind, read_model(KEPT / kind)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama_grouped"])  # the benchmark has all
def test_weights_are_written_with_the_bits_that_were_read(kind):
    assert not list(changed_files(KEPT / kind, read_model(KEPT / kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_describes_the_model_that_it_was_made_from(kind):
    model = shapes_of(KEPT / kind)
    again = layouts.arguments_of(layouts.config_of(model))
    assert pretrained.read_arguments(KEPT / kind).items() <= again.items()


def test_files_in_half_precision_are_read_in_single(folder):
    weights = load_file(folder / "model.safetensors")
    half = {name: np.asarray(jnp.bfloat16(each)) for name, each in weights.items()}
    save_file(half, folder / "model.safetensors")
    params = pretrained.read_params(folder, shapes_of(folder))
    expected = weights["model.norm.weight"].astype(jnp.bfloat16).astype(np.float32)

    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    np.testing.assert_array_equal(params["norm"]["scale"], expected)


def test_names_may_lack_the_prefix_and_masks_may_be_there(tmp_path):
    shutil.copytree(KEPT / "gpt2", tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): each for name, each in weights.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    save_file(bare, tmp_path / "model.safetensors")
    params = pretrained.read_params(tmp_path, shapes_of(tmp_path))

    np.testing.assert_array_equal(params["positions"], bare["wpe.weight"])


def test_weights_of_another_model_are_refused_by_their_names(folder):
    weights = load_file(folder / "model.safetensors")
    weights["other"] = weights.pop("model.norm.weight")
    weights["lm_head.weight"] = np.zeros((40, 8), np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ArgumentError) as error:
        pretrained.read_params(folder, shapes_of(folder))
    assert str(error.value).startswith(
        "`--init_from` must hold the weights of its config.json, got others in "
    )
    for problem in (
        "`model.norm.weight` is missing",
        "`other` is unknown",
        "`lm_head.weight` has shape [40, 8], not [40, 16]",
    ):
        assert problem in str(error.value)


def test_of_many_problems_three_are_listed(folder):
    changed(folder, intermediate_size=32)
    with pytest.raises(ArgumentError, match=r"not \[32, 16\],.* and 3 more\. Use"):
        pretrained.read_params(folder, shapes_of(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bert"}, '`model_type` "llama" or "gpt2", got "bert"'),
        ({"hidden_act": "relu"}, '`hidden_act` "silu", got "relu"'),
        ({"head_dim": 8}, "`head_dim` null or 4, got 8"),
        ({"attention_bias": True}, "`attention_bias` false, got true"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            '`rope_type` "default" or "llama3", got "yarn"',
        ),
    ],
    ids=str,
)
def test_a_model_of_another_kind_is_refused_by_its_setting(folder, settings, message):
    changed(folder, **settings)
    with pytest.raises(ArgumentError) as error:
        pretrained.read_arguments(folder)
    assert message in str(error.value)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model_type": "llama"}'])
def test_a_folder_without_a_whole_configuration_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"^`(--init_from|config.json)` must"):
        pretrained.read_arguments(tmp_path)


def test_a_set_with_a_file_missing_is_refused(tmp_path):
    shutil.copytree(KEPT / "llama_grouped", tmp_path, dirs_exist_ok=True)
    last = max(tmp_path.glob("model-*"))
    last.unlink()
    with pytest.raises(ArgumentError, match=f"without {last.name}. Copy all"):
        pretrained.read_params(tmp_path, shapes_of(tmp_path))


def test_a_folder_that_holds_files_is_not_written_over(folder):
    before = (folder / "config.json").read_bytes()
    with pytest.raises(
        ArgumentError, match=r"`--export` must be a folder that is empty"
    ):
        pretrained.write_model(read_model(folder), folder)
    assert (folder / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "options", [{}, {"norm": "layer", "mlp": "swiglu"}, {"bias": True}], ids=str
)
def test_a_model_that_no_layout_holds_is_refused(options):
    sizes = {"vocabulary": 8, "layers": 1, "width": 8, "heads": 2, "context": 4}
    model = nnx.eval_shape(lambda: Transformer(**sizes, **options, rngs=nnx.Rngs(0)))
    with pytest.raises(ArgumentError, match=r"`model` must be of the layout of Llama"):
        layouts.layout_of(model)
