"""A case of the kernels' benchmark and of their check on a device, and what cases are made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench.closeness import TOLERANCE, close

BATCH = 16
P, SEED, LAYER = 0.1, 1234, 3
MASK: dict[str, Any] = {"p": P, "seed": SEED, "layer": LAYER}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    ``inputs`` makes new ones; the callables take them all. ``kernel`` gives a tensor or several, ``exact`` the same
    from the eager reference. ``rival`` is the forward computation as a user of PyTorch writes it, of all inputs; where
    ``leaves`` is not 0 the case is its backward pass, with respect to so many first inputs and from the last ones, one
    for each result, as the incoming gradients.
    """

    name: str
    shape: str
    inputs: Callable[[], list[Tensor]]
    kernel: Callable[..., Any]
    exact: Callable[..., Any]
    rival: Callable[..., Any] | None
    floor: int
    """Bytes the op has to move, vectors and statistics of rows left out."""
    leaves: int = 0
    in_place: int = 0
    """So many first inputs are written into; they are the result."""


def incoming(y: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of the results ``y``: the last inputs."""
    return tuple(inputs[-1 if isinstance(y, Tensor) else -len(y) :])


def gradients(function: Callable[..., Any], leaves: int) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of ``function`` with respect to its first ``leaves`` inputs, from the last ones."""

    def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        taken = [x.detach().requires_grad_() for x in inputs[:leaves]]
        y = function(*taken, *inputs[leaves:])
        return torch.autograd.grad(y, taken, incoming(y, inputs))

    return backward


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(case: Case) -> None:
    """Raises AssertionError where the kernel's result is not the reference's. Sums over rows get more room."""
    torch.manual_seed(1)
    inputs = case.inputs()
    if case.in_place:
        ours, exact = ([x.clone() for x in inputs] for _ in range(2))
        case.kernel(*ours)
        case.exact(*exact)
        pairs = list(zip(ours[: case.in_place], exact[: case.in_place], strict=True))
    else:
        pairs = list(zip(_tensors(case.kernel(*inputs)), _tensors(case.exact(*inputs)), strict=True))
    rows = pairs[0][0].dim()
    for index, (actual, expected) in enumerate(pairs):
        room = 1 if actual.dim() == rows and not case.in_place else 8
        close(actual, expected, room * max(TOLERANCE[actual.dtype], 1e-5), f"{case.name} {case.shape} [{index}]")


class Shapes:
    """Makes tensors of one dtype on one device."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.hidden, self.dtype, self.device = rows, hidden, dtype, device
        self.size = dtype.itemsize

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device).mul_(scale).to(dtype or self.dtype)

    def activations(self) -> Tensor:
        return self.normal(self.rows // BATCH, BATCH, self.hidden)

    def samples(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device) + (1 << 33)

    @property
    def label(self) -> str:
        return f"{self.rows}×{self.hidden} {str(self.dtype).removeprefix('torch.')}"

    def floor(self, multiple: float) -> int:
        return int(multiple * self.rows * self.hidden * self.size)
