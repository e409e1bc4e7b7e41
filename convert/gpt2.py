"""Our parameter names and layouts, and those of GPT-2 in Hugging Face's transformers.

Legend: h hidden, n heads, d head size, f MLP width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from einops import rearrange

from trimegatron.config import Config
from trimegatron.errors import CheckpointError

TOP = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "final_layernorm.weight": "transformer.ln_f.weight",
    "final_layernorm.bias": "transformer.ln_f.bias",
}
LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
"""Module of a layer → its name in GPT-2."""

LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def to_gpt2(
    parameters: Iterable[tuple[str, torch.Tensor]], *, num_layers: int, num_attention_heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """GPT-2's name and tensor for each of ours; every one of ours once, every one of GPT-2's once.

    GPT-2 keeps its matrices transposed (Conv1D: [in, out]) and its queries, keys and values as [3, n, d] where ours
    are [n, 3, d]. The head is tied to the embedding, so it is not among them.

    Raises:
        CheckpointError: a parameter that GPT-2 has no place for, or one that is missing.
    """
    expected = set(TOP.values()) | {
        f"transformer.h.{layer}.{module}.{kind}"
        for layer in range(num_layers)
        for module in LAYER.values()
        for kind in ("weight", "bias")
    }
    for name, tensor in parameters:
        target = gpt2_name(name)
        if target not in expected:
            raise CheckpointError(f"GPT-2 with {num_layers} layers has no place for the parameter {name}")
        expected.remove(target)
        if ".attn.c_attn." in target:
            tensor = rearrange(tensor, "(n three d) ... -> (three n d) ...", n=num_attention_heads, three=3)
        if target.startswith("transformer.h.") and tensor.dim() == 2:
            tensor = tensor.t()
        yield target, tensor.contiguous()
    if expected:
        raise CheckpointError(f"the checkpoint lacks what becomes {', '.join(sorted(expected)[:5])}")


def gpt2_name(name: str) -> str | None:
    """GPT-2's name for one of ours, or None."""
    if name in TOP:
        return TOP[name]
    match = LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in LAYER:
        return None
    return f"transformer.h.{match[1]}.{LAYER[match[2]]}.{match[3]}"


def gpt2_config(config: Config, *, eod: int | None, dtype: str) -> dict[str, Any]:
    """``config.json``: everything from the run, nothing assumed.

    Raises:
        CheckpointError: the architecture is not one that GPT-2's code can express.
    """
    model = config.model
    if model.num_attention_heads * model.kv_channels != model.hidden_size:
        raise CheckpointError(
            f"kv_channels ({model.kv_channels}) × num_attention_heads ({model.num_attention_heads}) must be "
            f"hidden_size ({model.hidden_size}) for GPT-2 in transformers, which knows no other head size"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": "gelu_new" if model.bias_gelu_fusion else "gelu",
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "dtype": dtype,
    }
