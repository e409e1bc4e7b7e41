"""Megatron-LM's options that are not options here: what a command line that has them is told.

IGNORED: it changes nothing here; accepted, with a line that says what happens instead.
LATER: only the values listed are accepted (silently, they are what happens anyway); others are "not supported yet".
NEVER: refused, with the replacement.

Options that are supported but not with every value of Megatron's are in ``checks.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from trimegatron.config.options import Options, kebab, option
from trimegatron.errors import ConfigError


class Kind(Enum):
    IGNORED = "ignored"
    LATER = "later"
    NEVER = "never"


@dataclasses.dataclass(frozen=True)
class Foreign:
    """One option of Megatron's. ``default`` is Megatron's; its type is the option's (None: see ``type``)."""

    name: str
    """As a field: ``--no-x`` is ``x`` with the default True, as Megatron stores it."""
    default: Any
    kind: Kind
    text: str
    type: Any = None
    accepts: tuple[Any, ...] = ()
    """Values accepted beside the default."""


def _ignored(name: str, default: Any, text: str, type: Any = None) -> Foreign:
    return Foreign(name, default, Kind.IGNORED, text, type)


def _later(name: str, default: Any, text: str, type: Any = None, accepts: tuple[Any, ...] = ()) -> Foreign:
    return Foreign(name, default, Kind.LATER, text, type, accepts)


def _never(name: str, default: Any, text: str, type: Any = None) -> Foreign:
    return Foreign(name, default, Kind.NEVER, text, type)


LEAVE_OUT = "Leave it out."
SAME_WEIGHTS = "initial weights are a function of the seed, the same for every layout and device"
ONE_BUFFER = "gradients always lie in contiguous buffers, reduced by this package's own code"
TENSORBOARD = "TensorBoard gets losses, learning rate, gradient norm and loss scale; metrics.jsonl has the rest"
TIMING = "there are no per-phase timers; every log line has the time per iteration"
GPT2_MODEL = "The model is GPT-2's: learned positions, layer norm, GELU, biases, tied output. Leave it out."

FOREIGN: tuple[Foreign, ...] = (
    # Model
    _later("apply_residual_connection_post_layernorm", False, LEAVE_OUT),
    _later("openai_gelu", False, "Leave it out: the default is tanh GELU, --no-bias-gelu-fusion makes it erf GELU."),
    _ignored("onnx_safe", None, "export goes through `trimegatron convert to-hf`", str),
    _never("num_experts", None, "Mixture of experts is not part of this package; leave it out for a dense model.", str),
    _later("position_embedding_type", "learned_absolute", GPT2_MODEL),
    _later("untie_embeddings_and_output_weights", False, GPT2_MODEL),
    _later("disable_bias_linear", False, GPT2_MODEL),
    _later("swiglu", False, GPT2_MODEL),
    _later("normalization", "LayerNorm", GPT2_MODEL),
    _later("group_query_attention", False, GPT2_MODEL),
    _later("num_query_groups", None, GPT2_MODEL, int),
    _later("transformer_impl", "local", "Use local: the layers are this package's own, with Triton kernels."),
    _ignored("use_mcore_models", False, "there is one model, this package's own"),
    _ignored("use_legacy_models", False, "there is one model, this package's own"),
    _ignored("use_flash_attn", False, "--attention-backend says how attention is computed"),
    # Training
    _ignored("sgd_momentum", 0.9, "it acts with --optimizer sgd only, which is not supported yet"),
    _ignored("exit_signal_handler", False, "SIGTERM and SIGUSR1 always save and end the run"),
    _ignored("data_parallel_random_init", False, SAME_WEIGHTS),
    _ignored("init_method_xavier_uniform", False, "Megatron-LM's GPT does not read it either: weights are normal"),
    _ignored("calculate_per_token_loss", False, "the loss always weighs tokens, over the whole global batch"),
    _never("batch_size", None, "Use --micro-batch-size.", str),
    _never("warmup", None, "Use --lr-warmup-fraction.", str),
    # Checkpoints
    _ignored("initialization", True, "weights are always initialized, then overwritten by --load"),
    _ignored("exit_on_missing_checkpoint", False, "always so, unless --load and --save are the same folder"),
    _ignored("ckpt_format", None, "checkpoints are safetensors files that any layout loads", str),
    _ignored("auto_detect_ckpt_format", False, "there is one checkpoint format"),
    # Precision
    _later("fp32_residual_connection", False, LEAVE_OUT),
    _ignored("fp16_lm_cross_entropy", False, "the cross entropy is always computed in float32"),
    # Parallelism
    _never("model_parallel_size", None, "Use --tensor-model-parallel-size.", str),
    _later("context_parallel_size", 1, "Leave it out."),
    _ignored("DDP_impl", "local", ONE_BUFFER),
    _ignored("contiguous_buffers_in_local_ddp", True, ONE_BUFFER),
    _ignored("scatter_gather_tensors_in_pipeline", True, "pipeline stages exchange whole activations"),
    _ignored("async_tensor_model_parallel_allreduce", True, "the tensor-parallel layers decide what overlaps"),
    _ignored("use_cpu_initialization", False, SAME_WEIGHTS),
    _ignored("standalone_embedding_stage", False, "the embedding shares the first stage"),
    _ignored("empty_unused_memory_level", 0, "the allocator's cache is never emptied"),
    _ignored("use_ring_exchange_p2p", False, "messages go through torch.distributed"),
    _ignored("lazy_mpu_init", None, "process groups are made once, before the model", list[str]),
    _ignored("local_rank", None, "the launcher's environment variable LOCAL_RANK is used", int),
    # Recompute and fusion
    _later(
        "distribute_saved_activations",
        False,
        "Use --sequence-parallel: what is kept between layers is then a piece of the sequence on each rank.",
    ),
    _never("checkpoint_activations", False, "Use --recompute-granularity full --recompute-method uniform."),
    _ignored("masked_softmax_fusion", True, "--attention-backend and --kernels choose the softmax"),
    _ignored("bias_dropout_fusion", True, "--kernels reference turns fused operations off, all together"),
    _ignored("no_persist_layer_norm", False, "--kernels chooses the layer norm"),
    _ignored("gradient_accumulation_fusion", True, "weight gradients are accumulated in the gradient buffer anyway"),
    # Data
    _ignored("mmap_warmup", False, "files are read as they are needed"),
    _ignored("vocab_extra_ids", 0, "it is for T5 only"),
    _ignored(
        "num_dataset_builder_threads", 1, "each process builds what no other has built; the disk's cache is shared"
    ),
    _later("mock_data", False, "Use a small set made by `trimegatron preprocess`."),
    # Logging
    _ignored("timing_log_level", 0, TIMING),
    _ignored("barrier_with_level_1_timing", True, TIMING),
    _ignored("timing_log_option", "minmax", TIMING),
    _ignored("log_timers_to_tensorboard", False, TENSORBOARD),
    _ignored("log_batch_size_to_tensorboard", False, TENSORBOARD),
    _ignored("log_learnig_rate_to_tensorboard", True, TENSORBOARD),  # Megatron's spelling
    _ignored("log_loss_scale_to_tensorboard", True, TENSORBOARD),
    _ignored("log_validation_ppl_to_tensorboard", False, TENSORBOARD),
    _ignored("log_memory_to_tensorboard", False, TENSORBOARD),
    _ignored("log_world_size_to_tensorboard", False, TENSORBOARD),
    _ignored("log_throughput", False, "every log line has it"),
    _later("wandb_project", None, "Use --tensorboard-dir; metrics.jsonl is always written.", str),
    _later("wandb_exp_name", None, "Use --tensorboard-dir; metrics.jsonl is always written.", str),
    _later("wandb_entity", None, "Use --tensorboard-dir; metrics.jsonl is always written.", str),
    _later("wandb_save_dir", None, "Use --tensorboard-dir; metrics.jsonl is always written.", str),
)


def _foreign_options() -> type:
    """A dataclass with a hidden option for each row, so that the one machinery reads them all."""
    fields = []
    for row in FOREIGN:
        kind = row.type or type(row.default)
        annotation = kind | None if row.default is None else kind
        default = option(row.default, row.text, negative=True, hidden=True, nargs="*" if kind == list[str] else None)
        fields.append((row.name, annotation, default))
    return dataclasses.make_dataclass("MegatronConfig", fields, bases=(Options,), frozen=True, kw_only=True)


MegatronConfig = _foreign_options()


def foreign_notes(given: Mapping[str, Any]) -> list[str]:
    """One line for each option given that is ignored here.

    Raises:
        ConfigError: an option given that is refused.
    """
    notes = []
    for row in FOREIGN:
        if row.name not in given:
            continue
        value = given[row.name]
        shown = kebab(row.name) if value is not False else _opposite(row.name)
        if not isinstance(value, bool) and value != []:
            shown += f" ({' '.join(value) if isinstance(value, list) else value})"
        if row.kind is Kind.NEVER:
            raise ConfigError(f"{shown} is not an option of trimegatron. {row.text}")
        if row.kind is Kind.IGNORED:
            if row.name != "local_rank":  # every launch with torch.distributed.launch has it
                notes.append(f"{shown} has no effect: {row.text}.")
        elif value != row.default and value not in row.accepts:
            raise ConfigError(f"{shown} is not supported yet. {row.text}")
    return notes


def epilog() -> str:
    """For ``--help``: the names alone."""
    names = {kind: [_spelled(row) for row in FOREIGN if row.kind is kind] for kind in Kind}
    return (
        f"Options of Megatron-LM accepted without effect: {', '.join(names[Kind.IGNORED])}. "
        f"\nNot supported yet: {', '.join(names[Kind.LATER])}."
    )


def _spelled(row: Foreign) -> str:
    return _opposite(row.name) if row.default is True else kebab(row.name)


def _opposite(name: str) -> str:
    return kebab(name.removeprefix("no_") if name.startswith("no_") else "no_" + name)
