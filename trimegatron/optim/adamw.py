"""AdamW over the flat buffer of parameters, or over this rank's shards of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.data_parallel.layout import Shard
from trimegatron.kernels import functional
from trimegatron.kernels.functional import AdamWRuns, Run


class FlatAdamW:
    """m = β₁ m + (1−β₁) g;  v = β₂ v + (1−β₂) g²;  p −= lr (m̂ / (√v̂ + ε) + wd · p), in one launch over all that the
    buffer says is updated here. Moments are held for nothing else.

    The update acts on fp32 master weights. Where the parameters are fp32 they are their own master; else the same
    pass writes the rounded copy the model computes with. ``step_count`` counts the updates that were made: a skipped
    one leaves everything as it was.
    """

    def __init__(self, buffer: ParameterBuffer, *, beta1: float, beta2: float, epsilon: float, kernels: str):
        self.buffer = buffer
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.kernels = kernels
        self.step_count = 0
        self.runs = AdamWRuns(run for shard in buffer.updated for run in shard.runs())
        size = sum(shard.length for shard in buffer.updated)
        self.exp_avg = torch.zeros(size, dtype=torch.float32, device=buffer.params.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.low_precision = None if buffer.params.dtype == torch.float32 else buffer.params
        self.master = buffer.params if self.low_precision is None else torch.zeros_like(self.exp_avg)
        if self.low_precision is not None:
            for shard in buffer.updated:
                self.master_of(shard).copy_(shard.of(buffer.params))

    def master_start(self, place: Shard | Run) -> int:
        """Where ``place`` begins in ``master``, which is laid out as the parameters or as the moments."""
        return place.flat if self.low_precision is None else place.state

    def master_of(self, place: Shard | Run) -> torch.Tensor:
        """The master weights of ``place``, a view."""
        start = self.master_start(place)
        return self.master[start : start + place.length]

    def counted_master(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """As ``buffer.counted_grads``, of the weights."""
        for run in self.buffer.counted_runs:
            yield self.master_of(run), run.decays

    def step(self, *, lr: float, weight_decay: float, grad_multiplier: torch.Tensor) -> None:
        """One update with gradients of ``buffer.grads`` · ``grad_multiplier`` (a scalar on the device)."""
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
        self.buffer.wait_for_params()  # what the update before still sends
        functional.adamw_step_(
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.buffer.grads,
            scalars,
            runs=self.runs,
            low_precision=self.low_precision,
            impl=self.kernels,
        )
        self.buffer.gather_params()

    def refresh_parameters(self) -> None:
        """Write the model's parameters from the master weights, after these were loaded."""
        if self.low_precision is not None:
            for shard in self.buffer.updated:
                shard.of(self.low_precision).copy_(self.master_of(shard))
        self.buffer.gather_params()
        self.buffer.wait_for_params()
