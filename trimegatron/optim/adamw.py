"""AdamW over the flat buffer of parameters."""

from __future__ import annotations

import torch

from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.kernels import functional


class FlatAdamW:
    """m = β₁ m + (1−β₁) g;  v = β₂ v + (1−β₂) g²;  p −= lr (m̂ / (√v̂ + ε) + wd · p), in one pass over the flat buffer.

    The update acts on fp32 master weights. Where the parameters are fp32 they are their own master; else the same
    pass writes the rounded copy the model computes with. ``step`` counts the updates that were made: a skipped one
    leaves everything as it was.
    """

    def __init__(self, buffer: ParameterBuffer, *, beta1: float, beta2: float, epsilon: float, kernels: str):
        self.buffer = buffer
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.kernels = kernels
        self.step_count = 0
        self.low_precision = None if buffer.params.dtype == torch.float32 else buffer.params
        self.master = buffer.params if self.low_precision is None else buffer.params.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)

    def step(self, *, lr: float, weight_decay: float, grad_multiplier: torch.Tensor) -> None:
        """One update with gradients of ``buffer.grads`` · ``grad_multiplier`` (an fp32 scalar on the device)."""
        self.step_count += 1
        scalars = torch.tensor(
            functional.adamw_scalars(
                lr=lr,
                weight_decay=weight_decay,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.epsilon,
                step=self.step_count,
            ),
            dtype=torch.float32,
        ).to(self.master.device, non_blocking=True)
        scalars[functional.AdamWScalar.GRAD_MULTIPLIER] = grad_multiplier
        functional.adamw_step_(
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.buffer.grads,
            scalars,
            num_decayed=self.buffer.num_decayed,
            low_precision=self.low_precision,
            impl=self.kernels,
        )

    def refresh_parameters(self) -> None:
        """Write the model's parameters from the master weights, after these were loaded."""
        if self.low_precision is not None:
            self.low_precision.copy_(self.master)
