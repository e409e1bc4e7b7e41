"""Our parameter names and layouts, and those of GPT-2 in Hugging Face's transformers.

Legend: h hidden, n heads, d head size, f MLP width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from einops import rearrange

from trimegatron.config import Config, DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig
from trimegatron.convert.ledger import check_shapes, match
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.lazy import LazyTensor, is_equal, rearranged
from trimegatron.model.build import global_shapes

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
CONSTANT = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
"""A causal mask, which is no weight."""
ACTIVATIONS = {"gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True, "gelu": False}
"""GPT-2's activations that we have: whether it is the tanh form."""
REQUIRED = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
"""What a ``config.json`` may say of these; what it does not say is this."""


def to_gpt2(
    parameters: Mapping[str, LazyTensor], *, num_layers: int, num_attention_heads: int
) -> dict[str, LazyTensor]:
    """GPT-2's tensors from ours: every one of ours once, every one of GPT-2's once.

    GPT-2 keeps its matrices transposed (Conv1D: [in, out]) and its queries, keys and values as [3, n, d] where ours
    are [n, 3, d]. The head is tied to the embedding, so it is not among them.

    Raises:
        CheckpointError: a parameter that GPT-2 has no place for, or one that is missing.
    """
    targets = [gpt2_name(name) for name in our_names(num_layers)]
    found = match(parameters, gpt2_name, targets, where=f"GPT-2 with {num_layers} layers")
    return {target: _to_gpt2(target, found[target], num_attention_heads) for target in targets}


def our_names(num_layers: int) -> list[str]:
    """The parameters of a model of ours, in GPT-2's order."""
    layers = [
        f"layers.{layer}.{module}.{kind}"
        for layer in range(num_layers)
        for module in LAYER
        for kind in ("weight", "bias")
    ]
    return [*list(TOP)[:2], *layers, *list(TOP)[2:]]


def _to_gpt2(target: str, tensor: LazyTensor, heads: int) -> LazyTensor:
    if ".attn.c_attn." in target:
        from_ours = "h (three n d) -> n three d h" if len(tensor.shape) == 2 else "(three n d) -> n three d"
        return rearranged(tensor, tensor.shape[::-1], partial(rearrange, pattern=from_ours, three=3, n=heads))
    if target.startswith("transformer.h.") and len(tensor.shape) == 2:
        return rearranged(tensor, tensor.shape[::-1], torch.t)
    return tensor


def from_gpt2(tensors: Mapping[str, LazyTensor], config: Config, *, where: object) -> dict[str, LazyTensor]:
    """Our parameters from GPT-2's tensors, the inverse of :func:`to_gpt2`.

    The causal masks that older versions stored (``attn.bias``, ``attn.masked_bias``) are constants and are left out;
    a stored head must be the word embedding.

    Raises:
        CheckpointError: a tensor that is none of GPT-2's, one that is missing or of another size, or a head of its own.
    """
    named = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in tensors.items()
        if not CONSTANT.fullmatch(name)
    }
    head = named.pop("lm_head.weight", None)
    shapes = global_shapes(config)
    ours = {gpt2_name(name): name for name in shapes}
    found = match(named, ours.get, shapes, where=where)
    check_shapes(
        {name: tensor.shape for name, tensor in found.items()},
        {name: _gpt2_shape(name, shape) for name, shape in shapes.items()},
        where=where,
    )
    if head is not None and not is_equal(head, found["embedding.word_embeddings.weight"]):
        raise CheckpointError(f"{where}: lm_head.weight is not the word embedding; a head of its own is not supported")
    heads = config.model.num_attention_heads
    return {name: _from_gpt2(name, found[name], heads) for name in shapes}


def _from_gpt2(name: str, tensor: LazyTensor, heads: int) -> LazyTensor:
    if ".query_key_value." in name:
        from_gpt2 = "(n three d) h -> h three n d" if len(tensor.shape) == 2 else "(n three d) -> three n d"
        return rearranged(tensor, tensor.shape[::-1], partial(rearrange, pattern=from_gpt2, three=3, n=heads))
    if name.startswith("layers.") and len(tensor.shape) == 2:
        return rearranged(tensor, tensor.shape[::-1], torch.t)
    return tensor


def _gpt2_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in GPT-2 of a parameter of ours."""
    return shape[::-1] if name.startswith("layers.") else shape


def gpt2_name(name: str) -> str:
    """GPT-2's name for one of ours; a name that is none of ours stays as it is."""
    if name in TOP:
        return TOP[name]
    found = LAYER_NAME.fullmatch(name)
    if found is None or found[2] not in LAYER:
        return name
    return f"transformer.h.{found[1]}.{LAYER[found[2]]}.{found[3]}"


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


def config_from_gpt2(values: Mapping[str, Any], *, dtype: torch.dtype, tokenizer_type: str) -> Config:
    """The configuration of a run with the model of a ``config.json``; what a model does not say (rates, lengths) is
    a placeholder, which ``--finetune`` does not read.

    Raises:
        CheckpointError: the model is not one of ours; every reason is listed.
    """
    problems = [
        f"{name} is {values[name]!r} and must be {expected!r}"
        for name, expected in REQUIRED.items()
        if name in values and values[name] != expected
    ]
    if (activation := values.get("activation_function", "gelu_new")) not in ACTIVATIONS:
        problems.append(f"activation_function is {activation!r} and must be one of {', '.join(ACTIVATIONS)}")
    dropouts = {values.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop")}
    if len(dropouts) > 1:
        problems.append("resid_pdrop and embd_pdrop differ and must be one --hidden-dropout")
    missing = [name for name in ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size") if name not in values]
    if missing:
        problems.append(f"it does not say {', '.join(missing)}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        problems.append(f"its weights are {dtype}")
    if problems:
        raise CheckpointError(f"this model cannot be trained here: {'; '.join(problems)}")
    try:
        return Config(
            model=ModelConfig(
                num_layers=values["n_layer"],
                hidden_size=values["n_embd"],
                ffn_hidden_size=values.get("n_inner") or 4 * values["n_embd"],
                num_attention_heads=values["n_head"],
                max_position_embeddings=values["n_positions"],
                vocab_size=values["vocab_size"],
                layernorm_epsilon=values.get("layer_norm_epsilon", 1e-5),
                attention_dropout=values.get("attn_pdrop", 0.1),
                hidden_dropout=dropouts.pop(),
                init_method_std=values.get("initializer_range", 0.02),
                bias_gelu_fusion=ACTIVATIONS[activation],
            ),
            optimizer=OptimizerConfig(lr=0.0),
            training=TrainingConfig(micro_batch_size=1, train_iters=1),
            data=DataConfig(seq_length=values["n_positions"], tokenizer_type=tokenizer_type),
            precision=PrecisionConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16),
        )
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"this model cannot be trained here: {error}") from error
