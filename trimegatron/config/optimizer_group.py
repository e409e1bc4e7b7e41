"""The training configuration: the optimizer and the schedules of learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass

from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.config.schedule import DECAY_STYLES, WSD_STYLES


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Options):
    """Optimizer and learning rate"""

    optimizer: str = option("adam", "adam is AdamW", choices=("adam", "sgd"))
    lr: float = option(REQUIRED, "peak learning rate")
    min_lr: float = option(0.0, "learning rate after the decay")
    lr_decay_style: str = option(
        "linear",
        "shape of the decay; WSD: none until the last --lr-wsd-decay-iters (or -samples)",
        choices=DECAY_STYLES,
    )
    lr_wsd_decay_style: str = option("exponential", "shape of WSD's decay", choices=WSD_STYLES)
    lr_wsd_decay_iters: int | None = option(None, "length of WSD's decay", unit="iterations", minimum=1)
    lr_wsd_decay_samples: int | None = option(
        None, "length of WSD's decay, in a run by samples", unit="samples", minimum=1
    )
    lr_decay_iters: int | None = option(
        None, "where the decay ends", unit="iterations", derived="train-iters", minimum=1
    )
    lr_decay_samples: int | None = option(
        None, "where the decay ends, in a run by samples", unit="samples", derived="train-samples", minimum=1
    )
    lr_warmup_fraction: float | None = option(None, "linear warm-up, as a fraction of the decay length")
    lr_warmup_iters: int = option(0, "linear warm-up", unit="iterations")
    lr_warmup_samples: int = option(0, "linear warm-up, in a run by samples", unit="samples")
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warm-up")
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
        if self.lr_warmup_init > self.lr:
            fail(
                "lr_warmup_init",
                self.lr_warmup_init,
                f"must not be above --lr ({self.lr})",
                way_out="Lower it or raise --lr.",
            )
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
