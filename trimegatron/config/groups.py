"""The training configuration: the model and how it is optimized. Files and logs are in ``io_groups.py``.

Names, meanings and defaults are Megatron-LM's (those of 2022 where the years differ); "ours" marks what it has not.
Rules between groups are in ``checks.py``. Sizes are counts of features, tokens, samples or iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimegatron.config.options import REQUIRED, Options, fail, option

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
class OptimizerConfig(Options):
    """Optimizer and learning rate"""

    optimizer: str = option("adam", "adam is AdamW", choices=("adam", "sgd"))
    lr: float = option(REQUIRED, "peak learning rate")
    min_lr: float = option(0.0, "learning rate after the decay")
    lr_decay_style: str = option("linear", "shape of the decay", choices=("constant", "linear", "cosine"))
    lr_decay_iters: int | None = option(
        None, "where the decay ends", unit="iterations", derived="train-iters", minimum=1
    )
    lr_decay_samples: int | None = option(
        None, "where the decay ends, in a run by samples", unit="samples", derived="train-samples", minimum=1
    )
    lr_warmup_fraction: float | None = option(None, "linear warm-up, as a fraction of the decay length")
    lr_warmup_iters: int = option(0, "linear warm-up", unit="iterations")
    lr_warmup_samples: int = option(0, "linear warm-up, in a run by samples", unit="samples")
    weight_decay: float = option(0.01, "decoupled weight decay; none on biases and 1-D parameters")
    start_weight_decay: float = option(None, "weight decay at the start of a ramp", derived="weight-decay")
    end_weight_decay: float = option(None, "weight decay at the end of a ramp", derived="weight-decay")
    weight_decay_incr_style: str = option(
        "constant", "shape of the ramp from start to end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = option(1.0, "largest global norm of the gradient; 0 turns clipping off")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "epsilon of Adam, outside the square root")
    override_opt_param_scheduler: bool = option(
        False,
        "on --load keep the schedule of the command line",
        flags=("--override-opt_param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "on --load take the schedule of the checkpoint (with neither option the two must agree)",
        flags=("--use-checkpoint-opt_param-scheduler",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.lr:
            fail("min_lr", self.min_lr, f"must not be above --lr ({self.lr})", way_out="Lower it or raise --lr.")
        for name in ("adam_beta1", "adam_beta2"):
            if not getattr(self, name) < 1:
                fail(name, getattr(self, name), "must be in [0, 1)")
        if self.lr_warmup_fraction is not None:
            self._check_warmup_fraction(self.lr_warmup_fraction)
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            fail(
                "override_opt_param_scheduler",
                True,
                "and --use-checkpoint-opt-param-scheduler exclude each other",
                way_out="Give one of the two.",
            )
        self._resolve_weight_decay()

    def _check_warmup_fraction(self, fraction: float) -> None:
        if not fraction < 1:
            fail("lr_warmup_fraction", fraction, "must be in [0, 1)")
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if getattr(self, name):
                fail(
                    name,
                    getattr(self, name),
                    f"and --lr-warmup-fraction ({fraction}) exclude each other",
                    way_out="Give the warm-up once.",
                )

    def _resolve_weight_decay(self) -> None:
        """Constant: start and end are the weight decay. A ramp needs both."""
        for name in ("start_weight_decay", "end_weight_decay"):
            value = getattr(self, name)
            if self.weight_decay_incr_style == "constant":
                if value not in (None, self.weight_decay):
                    fail(
                        name,
                        value,
                        "needs a ramp, but --weight-decay-incr-style is constant",
                        way_out="Set the style to linear or cosine, or give --weight-decay alone.",
                    )
                self._derive(**{name: self.weight_decay})
            elif value is None:
                fail(
                    name,
                    value,
                    f"is required with --weight-decay-incr-style {self.weight_decay_incr_style}",
                    way_out="Give both ends of the ramp.",
                )
        if self.start_weight_decay > self.end_weight_decay:
            fail(
                "start_weight_decay",
                self.start_weight_decay,
                f"must not be above --end-weight-decay ({self.end_weight_decay})",
            )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """Training and evaluation"""

    micro_batch_size: int = option(
        REQUIRED, "samples of one forward pass on one data-parallel rank", unit="samples", minimum=1
    )
    global_batch_size: int = option(
        None, "samples of one step", unit="samples", derived="micro-batch-size x data parallel size", minimum=1
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
    eval_interval: int = option(1000, "time between evaluations", unit="iterations", minimum=1)
    eval_iters: int = option(100, "global batches of one evaluation; 0: none", unit="iterations")
    eval_at_start: bool = option(False, "ours. Evaluate before the first step too")
    check_for_nan_in_loss_and_grad: bool = option(True, "go on when the loss or the gradient norm is not finite")
    device: str = option("auto", "ours. auto: cuda where there is one", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed > MAX_SEED:
            fail("seed", self.seed, f"must be in 1..{MAX_SEED}")


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
    pipeline_model_parallel_size: int = option(1, "stages that share the layers", unit="ranks", minimum=1)
    distributed_backend: str | None = option(
        None, "of torch.distributed", derived="nccl on cuda, gloo on cpu", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = option(10, "of every collective", unit="minutes", minimum=1)
    world_size: int = field(default=1)
    """Processes of the run, from the launcher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if self.world_size % (tp * pp):
            fail(
                "tensor_model_parallel_size",
                tp,
                f"x --pipeline-model-parallel-size ({pp}) must divide the number of processes",
                f"the product is {tp * pp}, the number of processes {self.world_size}",
                f"Start a multiple of {tp * pp} processes (torchrun --nproc-per-node), or lower the sizes.",
            )

    @property
    def data_parallel_size(self) -> int:
        """Model replicas: processes / (tensor x pipeline parallel size)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
