"""Parameter names and layouts of Megatron-LM, all versions of its checkpoints, and ours.

Legend: n heads of a rank, d head size, h hidden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from einops import rearrange

from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor, rearranged

WORDS = "embedding.word_embeddings.weight"
HEADS = ("word_embeddings_for_head.weight", "output_layer.weight")
"""The last stage's copy of the word embedding, in 2022 and since."""

STEM = re.compile(r"(?:language_model\.)?(?:encoder|transformer|decoder)\.")
LAYER = re.compile(r"layers\.(\d+)\.(.+)")
MODULES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "attention.": "self_attention.",
}
"""Starts of names inside a layer that are not ours: those of Megatron-Core, the last one of before 2020-09."""


def our_name(name: str, first_layer: int) -> str:
    """Our name for a parameter of a stage or chunk whose layers begin at ``first_layer``: there they count from 0."""
    if name in HEADS:
        return WORDS
    if name.startswith("language_model.embedding."):
        return name.removeprefix("language_model.")
    stem = STEM.match(name)
    rest = name[stem.end() :] if stem else name
    found = LAYER.fullmatch(rest)
    if found is None:
        return rest
    inner = found[2]
    for start, ours in MODULES.items():
        if inner.startswith(start):
            inner = ours + inner.removeprefix(start)
            break
    return f"layers.{int(found[1]) + first_layer}.{inner}"


def megatron_name(name: str, first_layer: int) -> str:
    """The inverse, with the names of 2022 below ``language_model``; the head's copy is named by the caller."""
    found = LAYER.fullmatch(name)
    if found is not None:
        name = f"layers.{int(found[1]) - first_layer}.{found[2]}"
    return name if name.startswith("embedding.") else f"encoder.{name}"


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, LazyTensor]:
    """Names with dots → tensors, in the file's order; the empty entries of Transformer Engine are left out.

    Raises:
        CheckpointError: there is something else than tensors.
    """
    flat: dict[str, LazyTensor] = {}
    for name, value in nested.items():
        if name.endswith("_extra_state"):
            continue
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, LazyTensor):
            flat[prefix + name] = value
        else:
            raise CheckpointError(f"{prefix}{name} is a {type(value).__name__} where a tensor should be")
    return flat


ORDERS = {0: "(n three d) ... -> three n d ...", 1: "(n three d) ... -> n d three ..."}
"""How queries, keys and values lay before version 2: the pattern from our [n, 3, d] rows to theirs."""


def in_our_order(name: str, tensor: LazyTensor, *, version: float, heads: int) -> LazyTensor:
    """One rank's tensor with its query-key-value rows as [n, 3, d], which is how they lie from version 2 on."""
    order = ORDERS.get(int(version))
    if order is None or ".query_key_value." not in name:
        return tensor
    return rearranged(tensor, tensor.shape, partial(rearrange, pattern=order, n=heads, three=3))
