"""What the AdamW step reads from the device: values that change without a compilation or a wait."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class AdamWScalar(IntEnum):
    """Index of each value in the fp32 tensor ``scalars`` of ``adamw_step_``."""

    LR = 0
    WEIGHT_DECAY = 1
    BETA1 = 2
    BETA2 = 3
    EPS = 4
    BIAS_CORRECTION1 = 5
    """1 - beta1 ** step, step counted from 1."""
    BIAS_CORRECTION2 = 6
    """1 - beta2 ** step."""
    GRAD_MULTIPLIER = 7
    """Unscaling times clipping, applied to the gradient as it is read."""
    FOUND_INF = 8
    """Not 0: leave everything as it is."""


NUM_ADAMW_SCALARS = len(AdamWScalar)


def adamw_scalars(
    *,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    grad_multiplier: float = 1.0,
    found_inf: float = 0.0,
) -> list[float]:
    """The values in the order of ``AdamWScalar``, for ``torch.tensor(..., dtype=torch.float32)``.

    fp32 holds 0.999 as 0.99900001, and 1 - beta2 then differs by 1.3e-5 of itself. The corrections are computed, in
    double precision, from the betas as fp32 holds them: the step is AdamW's with those betas, and stays within 1e-6 of
    it with the decimal ones.
    """
    held1, held2 = float(np.float32(beta1)), float(np.float32(beta2))
    return [lr, weight_decay, beta1, beta2, eps, 1 - held1**step, 1 - held2**step, grad_multiplier, found_inf]
