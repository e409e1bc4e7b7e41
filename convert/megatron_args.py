"""Megatron-LM's ``args`` and our configuration, whose options have the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimegatron.config import Config
from trimegatron.config.config import GROUPS
from trimegatron.config.flags import build
from trimegatron.config.options import options_of
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.tensor_parallel.embedding import padded_vocab_size

REQUIRED: dict[str, tuple[Any, ...]] = {
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "add_bias_linear": (True,),
    "add_position_embedding": (True,),
    "add_qkv_bias": (True,),
    "attention_output_gate": (False,),
    "decoder_first_pipeline_num_layers": (None,),
    "decoder_last_pipeline_num_layers": (None,),
    "experimental_attention_variant": (None,),
    "group_query_attention": (False,),
    "heterogeneous_layers_config_path": (None,),
    "is_hybrid_model": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "mtp_num_layers": (None,),
    "multi_latent_attention": (False,),
    "normalization": ("LayerNorm",),
    "num_experts": (None, []),
    "pipeline_model_parallel_layout": (None,),
    "position_embedding_type": ("learned_absolute",),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "softmax_type": ("vanilla",),
    "squared_relu": (False,),
    "standalone_embedding_stage": (False,),
    "swiglu": (False,),
    "untie_embeddings_and_output_weights": (False,),
    "use_mup": (False,),
    "use_rotary_position_embeddings": (False,),
    "window_size": (None,),
}
"""What these may say for the model to be one of ours; an option that a version of Megatron-LM has not is right."""
NOT_OF_THE_RUN = {"parallel", "recompute", "checkpoint", "logging"}
NOT_READ = {
    "exit_signal",
    "skip_train",
    "vocab_size",
    "mask_padded_vocab",
    "tokenizer_type",
    "attention_backend",
    "kernels",
    "device",
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_cache_path",
    "data_impl",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "megatron_compat",
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
}
"""Options that the conversion sets itself, or that are of the command and not of the run."""


def config_from_args(args: Mapping[str, Any], *, where: Path, is_core: bool = False, **given: Any) -> Config:
    """The configuration of a run of Megatron-LM's, as for one process.

    Args:
        is_core: the model is one of Megatron-Core's.
        given: options that the conversion knows better, by name.

    Raises:
        CheckpointError: the model or a setting is not one of ours; every reason is listed.
    """
    problems = [
        f"{name} is {args[name]!r}, not {allowed[0]!r}"
        for name, allowed in REQUIRED.items()
        if name in args and args[name] not in allowed
    ]
    if problems:
        raise CheckpointError(f"{where} is of a model that cannot be represented here: {'; '.join(problems)}")
    values = {name: value for name, value in args.items() if value is not None and name not in NOT_READ}
    values.setdefault("layernorm_epsilon", values.get("norm_epsilon", 1e-5))
    # Without the fusion Megatron-LM computes the exact form, unless it was told to take OpenAI's, which is the tanh;
    # Megatron-Core accepts that option without effect.
    is_openai = args.get("openai_gelu", False) and not is_core
    values["bias_gelu_fusion"] = bool(args.get("bias_gelu_fusion", True) or is_openai)
    values.setdefault("lr", 0.0)
    if values.get("train_samples"):
        values.pop("train_iters", None)
    elif "train_iters" not in values:
        values["train_iters"] = 1
    values |= given
    groups: dict[str, Any] = {}
    try:
        for group, cls in GROUPS.items():
            names = options_of(cls) if group not in NOT_OF_THE_RUN else {}
            groups[group] = build(cls, {name: values[name] for name in names if name in values})
        return Config(**groups)
    except ConfigError as error:
        raise CheckpointError(f"{where} was trained with a setting that is not supported here: {error}") from error


def args_from_config(config: Config, *, tp: int, pp: int, consumed_samples: int, iteration: int) -> dict[str, Any]:
    """What a Megatron-LM of 2022 looks for in ``args`` when it loads a checkpoint, and everything that we know under
    its names.
    """
    values: dict[str, Any] = {}
    for group, fields in config.to_dict().items():
        if group not in NOT_OF_THE_RUN:
            values |= {name: value for name, value in fields.items() if name not in ("kernels", "device")}
    model = config.model
    assert model.vocab_size is not None
    values.pop("vocab_size")
    values.pop("attention_backend")
    return values | {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "world_size": tp * pp,
        "data_parallel_size": 1,
        "padded_vocab_size": padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, tp),
        "params_dtype": getattr(torch, config.precision.params_dtype),
        "encoder_seq_length": config.data.seq_length,
        "openai_gelu": False,
        "use_distributed_optimizer": False,
        "data_parallel_random_init": False,
        "consumed_train_samples": consumed_samples,
        "consumed_valid_samples": 0,
        "iteration": iteration,
    }
