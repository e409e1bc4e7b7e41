"""What happens to a step whose loss or gradient is not finite."""

from __future__ import annotations

import math

from trimegatron.checkpoint.checkpoint import Progress
from trimegatron.config import Config
from trimegatron.data.record import DataRecord
from trimegatron.errors import DivergedError


def check_overflow(
    config: Config, progress: Progress, data: DataRecord, *, loss: float, loss_scale: float, num_samples: int
) -> None:
    """Gradients that are not finite never touch the weights. With fp16 the scale adapts; else the run has diverged.

    Args:
        progress: as it is before this step.
        data: what the step's samples were made of.
        loss_scale: what this step was made with.
        num_samples: of this step.

    Raises:
        DivergedError: the loss or the gradient is not finite, and the options do not say to go on; or they do, and
            this is the last skipped step in a row that they allow.
    """
    reason = _reason(config, loss, loss_scale)
    limit, in_a_row = config.training.stop_after_skipped_steps, progress.skipped_in_a_row + 1
    way_out = "Lower --lr or lengthen the warm-up; --no-check-for-nan-in-loss-and-grad skips such steps instead"
    if reason is None and limit is not None and in_a_row >= limit:
        reason = f"{in_a_row} steps in a row were skipped (--stop-after-skipped-steps), at last with a loss of {loss:g}"
        way_out = "Lower --lr, or with --fp16 --initial-loss-scale, or raise the limit"
    if reason is None:
        return
    first = progress.consumed_samples
    raise DivergedError(
        f"training diverged at iteration {progress.iteration + 1} (samples {first} to {first + num_samples - 1} of the "
        f"run, {data.describe(first, num_samples)}): {reason}. {way_out}"
    )


def _reason(config: Config, loss: float, loss_scale: float) -> str | None:
    """Why this step ends the run by itself, or None where it is only skipped."""
    if not config.training.check_for_nan_in_loss_and_grad:
        return None
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not config.precision.fp16 or config.precision.loss_scale is not None:
        return "the gradient norm is not finite"
    if loss_scale <= config.precision.min_loss_scale:
        return f"the gradient norm is not finite at the smallest loss scale, {loss_scale:g}"
    return None
