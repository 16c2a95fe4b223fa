"""Make the models that are kept beside this file, and their logits, by `transformers`.

It was run once, in an environment of its own: our decoder is not imported.

    python -m venv reference
    reference/bin/pip install transformers==5.18.0 torch==2.14.1
    reference/bin/python benchmarks/weights/make_kept.py

Each folder of `kept` holds a small random model as `save_pretrained` writes it, and
`values.safetensors`: tokens [batch, time] and their logits [batch, time, vocabulary].
"""

import shutil
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

KEPT = Path(__file__).parent / "kept"
_VOCABULARY, _CONTEXT = 40, 32
_LLAMA = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": _CONTEXT,
    "attn_implementation": "eager",
}
# Of four pairs of features the first keeps its speed, the second is between.
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": _CONTEXT,
}
_GPT2 = {
    "vocab_size": _VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": _CONTEXT,
    "attn_implementation": "eager",
}


def models() -> dict:
    """Return a model of each kind, by its name."""
    wide = _LLAMA | {"hidden_size": 32, "num_key_value_heads": 2}
    scaled = {"rope_theta": 500.0, "rope_scaling": _SCALING}
    scaled |= {"max_position_embeddings": 2 * _CONTEXT}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**_LLAMA)),
        "llama_grouped": LlamaForCausalLM(
            LlamaConfig(**_LLAMA, num_key_value_heads=2, tie_word_embeddings=True)
        ),
        "llama_scaled": LlamaForCausalLM(LlamaConfig(**wide | scaled)),
        "gpt2": GPT2LMHeadModel(GPT2Config(**_GPT2)),
    }


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(KEPT, ignore_errors=True)
    for name, model in models().items():
        folder = KEPT / name
        # As they are made, biases are 0, norms are 1, and logits hardly differ.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
        tokens = torch.randint(_VOCABULARY, (2, 24))
        with torch.no_grad():
            logits = model.eval()(tokens).logits
        # One of them in several files, with an index.
        largest = "8KB" if name == "llama_grouped" else "5GB"
        model.save_pretrained(folder, max_shard_size=largest)
        (folder / "generation_config.json").unlink(missing_ok=True)
        values = {"tokens": tokens.int(), "logits": logits.contiguous()}
        save_file(values, folder / "values.safetensors")


if __name__ == "__main__":
    main()
