"""Linear layers cut over the tensor-parallel group.

Legend: s sequence, b micro-batch, i input features, o output features, t tensor-parallel size; a rank holds i/t or o/t
of them. With sequence parallelism what comes into a column-parallel layer and out of a row-parallel one is [s/t, b, …].
Source: Shoeybi et al., "Megatron-LM" (2019), section 3; ``region.py`` says what is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from trimegatron.mesh import Axis
from trimegatron.tensor_parallel.parameter import make_parameter
from trimegatron.tensor_parallel.region import Region
from trimegatron.tensor_parallel.remade import Remade


class ColumnParallelMatmul(torch.autograd.Function):
    """y = x Wᵀ (+ bias) with W cut by output features: x enters the region, in backward dx leaves it.

    Backward sends dx off and computes dW meanwhile. What is kept of x is the rank's own piece, or what it is remade
    from; it enters once more for dW, while dx is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        region: Region,
        remake: Callable[..., torch.Tensor],
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, *sources)
        ctx.has_bias, ctx.region, ctx.remake = bias is not None, region, remake
        return F.linear(region.enter(x).wait(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        weight, *sources = ctx.saved_tensors
        entering = ctx.region.enter(ctx.remake(*sources))
        leaving = ctx.region.leave(dy.matmul(weight)) if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(dy, entering.wait())
        dbias = dy.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
        dx = leaving.wait() if leaving is not None else None
        return dx, dweight, dbias, None, None, *(None for _ in sources)


class RowParallelMatmul(torch.autograd.Function):
    """y = Σ over ranks of x Wᵀ with W cut by input features: y leaves the region, in backward dy enters it.

    While dy enters, backward makes x again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        region: Region,
        remake: Callable[..., torch.Tensor],
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, *sources)
        ctx.region, ctx.remake = region, remake
        return region.leave(F.linear(x, weight)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        weight, *sources = ctx.saved_tensors
        entering = ctx.region.enter(dy)
        x = ctx.remake(*sources)
        dy = entering.wait()
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(dy, x), None, None, *(None for _ in sources)


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW = dyᵀ x over all tokens: [s, b, o], [s, b, i] -> [o, i]."""
    return dy.flatten(0, -2).t().matmul(x.flatten(0, -2))


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut over ``axis``: [s, b, i] -> [s, b, o/t].

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
        sequence_parallel: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        where: dict[str, Any] = {"shard_dim": 0, "axis": axis, "dtype": dtype, "device": device}
        self.weight = make_parameter((output_size, input_size), init_std=init_std, **where)
        self.bias = make_parameter((output_size,), **where)
        self.region = Region(axis.group, sequence_parallel)
        self.add_bias = add_bias

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        bias = self.bias if self.add_bias else None
        return column_parallel_linear(x, self.weight, bias, self.region)


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut over ``axis``: [s, b, i/t] -> [s, b, o].

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
        sequence_parallel: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.weight = make_parameter(
            (output_size, input_size), shard_dim=1, axis=axis, init_std=init_std, dtype=dtype, device=device
        )
        self.bias = make_parameter((output_size,), is_partial=sequence_parallel, dtype=dtype, device=device)
        self.region = Region(axis.group, sequence_parallel)

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        x = Remade.of(x)
        return RowParallelMatmul.apply(x.value, self.weight, self.region, x.function, *x.sources)


def column_parallel_linear(
    x: torch.Tensor | Remade, weight: torch.Tensor, bias: torch.Tensor | None, region: Region
) -> torch.Tensor:
    """The functional form: also the output head, whose weight belongs to the embedding."""
    x = Remade.of(x)
    return ColumnParallelMatmul.apply(x.value, weight, bias, region, x.function, *x.sources)
