"""From a configuration to a model on this rank."""

from __future__ import annotations

import torch
from torch import nn

from trimegatron.config import Config
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.mesh import Axis, Mesh
from trimegatron.model.gpt import GPTChunks, GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.recompute import Recompute
from trimegatron.model.spec import GPTSpec
from trimegatron.pipeline_parallel.partition import partition_layers
from trimegatron.tensor_parallel.embedding import padded_vocab_size
from trimegatron.tensor_parallel.parameter import spec_of


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


def global_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, without padding, in the model's order; built without memory."""
    spec = model_spec(config, tensor=Axis(), device=torch.device("meta"))
    stage = GPTStage(spec, range(spec.num_layers))
    return {name: spec_of(parameter).global_shape for name, parameter in stage.named_parameters()}


def stage_layers(config: Config) -> list[range]:
    """The layers of every pipeline stage, in the order of the model. Stage i is on rank i mod pipeline size."""
    parallel = config.parallel
    return partition_layers(
        config.model.num_layers,
        parallel.pipeline_model_parallel_size * config.num_model_chunks,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
    )


def build_model(config: Config, mesh: Mesh) -> GPTChunks:
    """This rank's stages with their initial weights."""
    spec = model_spec(config, tensor=mesh.tensor, device=mesh.device)
    layers = stage_layers(config)
    last = len(layers) - 1
    chunks = GPTChunks(
        GPTStage(spec, layers[stage], is_first=stage == 0, is_last=stage == last)
        for stage in range(mesh.pipeline.rank, len(layers), mesh.pipeline.size)
    )
    initialize(chunks, spec.seed)
    return chunks


def wait_for_parameters(chunks: GPTChunks, buffer: ParameterBuffer) -> None:
    """Let each part of the model wait for its own parameters only, where these are gathered during the forward pass.

    A layer and the final norm are called as modules and use nothing else's parameters. The rest, the tables, are used
    at once on the first stage, and past their own module by the head on the last: the stage waits for them.
    """
    for stage in chunks:
        assert isinstance(stage, GPTStage)
        parts: list[nn.Module] = list(stage.layers.values())
        if stage.is_last:
            parts.append(stage.final_layernorm)
        for part in parts:
            buffer.wait_before(part, part.parameters())
        within = {parameter for part in parts for parameter in part.parameters()}
        buffer.wait_before(stage, set(stage.parameters()) - within)
