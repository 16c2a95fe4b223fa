"""The layouts of Llama and GPT-2 in files: names, shapes and `config.json`.

Each tensor of a file is a part of one of our parameters, its axes in another order, so
one table serves reading and writing. Ours are stacked over layers, and hold queries,
keys and values in one array.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.rotary import Rotary
from models.transformer import Transformer
from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.nnx import params_of

Index = tuple[int | slice, ...]
_ALL = slice(None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The part of a parameter that a tensor of a file holds.

    Attributes:
      path: Of the parameter, as `params_of` names it.
      index: Of the part.
      axes: Order of the part's axes in the tensor.
      joined: Number of these that the tensor's first axis joins; others are its second.
    """

    path: str
    index: Index = ()
    axes: tuple[int, ...]
    joined: int

    def take(self, params: PyTree) -> np.ndarray:
        """Return the tensor."""
        part = self._of(params)
        sides = part.shape[: self.joined], part.shape[self.joined :]
        return part.reshape([math.prod(side) for side in sides if side])

    def put(self, params: PyTree, tensor: np.ndarray) -> None:
        """Write the tensor into NumPy arrays."""
        part = self._of(params)
        part[...] = tensor.reshape(part.shape)

    def _of(self, params: PyTree) -> np.ndarray:
        for name in self.path.split("/"):
            params = params[name]
        return params[self.index].transpose(self.axes)


def _part(path: str, *axes: int, joined: int = 1, index: Index = ()) -> Part:
    return Part(path=path, index=index, axes=axes, joined=joined)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of tensors and settings, and what they are of our network.

    Attributes:
      name: `model_type` of the configuration.
      architecture: Name of the class that reads it.
      layer: Prefix of the tensors of a layer, with its number.
      of_layer: By the rest of their names; their index is within a layer.
      others: By their names. Those of tables that a model lacks are left out.
      kind: Arguments of `Transformer` that all networks of this layout have.
      sizes: Settings by the argument that they give.
      fixed: Settings that must have these values.
    """

    name: str
    architecture: str
    layer: str
    of_layer: Mapping[str, Part]
    others: Mapping[str, Part]
    kind: Mapping[str, Any]
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]

    def parts(self, model: Transformer) -> Iterator[tuple[str, Part]]:
        """Yield the name of each tensor, and its part."""
        params = params_of(model)
        for name, part in self.others.items():
            if part.path.split("/")[0] in params:
                yield name, part
        for number in range(model.layers):
            for name, part in self.of_layer.items():
                index = (number, *part.index)
                whole = self.layer.format(number) + name
                yield whole, dataclasses.replace(part, index=index)


LLAMA = Layout(
    name="llama",
    architecture="LlamaForCausalLM",
    layer="model.layers.{}.",
    of_layer={
        "input_layernorm.weight": _part("blocks/attention_norm/scale", 0),
        "self_attn.q_proj.weight": _part(
            "blocks/qkv/kernel", 2, 1, 3, 0, joined=3, index=(_ALL, slice(-2))
        ),
        "self_attn.k_proj.weight": _part(
            "blocks/qkv/kernel", 1, 2, 0, joined=2, index=(_ALL, -2)
        ),
        "self_attn.v_proj.weight": _part(
            "blocks/qkv/kernel", 1, 2, 0, joined=2, index=(_ALL, -1)
        ),
        "self_attn.o_proj.weight": _part("blocks/out/kernel", 2, 0, 1),
        "post_attention_layernorm.weight": _part("blocks/mlp_norm/scale", 0),
        "mlp.gate_proj.weight": _part("blocks/up_gate/kernel", 1, 0),
        "mlp.up_proj.weight": _part("blocks/up/kernel", 1, 0),
        "mlp.down_proj.weight": _part("blocks/down/kernel", 1, 0),
    },
    others={
        "model.embed_tokens.weight": _part("embed/embedding", 0, 1),
        "model.norm.weight": _part("norm/scale", 0),
        "lm_head.weight": _part("head/embedding", 0, 1),
    },
    kind={"mlp": "swiglu", "norm": "rms"},
    sizes={
        "vocabulary": "vocab_size",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "mlp_width": "intermediate_size",
        "context": "max_position_embeddings",
        "norm_epsilon": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
GPT2 = Layout(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    layer="transformer.h.{}.",
    of_layer={
        "ln_1.weight": _part("blocks/attention_norm/scale", 0),
        "ln_1.bias": _part("blocks/attention_norm/bias", 0),
        "attn.c_attn.weight": _part("blocks/qkv/kernel", 0, 1, 2, 3),
        "attn.c_attn.bias": _part("blocks/qkv/bias", 0, 1, 2, joined=3),
        "attn.c_proj.weight": _part("blocks/out/kernel", 0, 1, 2, joined=2),
        "attn.c_proj.bias": _part("blocks/out/bias", 0),
        "ln_2.weight": _part("blocks/mlp_norm/scale", 0),
        "ln_2.bias": _part("blocks/mlp_norm/bias", 0),
        "mlp.c_fc.weight": _part("blocks/up/kernel", 0, 1),
        "mlp.c_fc.bias": _part("blocks/up/bias", 0),
        "mlp.c_proj.weight": _part("blocks/down/kernel", 0, 1),
        "mlp.c_proj.bias": _part("blocks/down/bias", 0),
    },
    others={
        "transformer.wte.weight": _part("embed/embedding", 0, 1),
        "transformer.wpe.weight": _part("positions", 0, 1),
        "transformer.ln_f.weight": _part("norm/scale", 0),
        "transformer.ln_f.bias": _part("norm/bias", 0),
    },
    kind={"mlp": "gelu", "norm": "layer", "bias": True, "positions": "learned"},
    sizes={
        "vocabulary": "vocab_size",
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "mlp_width": "n_inner",
        "context": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
)
_LAYOUTS = {layout.name: layout for layout in (LLAMA, GPT2)}
KINDS = {name: layout.kind for name, layout in _LAYOUTS.items()}
"""By layout the arguments of `Transformer` that its networks have."""

CUT = ("vocabulary", "kv_heads", "mlp_width")
"""Sizes that `TENSOR_PARALLEL` cuts."""

_OPTIONAL = ("kv_heads", "mlp_width")  # their defaults are those of `Transformer`
# Of other settings that a file may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}


def layout_of(model: Transformer) -> Layout:
    """Return the layout that holds a model.

    Raises:
      ArgumentError: None does.
    """
    own = set(_paths(params_of(model)))
    for layout, norm in ((LLAMA, nnx.RMSNorm), (GPT2, nnx.LayerNorm)):
        paths = {part.path for _, part in layout.parts(model)}
        sizes = sizes_of(model)
        shared = sizes["heads"] != sizes["kv_heads"] and "kv_heads" not in layout.sizes
        if own == paths and isinstance(model.norm, norm) and not shared:
            return layout
    raise ArgumentError(
        "`model` must be of the layout of Llama (rms norms, swiglu, rotary positions) "
        "or GPT-2 (layer norms, gelu, biases, learned positions, tied), got another. "
        "Make it with these arguments of `Transformer`."
    )


def sizes_of(model: Transformer) -> dict[str, Any]:
    """Return the arguments of `Transformer` that give a model its sizes."""
    params = params_of(model)
    vocabulary, width = params["embed"]["embedding"].shape
    kv_heads, size = params["blocks"]["qkv"]["kernel"].shape[-2:]
    return {
        "vocabulary": vocabulary,
        "layers": model.layers,
        "width": width,
        "heads": width // size,
        "kv_heads": kv_heads,
        "mlp_width": params["blocks"]["up"]["kernel"].shape[-1],
        "context": model.context,
        "norm_epsilon": model.norm.epsilon,
        "tied": model.head is None,
    }


def config_of(model: Transformer, *, end: int | None = None) -> dict[str, Any]:
    """Return the `config.json` of a model; `end` is the token at the end of a text."""
    layout, sizes, rotary = layout_of(model), sizes_of(model), model.blocks.rotary
    found = {
        "architectures": [layout.architecture],
        "model_type": layout.name,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
        **{key: sizes[name] for name, key in layout.sizes.items()},
        **layout.fixed,
    }
    if rotary is None:
        return found
    scaling = {_SCALING[name]: getattr(rotary, name) for name in _SCALING}
    scaled = {"rope_type": "llama3", **scaling} if rotary.factor != 1 else None
    return found | {"rope_theta": rotary.base, "rope_scaling": scaled}


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Transformer` that a `config.json` describes.

    Raises:
      ArgumentError: It is of another layout, or of a kind that is not known.
      KeyError: It lacks a size.
    """
    layout = _LAYOUTS[_checked(config, "model_type", *_LAYOUTS)]
    given = {key: value for key, value in config.items() if value is not None}
    known = {**_DEFAULTS, **layout.fixed, **given}
    for key, value in layout.fixed.items():
        _checked(known, key, value)
    found = {
        name: known[key]
        for name, key in layout.sizes.items()
        if key in known or name not in _OPTIONAL
    }
    if layout is LLAMA:
        _checked(known, "head_dim", None, found["width"] // found["heads"])
        found["positions"] = _rotary(known)
    return {**found, **layout.kind}


_SCALING = {
    "factor": "factor",
    "slow": "low_freq_factor",
    "fast": "high_freq_factor",
    "context": "original_max_position_embeddings",
}
"""Settings of scaled speeds by the field of `Rotary` that they give."""


def _rotary(config: Mapping[str, Any]) -> Rotary:
    # Of `transformers` 4, and of 5.
    rope = {"rope_theta": config["rope_theta"], **config.get("rope_scaling", {})}
    rope |= config.get("rope_parameters", {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if _checked({"rope_type": kind}, "rope_type", "default", "llama3") == "default":
        return Rotary(base=rope["rope_theta"])
    scaling = {name: rope[key] for name, key in _SCALING.items()}
    return Rotary(base=rope["rope_theta"], **scaling)


def _checked(config: Mapping[str, Any], key: str, *known: Any) -> Any:
    if (value := config.get(key)) not in known:
        raise ArgumentError(
            f"`config.json` must have `{key}` {' or '.join(map(json.dumps, known))}, "
            f"got {json.dumps(value)}. Use a model of the layout of Llama or GPT-2."
        )
    return value


def _paths(params: PyTree) -> Iterator[str]:
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        yield "/".join(key.key for key in path)
