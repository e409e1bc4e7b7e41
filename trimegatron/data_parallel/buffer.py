"""Parameters and their main gradients as views of two flat buffers.

One buffer makes one all-reduce, one norm and one optimizer launch of what would be hundreds.
docs/gradients.md states the contract: who adds, who divides, in which dtype and order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trimegatron.mesh import Mesh
from trimegatron.tensor_parallel.parameter import ParameterSpec, spec_of

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many elements, so that kernels load 128 bits whatever came before it."""


@dataclass(frozen=True)
class ParameterSlice:
    """Where one parameter lies in the buffers, in elements."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a buffer that is laid out alike, in its own shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


class ParameterBuffer:
    """The parameters of a model in one flat tensor, their main gradients in another.

    The order is [tied copy | decayed, sharded | decayed, replicated | others, replicated | others, sharded]: what the
    optimizer decays is a prefix of ``num_decayed`` elements, what all tensor-parallel ranks hold alike is one range
    (``replicated``), which the gradient norm must count once, and what another stage answers for is not counted.
    Decayed are weights of two dimensions, as Megatron's.

    Gradients of the parameters' own dtype accumulate where they are (``parameter.grad`` is the view); others are
    added into the main gradient, and dropped, by a hook as soon as each is there.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, grad_dtype: torch.dtype):
        def decays(parameter: nn.Parameter) -> bool:
            return parameter.dim() >= 2

        def place(item: tuple[str, nn.Parameter]) -> int:
            spec = spec_of(item[1])
            if spec.is_tied_copy:
                return 0
            return (1 if spec.is_sharded else 2) if decays(item[1]) else (4 if spec.is_sharded else 3)

        ordered = sorted(named_parameters, key=place)  # stable: module order within each of the five
        first = ordered[0][1]
        self.slices: list[ParameterSlice] = []
        ends = [0, 0, 0, 0, 0]
        position = 0
        for item in ordered:
            name, parameter = item
            assert parameter.dtype == first.dtype and parameter.device == first.device
            self.slices.append(ParameterSlice(name, parameter, position))
            position += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            ends[place(item)] = position
        for i in range(1, 5):
            ends[i] = max(ends[i], ends[i - 1])
        self.num_decayed = ends[2]
        self.replicated = slice(ends[1], ends[3])
        self.sharded = (slice(ends[0], ends[1]), slice(ends[3], ends[4]))
        self.params = torch.zeros(position, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(position, dtype=grad_dtype, device=first.device)
        for piece in self.slices:
            self._adopt(piece)

    def _adopt(self, piece: ParameterSlice) -> None:
        parameter, main_grad = piece.parameter, piece.view(self.grads)
        with torch.no_grad():
            piece.view(self.params).copy_(parameter)
            parameter.data = piece.view(self.params)
        if parameter.dtype == self.grads.dtype:
            parameter.grad = main_grad
            return

        def accumulate(p: torch.Tensor) -> None:
            assert p.grad is not None
            main_grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

    def zero_grad(self) -> None:
        """Set the main gradients to zero, before the first micro-batch of a step."""
        self.grads.zero_()

    def reduce_grads(self, mesh: Mesh) -> None:
        """Sum partial gradients over the tensor-parallel ranks, then all over the data-parallel ones; nobody divides
        (docs/gradients.md)."""
        partial = [piece.view(self.grads) for piece in self.slices if piece.spec.is_partial]
        if mesh.tensor.group is not None and partial:
            total = torch.cat([gradient.flatten() for gradient in partial])
            dist.all_reduce(total, group=mesh.tensor.group)
            for gradient, summed in zip(partial, total.split([g.numel() for g in partial]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        if mesh.data.group is not None:
            dist.all_reduce(self.grads, group=mesh.data.group)

    def count_zero_grads(self, mesh: Mesh) -> float:
        """How many elements of the whole model's gradient are exactly zero; padding is not counted."""
        counted = [p for p in self.slices if (p.spec.is_sharded or mesh.tensor.rank == 0) and not p.spec.is_tied_copy]
        zeros = [(piece.spec.valid(piece.view(self.grads)) == 0).sum() for piece in counted]
        total = torch.stack(zeros).sum() if zeros else torch.zeros((), dtype=torch.int64, device=self.grads.device)
        if mesh.model.group is not None:
            dist.all_reduce(total, group=mesh.model.group)
        return total.item()
