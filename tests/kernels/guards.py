"""Buffers between guard bands of NaN: reads past an end poison the result, writes past it are found."""

from __future__ import annotations

import torch
from torch import Tensor

_BAND = 64  # elements


class Guards:
    """The buffers of one test."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []
        self._full = torch.full

    def empty(self, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        """Like ``torch.empty``, full of NaN where the dtype has one."""
        dtype = dtype or torch.float32
        if not dtype.is_floating_point:
            return self._full(shape, 0, dtype=dtype)
        count = shape.numel()
        whole = self._full((count + 2 * _BAND,), float("nan"), dtype=dtype)
        self.buffers.append((whole, count))
        return whole[_BAND : _BAND + count].view(shape)

    def put(self, x: Tensor) -> Tensor:
        """A copy of ``x`` between guard bands, with its strides where they are dense."""
        order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
        dense = self.empty(torch.Size(x.shape[d] for d in order), x.dtype)
        dense.copy_(x.detach().permute(order))
        return dense.permute([order.index(d) for d in range(x.dim())])

    def check(self) -> None:
        """Fails when a band was written into."""
        for whole, count in self.buffers:
            for band in (whole[:_BAND], whole[_BAND + count :]):
                assert bool(band.isnan().all()), f"wrote outside a buffer of {count} elements of {whole.dtype}"
