"""Linear layers cut over the tensor-parallel group.

Legend: s sequence, b micro-batch, i input features, o output features; a rank holds i/t or o/t of them.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from trimegatron.mesh import Axis
from trimegatron.tensor_parallel.parameter import make_parameter


class ColumnParallelMatmul(torch.autograd.Function):
    """y = x Wᵀ (+ bias) with W cut by output features: no communication forward, one all-reduce of dx backward.

    Backward starts the all-reduce of dx and computes dW while it runs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = work = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dy.matmul(weight)
            work = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dweight = weight_gradient(dy, x)
        if ctx.has_bias:
            dbias = dy.flatten(0, -2).sum(dim=0)
        if work is not None:
            work.wait()
        return dx, dweight, dbias, None


class RowParallelMatmul(torch.autograd.Function):
    """y = Σ over ranks of x Wᵀ with W cut by input features: one all-reduce of y forward, no communication backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return dy.matmul(weight), weight_gradient(dy, x), None


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW = dyᵀ x over all tokens: [s, b, o], [s, b, i] -> [o, i]."""
    return dy.flatten(0, -2).t().matmul(x.flatten(0, -2))


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut over ``axis``: [s, b, i] on every rank -> [s, b, o/t].

    Args:
        add_bias: add the bias here. Where the next operation fuses it, False, and the caller takes ``self.bias``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        axis: Axis,
        init_std: float,
        add_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        where: dict[str, Any] = {"shard_dim": 0, "axis": axis, "dtype": dtype, "device": device}
        self.weight = make_parameter((output_size, input_size), init_std=init_std, **where)
        self.bias = make_parameter((output_size,), **where)
        self.group = axis.group
        self.add_bias = add_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.add_bias else None
        return column_parallel_linear(x, self.weight, bias, self.group)


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut over ``axis``: [s, b, i/t] -> [s, b, o] on every rank.

    The bias is not added here: it comes after the reduction, fused with dropout and residual. The caller takes
    ``self.bias``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        axis: Axis,
        init_std: float,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.weight = make_parameter(
            (output_size, input_size), shard_dim=1, axis=axis, init_std=init_std, dtype=dtype, device=device
        )
        self.bias = make_parameter((output_size,), dtype=dtype, device=device)
        self.group = axis.group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return F.linear(x, self.weight)
        return RowParallelMatmul.apply(x, self.weight, self.group)


def column_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: ProcessGroup | None
) -> torch.Tensor:
    """The functional form: also the output head, whose weight belongs to the embedding."""
    if group is None:
        return F.linear(x, weight, bias)
    return ColumnParallelMatmul.apply(x, weight, bias, group)
