"""The training configuration: the model, the run, its precision and layout. ``optimizer_group.py`` has the optimizer,
``io_groups.py`` files and logs.

Names, meanings and defaults are Megatron-LM's (those of 2022 where the years differ); "ours" marks what it has not.
Rules between groups are in ``checks.py``. Sizes are counts of features, tokens, samples or iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimegatron.config.batching import BatchSizes
from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.config.pipeline import SCHEDULES, check_pipeline_schedule

MAX_SEED = 2**32 - 1
"""numpy's legacy generator, which the index maps are drawn from, takes seeds up to here."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """Model"""

    num_layers: int = option(REQUIRED, "transformer layers", minimum=1)
    hidden_size: int = option(REQUIRED, "width of the model", unit="features", minimum=1)
    ffn_hidden_size: int = option(None, "width inside the MLP", unit="features", derived="4 x hidden-size", minimum=1)
    num_attention_heads: int = option(REQUIRED, "attention heads", minimum=1)
    kv_channels: int = option(
        None, "width of one head", unit="features", derived="hidden-size / num-attention-heads", minimum=1
    )
    max_position_embeddings: int = option(
        REQUIRED, "rows of the learned position table, the longest sequence", unit="tokens", minimum=1
    )
    vocab_size: int | None = option(
        None, "size of the vocabulary before padding, for NullTokenizer", derived="from the tokenizer", minimum=1
    )
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size", minimum=1
    )
    mask_padded_vocab: bool = option(
        True, "let padded rows of the vocabulary take probability, as Megatron-LM does (the loss then depends on tp)"
    )
    layernorm_epsilon: float = option(1e-5, "epsilon of layer norm", flags=("--norm-epsilon",))
    attention_dropout: float = option(0.1, "dropout on attention probabilities")
    hidden_dropout: float = option(0.1, "dropout after embeddings, attention output and MLP output")
    init_method_std: float = option(0.02, "standard deviation of the initial weights")
    bias_gelu_fusion: bool = option(True, "erf GELU instead of the fused tanh GELU, as in Megatron-LM")
    attention_backend: str = option(
        "auto",
        "sdpa: torch's scaled dot product attention; flash: the Triton kernel that keeps no scores; softmax: scores, "
        "fused softmax, dropout. auto: sdpa without attention dropout and in evaluation, else flash on a GPU, softmax "
        "on a CPU",
        choices=("auto", "sdpa", "softmax", "flash"),
    )
    kernels: str = option(
        "auto",
        "ours. Where the fused operations run; auto: triton on a GPU, reference (PyTorch) elsewhere",
        choices=("auto", "triton", "reference"),
    )
    kernel_table: str | None = option(
        None,
        "ours. Launch configurations that `trimegatron tune` found on this kind of GPU; they go before those that come "
        "with the package for it. none: neither, the heuristics alone",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ffn_hidden_size is None:
            self._derive(ffn_hidden_size=4 * self.hidden_size)
        if self.kv_channels is None:
            head, rest = divmod(self.hidden_size, self.num_attention_heads)
            if rest:
                fail(
                    "num_attention_heads",
                    self.num_attention_heads,
                    f"must divide --hidden-size ({self.hidden_size})",
                    f"the division leaves {rest}",
                    "Change one of the two, or give the width of a head with --kv-channels.",
                )
            self._derive(kv_channels=head)
        for name in ("attention_dropout", "hidden_dropout"):
            if not getattr(self, name) < 1:
                fail(name, getattr(self, name), "must be in [0, 1)", way_out="0 turns dropout off.")
        if self.attention_backend == "sdpa" and self.attention_dropout > 0:
            fail(
                "attention_backend",
                "sdpa",
                f"needs --attention-dropout 0: torch's attention draws its own masks; got {self.attention_dropout:g}",
                way_out="Use auto, which takes sdpa wherever nothing is dropped.",
            )
        if self.attention_backend == "flash" and self.kernels == "reference":
            fail(
                "attention_backend",
                "flash",
                "is a Triton kernel, but --kernels is reference",
                way_out="Use auto or softmax, or leave --kernels out.",
            )
        if not self.layernorm_epsilon > 0:
            fail("layernorm_epsilon", self.layernorm_epsilon, "must be above 0")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """Training and evaluation"""

    micro_batch_size: int = option(
        REQUIRED, "samples of one forward pass on one data-parallel rank", unit="samples", minimum=1
    )
    global_batch_size: int = option(
        None, "samples of one step", unit="samples", derived="micro-batch-size x data parallel size", minimum=1
    )
    rampup_batch_size: list[int] | None = option(
        None,
        "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT to --global-batch-size over the first "
        "SAMPLES samples; in a run by samples",
        unit="samples",
        minimum=1,
    )
    train_iters: int = option(
        None,
        "length of the run; or give --train-samples",
        unit="iterations",
        derived="train-samples / global-batch-size",
        minimum=1,
    )
    train_samples: int | None = option(None, "length of the run; or give --train-iters", unit="samples", minimum=1)
    seed: int = option(1234, "of dropout, initial weights and data order", minimum=1)
    exit_interval: int | None = option(
        None, "save and exit when the iteration is a multiple of this", unit="iterations", minimum=1
    )
    exit_duration_in_mins: float | None = option(None, "save and exit after this time", unit="minutes")
    exit_signal: str | None = option(
        None,
        "ours. A signal that saves and exits, as SIGTERM and SIGUSR1 always do",
        choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"),
    )
    eval_interval: int = option(1000, "time between evaluations", unit="iterations", minimum=1)
    eval_iters: int = option(100, "global batches of one evaluation; 0: none", unit="iterations")
    eval_at_start: bool = option(False, "ours. Evaluate before the first step too")
    check_for_nan_in_loss_and_grad: bool = option(True, "go on when the loss or the gradient norm is not finite")
    stop_after_skipped_steps: int | None = option(
        None,
        "ours. End the run after so many skipped steps in a row; without it fp16 ends at the smallest loss scale",
        unit="iterations",
        minimum=1,
    )
    skip_train: bool = option(False, "evaluate on the validation and test data only; nothing is saved")
    manual_gc: bool = option(False, "collect Python's garbage at the same step on every rank, not when Python likes")
    manual_gc_interval: int = option(0, "time between the collections of --manual-gc; 0: none", unit="iterations")
    manual_gc_eval: bool = option(True, "with --manual-gc, do not collect before and after evaluations")
    deterministic_mode: bool = option(
        False,
        "the same bits from the same command on a GPU too; what is not deterministic there is replaced or refused",
    )
    device: str = option("auto", "ours. auto: cuda where there is one", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed > MAX_SEED:
            fail("seed", self.seed, f"must be in 1..{MAX_SEED}")
        ramp = self.rampup_batch_size
        if ramp is not None and len(ramp) != 3:
            fail(
                "rampup_batch_size",
                " ".join(map(str, ramp)),
                "must be three whole numbers: START INCREMENT SAMPLES",
                f"got {len(ramp)}",
                "For example 16 16 100000.",
            )

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch of every step."""
        full = self.global_batch_size
        return BatchSizes(full, *self.rampup_batch_size) if self.rampup_batch_size else BatchSizes(full, full)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Options):
    """Precision"""

    fp16: bool = option(False, "float16 weights, float32 main copy, loss scaling")
    bf16: bool = option(False, "bfloat16 weights, float32 main copy")
    loss_scale: float | None = option(None, "constant loss scale of fp16", derived="dynamic")
    initial_loss_scale: float = option(2.0**32, "where the dynamic loss scale starts")
    min_loss_scale: float = option(1.0, "where the dynamic loss scale ends")
    loss_scale_window: int = option(1000, "clean steps before the loss scale doubles", unit="iterations", minimum=1)
    hysteresis: int = option(2, "overflows tolerated before the loss scale halves", minimum=1)
    accumulate_allreduce_grads_in_fp32: bool = option(False, "float32 gradient buffers (always with --bf16)")
    attention_softmax_in_fp32: bool = option(
        False, "softmax of half-precision attention in float32 (always with query-key layer scaling)"
    )
    apply_query_key_layer_scaling: bool = option(
        True,
        "do not divide attention scores by the layer number before the softmax and multiply them back inside it "
        "(changes half-precision rounding only)",
        flags=("--no-query-key-layer-scaling",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp16 and self.bf16:
            fail("fp16", True, "and --bf16 exclude each other", way_out="Give one of the two.")
        if self.loss_scale is not None and not self.fp16:
            fail("loss_scale", self.loss_scale, "acts with --fp16 only", way_out="Leave it out, or add --fp16.")
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                fail(name, value, "must be above 0")
        if self.min_loss_scale > self.initial_loss_scale:
            fail(
                "min_loss_scale",
                self.min_loss_scale,
                f"must not be above --initial-loss-scale ({self.initial_loss_scale:g})",
            )
        if self.bf16:
            self._derive(accumulate_allreduce_grads_in_fp32=True)
        if self.apply_query_key_layer_scaling:
            self._derive(attention_softmax_in_fp32=True)

    @property
    def params_dtype(self) -> str:
        """The dtype of weights and activations, by its torch name."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Options):
    """Parallelism"""

    tensor_model_parallel_size: int = option(1, "ranks that share one layer", unit="ranks", minimum=1)
    pipeline_model_parallel_size: int = option(1, "ranks that share the layers", unit="ranks", minimum=1)
    pipeline_schedule: str = option(
        None,
        "ours. Order of forward and backward passes over the pipeline",
        derived="1f1b; interleaved with --num-layers-per-virtual-pipeline-stage",
        metavar="{" + ",".join(SCHEDULES) + "}",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "give each pipeline rank several stages, of this many layers each", unit="layers", minimum=1
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None,
        "layers of the first pipeline stage; the stages that are not given share the rest equally",
        unit="layers",
        minimum=1,
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last pipeline stage", unit="layers", minimum=1
    )
    sequence_parallel: bool = option(
        False, "between tensor-parallel layers each rank holds a piece of the sequence; off at tensor parallel size 1"
    )
    use_distributed_optimizer: bool = option(
        False, "cut optimizer state and float32 main copy over the data-parallel ranks (ZeRO 1)"
    )
    overlap_grad_reduce: bool = option(False, "sum gradients over data parallelism during the backward pass")
    overlap_param_gather: bool = option(
        False, "with the distributed optimizer, gather parameters during the next forward pass"
    )
    ddp_bucket_size: int = option(
        10_000_000, "parameters whose gradients are summed at once over data parallelism", minimum=1
    )
    distributed_backend: str | None = option(
        None, "of torch.distributed", derived="nccl on cuda, gloo on cpu", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = option(10, "of every collective", unit="minutes", minimum=1)
    hang_timeout_in_mins: float = option(
        None,
        "ours. End the run when no rank has gone on for so long, naming those that are behind; 0: never",
        unit="minutes",
        derived="0.9 x distributed-timeout-minutes",
    )
    world_size: int = field(default=1)
    """Processes of the run, from the launcher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        per_stage = self.num_layers_per_virtual_pipeline_stage
        if self.pipeline_schedule is None:
            self._derive(pipeline_schedule="1f1b" if per_stage is None else "interleaved")
        check_pipeline_schedule(self.pipeline_schedule, per_stage)
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if self.world_size % (tp * pp):
            fail(
                "tensor_model_parallel_size",
                tp,
                f"x --pipeline-model-parallel-size ({pp}) must divide the number of processes",
                f"the product is {tp * pp}, the number of processes {self.world_size}",
                f"Start a multiple of {tp * pp} processes (torchrun --nproc-per-node), or lower the sizes.",
            )
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            fail(
                "overlap_param_gather",
                True,
                "acts with --use-distributed-optimizer only: without it every rank updates all parameters",
                way_out="Add that, or leave this out.",
            )
        if tp == 1:
            self._derive(sequence_parallel=False)
        if self.hang_timeout_in_mins is None:
            self._derive(hang_timeout_in_mins=0.9 * self.distributed_timeout_minutes)
        if self.hang_timeout_in_mins > self.distributed_timeout_minutes:
            fail(
                "hang_timeout_in_mins",
                self.hang_timeout_in_mins,
                f"must not be above --distributed-timeout-minutes ({self.distributed_timeout_minutes}): a collective "
                "that waits so long ends the run first, and names nobody",
                way_out="Raise that too.",
            )

    @property
    def data_parallel_size(self) -> int:
        """Model replicas: processes / (tensor x pipeline parallel size)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
