"""Residual, dropout and layer norm in one pass: total = residual + dropout(x + x_bias) and y = norm(total), for x
[s, b, h]. The kernels are those of ``layer_norm.py``.
"""

import torch
from torch import Tensor

from trimegatron.kernels import layer_norm
from trimegatron.kernels.layer_norm import Dropout


def bias_dropout_add_layer_norm_forward(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    sample_numbers: Tensor | None,
    eps: float,
    zero_centred: bool,
    p: float,
    seed: int,
    site: int,
    layer: int,
    position_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """total and y like residual; mean and rstd fp32 of its rows, flattened."""
    dropout = None if sample_numbers is None else Dropout(sample_numbers, p, seed, site, layer, position_offset)
    total, y, mean, rstd = layer_norm.forward(
        x, weight, bias, eps, zero_centred, residual=residual, x_bias=x_bias, dropout=dropout
    )
    assert total is not None
    return total, y, mean, rstd


def bias_dropout_add_layer_norm_backward(
    dtotal: Tensor | None,
    dy: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    x_bias: Tensor | None,
    sample_numbers: Tensor | None,
    dtype: torch.dtype,
    zero_centred: bool,
    p: float,
    seed: int,
    site: int,
    layer: int,
    position_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dresidual like total; dx in ``dtype``, empty without dropout, where it is dresidual; dweight and dbias like
    weight; dx_bias like x_bias, empty without one. ``dtotal`` is what comes back along the residual."""
    dropout = None if sample_numbers is None else Dropout(sample_numbers, p, seed, site, layer, position_offset)
    dresidual, dx, dweight, dbias, dx_bias = layer_norm.backward(
        dy, total, weight, mean, rstd, zero_centred,
        dtotal=dtotal, x_bias=x_bias, dropout=dropout, dropped_dtype=dtype,
    )  # fmt: skip
    nothing = torch.empty(0, dtype=dtype, device=total.device)
    return dresidual, nothing if dx is None else dx, dweight, dbias, nothing.clone() if dx_bias is None else dx_bias
