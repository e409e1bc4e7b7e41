"""The meta device, where tensors have shapes and no values, made fit for a whole training step: reads of values, the
attention of a GPU, and what would be in memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FusedAttention(TorchFunctionMode):
    """While entered, torch's attention is the form a GPU runs, which keeps no squares; on the meta device torch would
    choose that of plain matrix products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = fused_attention if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """torch's memory-efficient attention, with the arguments of ours that ``SelfAttention`` gives."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, 0.0, is_causal, scale=scale
    )[0]


class ReadsAsOne(TorchDispatchMode):
    """While entered, who reads a value from the meta device, where there are none, reads 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten._to_copy.default and args[0].is_meta and str(kwargs.get("device")) == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


class LiveBytes(TorchDispatchMode):
    """While entered, counts the bytes on the meta device that operators have made and that still live, each storage
    once: what is kept for backward passes (also of layers that backward runs again), gradients of activations, work
    space, the pipeline's receive buffers. Not of ``state``, which is counted elsewhere.
    """

    def __init__(self, *state: torch.Tensor):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in state}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self.known:
            return
        self.known.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self.known.discard(address)
        self.now -= num_bytes
