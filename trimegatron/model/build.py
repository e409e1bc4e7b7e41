"""From a configuration to a model on this rank."""

from __future__ import annotations

import torch

from trimegatron.config import Config
from trimegatron.mesh import Axis, Mesh
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.recompute import Recompute
from trimegatron.model.spec import GPTSpec
from trimegatron.pipeline_parallel.partition import layers_of_stage
from trimegatron.tensor_parallel.embedding import padded_vocab_size


def model_spec(config: Config, *, tensor: Axis, device: torch.device, dtype: torch.dtype | None = None) -> GPTSpec:
    """The model that ``config`` describes, as one rank builds it. ``config.model.vocab_size`` must be known by now."""
    model = config.model
    assert model.vocab_size is not None, "known once the tokenizer is"
    padded = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, tensor.size)
    return GPTSpec(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        padded_vocab_size=padded,
        layernorm_epsilon=model.layernorm_epsilon,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method_std=model.init_method_std,
        gelu="tanh" if model.bias_gelu_fusion else "none",
        attention_backend=model.attention_backend,
        apply_query_key_layer_scaling=config.precision.apply_query_key_layer_scaling,
        kernels=model.kernels,
        seed=config.training.seed,
        dtype=dtype or getattr(torch, config.precision.params_dtype),
        device=device,
        tensor=tensor,
        sequence_parallel=config.parallel.sequence_parallel and tensor.size > 1,
        recompute=Recompute(
            config.recompute.recompute_granularity,
            config.recompute.recompute_method,
            config.recompute.recompute_num_layers,
        ),
    )


def build_model(config: Config, mesh: Mesh) -> GPTStage:
    """This rank's stage with its initial weights."""
    spec = model_spec(config, tensor=mesh.tensor, device=mesh.device)
    pipeline = mesh.pipeline
    stage = GPTStage(
        spec,
        layers_of_stage(spec.num_layers, pipeline.size, pipeline.rank),
        is_first=pipeline.rank == 0,
        is_last=pipeline.rank == pipeline.size - 1,
    )
    initialize(stage, spec.seed)
    return stage
