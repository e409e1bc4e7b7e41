"""The kernels as cases to count, check and time: inputs, our launch, the exact result, what PyTorch would be asked for.

To add a kernel, write a function that yields its cases and put it into ``GROUPS``. Everything works on meta tensors
too, where nothing is computed: that is how the launches are found that ``aot.py`` compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimegatron.kernels import philox, reference
from trimegatron.kernels.adamw_scalars import adamw_scalars

BATCH = 16
P, SEED, LAYER = 0.1, 1234, 3
_MASK: dict[str, Any] = {"p": P, "seed": SEED, "layer": LAYER}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    ``inputs`` makes new ones; the callables take them all. ``kernel`` gives a tensor or several, ``exact`` the same
    from the eager reference. ``rival`` is the forward computation as a user of PyTorch writes it, of all inputs; where
    ``leaves`` is not 0 the case is its backward pass, with respect to so many first inputs and from the last one as
    the incoming gradient.
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


def _gradients(function: Callable[..., Tensor], leaves: int) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of ``function`` with respect to its first ``leaves`` inputs, from the last input."""

    def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        taken = [x.detach().requires_grad_() for x in inputs[:leaves]]
        return torch.autograd.grad(function(*taken, *inputs[leaves:]), taken, inputs[-1])

    return backward


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


def norm_cases(s: Shapes) -> Iterator[Case]:
    from trimegatron.kernels import layer_norm

    def vectors() -> list[Tensor]:
        return [s.activations(), s.normal(s.hidden), s.normal(s.hidden)]

    def norm(x: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return F.layer_norm(x, (s.hidden,), w, b, 1e-5)

    def backward(x: Tensor, w: Tensor, _: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor) -> Any:
        return layer_norm.layer_norm_backward(dy, x, w, mean, rstd)

    def backward_inputs() -> list[Tensor]:
        x, w, b = vectors()
        rows = x.float().flatten(0, -2)
        rstd = torch.rsqrt(rows.var(dim=-1, correction=0) + 1e-5)
        return [x, w, b, rows.mean(dim=-1), rstd, s.activations()]

    yield Case("layer_norm_forward", s.label, vectors, lambda x, w, b: layer_norm.layer_norm_forward(x, w, b, 1e-5)[0],
               reference.layer_norm, norm, s.floor(2))  # fmt: skip
    exact = _gradients(lambda x, w, b, *_: reference.layer_norm(x, w, b), 3)
    yield Case("layer_norm_backward", s.label, backward_inputs, backward, exact, norm, s.floor(3), leaves=3)


def gelu_cases(s: Shapes) -> Iterator[Case]:
    from trimegatron.kernels import bias_gelu

    def inputs() -> list[Tensor]:
        return [s.activations(), s.normal(s.hidden)]

    def gelu(x: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return F.gelu(x + b, approximate="tanh")

    yield Case("bias_gelu_forward", s.label, inputs, lambda x, b: bias_gelu.bias_gelu_forward(x, b, "tanh"),
               reference.bias_gelu, gelu, s.floor(2))  # fmt: skip
    yield Case("bias_gelu_backward", s.label, lambda: [*inputs(), s.activations()],
               lambda x, b, dy: bias_gelu.bias_gelu_backward(dy, x, b, "tanh"),
               _gradients(lambda x, b, _: reference.bias_gelu(x, b), 2), gelu, s.floor(3), leaves=2)  # fmt: skip


def dropout_cases(s: Shapes) -> Iterator[Case]:
    from trimegatron.kernels import bias_dropout_add

    words = (P, SEED, int(philox.Site.MLP_OUTPUT), LAYER, 0)
    mask = _MASK | {"site": philox.Site.MLP_OUTPUT}

    def inputs() -> list[Tensor]:
        return [s.activations(), s.normal(s.hidden), s.activations(), s.samples(BATCH)]

    def exact(x: Tensor, b: Tensor, residual: Tensor, samples: Tensor, *_: Tensor) -> Tensor:
        return reference.bias_dropout_add(x, b, residual, sample_numbers=samples, **mask)

    def forward(x: Tensor, b: Tensor, residual: Tensor, samples: Tensor) -> Tensor:
        return bias_dropout_add.bias_dropout_add_forward(x, b, residual, samples, *words)

    def rival(x: Tensor, b: Tensor, residual: Tensor, *_: Tensor) -> Tensor:
        return residual + F.dropout(x + b, P)

    def backward(x: Tensor, b: Tensor, _: Tensor, samples: Tensor, dy: Tensor) -> Any:
        return bias_dropout_add.bias_dropout_add_backward(dy, b, samples, x.dtype, *words)

    yield Case("bias_dropout_add_forward", s.label, inputs,
               forward, exact, rival, s.floor(3))  # fmt: skip
    yield Case("bias_dropout_add_backward", s.label, lambda: [*inputs(), s.activations()], backward,
               _gradients(exact, 2), rival, s.floor(2), leaves=2)  # fmt: skip


def softmax_cases(s: Shapes) -> Iterator[Case]:
    """Causal; the last dimension is the keys, and so many queries as there are rows."""
    from trimegatron.kernels import softmax

    queries = min(s.rows, s.hidden)
    shape = (1, s.rows // queries, queries, s.hidden)
    elements, scale = shape[1] * queries * s.hidden, 0.5
    label = f"{shape[1]}×{queries}×{s.hidden} {str(s.dtype).removeprefix('torch.')}"
    words = (scale, True, P, SEED, LAYER, 0, 0)

    def scores() -> Tensor:
        return s.normal(*shape, scale=4.0)

    def later(x: Tensor) -> Tensor:
        return torch.ones(queries, s.hidden, dtype=torch.bool, device=x.device).triu(s.hidden - queries + 1)

    def rival(x: Tensor, *_: Tensor) -> Tensor:
        return (x * scale).masked_fill(later(x), -torch.inf).softmax(dim=-1)

    def exact_dropout(x: Tensor, samples: Tensor, *_: Tensor) -> Tensor:
        return reference.softmax_dropout(x, None, scale, causal=True, sample_numbers=samples, **_MASK)

    def with_statistics() -> list[Tensor]:
        x = scores()
        value = (x.float() * scale).masked_fill(
            torch.ones_like(x, dtype=torch.bool).triu(s.hidden - queries + 1), -1e30
        )
        top = value.amax(dim=-1)
        total = (value - top.unsqueeze(-1)).exp().sum(dim=-1)
        return [x, s.samples(1), torch.stack([top.flatten(), total.flatten()]), s.normal(*shape)]

    def dropout_backward(x: Tensor, samples: Tensor, statistics: Tensor, dy: Tensor) -> Tensor:
        return softmax.softmax_dropout_backward(dy, x, None, statistics, samples, *words)

    yield Case("causal_softmax_forward", label, lambda: [scores()],
               lambda x: softmax.scaled_causal_softmax_forward(x, scale),
               lambda x: reference.scaled_causal_softmax(x, scale), rival, int(1.5 * elements * s.size))  # fmt: skip
    yield Case("causal_softmax_backward", label,
               lambda: [scores(), rival(scores()), s.normal(*shape)],
               lambda x, y, dy: softmax.scaled_softmax_backward(dy, y, scale, True),
               lambda x, y, dy: (scale * y.float() * (dy.float() - (y.float() * dy.float()).sum(-1, True))).to(x.dtype),
               rival, 2 * elements * s.size, leaves=1)  # fmt: skip
    yield Case("softmax_dropout_forward", label, lambda: [scores(), s.samples(1)],
               lambda x, samples: softmax.softmax_dropout_forward(x, None, samples, *words)[0], exact_dropout,
               lambda x, _: F.dropout(rival(x), P), int(1.5 * elements * s.size))  # fmt: skip
    yield Case("softmax_dropout_backward", label, with_statistics, dropout_backward, _gradients(exact_dropout, 1),
               lambda x, *_: F.dropout(rival(x), P), 2 * elements * s.size, leaves=1)  # fmt: skip


def optimizer_cases(s: Shapes) -> Iterator[Case]:
    """Over rows · hidden parameters: fp32 main gradients, and a copy in ``dtype`` where that is not fp32."""
    from trimegatron.kernels import adamw

    n = s.rows * s.hidden
    low = s.dtype != torch.float32
    values = adamw_scalars(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, step=3, grad_multiplier=0.5)

    def flat() -> Tensor:
        return s.normal(n, dtype=torch.float32)

    def inputs() -> list[Tensor]:
        state = [flat(), flat(), flat().abs_(), torch.empty(n if low else 0, dtype=s.dtype, device=s.device)]
        return [*state, flat(), torch.tensor(values, device=s.device)]

    def ours(p: Tensor, m: Tensor, v: Tensor, copy: Tensor, g: Tensor, scalars: Tensor) -> None:
        adamw.adamw_step_(p, m, v, g, scalars, n, copy if low else None)

    def exact(p: Tensor, m: Tensor, v: Tensor, copy: Tensor, g: Tensor, scalars: Tensor) -> None:
        reference.adamw_step_(p, m, v, g, scalars, num_decayed=n, low_precision=copy if low else None)

    def rival(p: Tensor, m: Tensor, v: Tensor, copy: Tensor, g: Tensor, scalars: Tensor) -> None:
        steps = [torch.ones((), device=p.device)]
        torch._fused_adamw_(
            [p], [g], [m], [v], [], steps, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        if low:
            copy.copy_(p)

    label = f"{n:,} {str(s.dtype).removeprefix('torch.')}"
    yield Case("adamw", label, inputs, ours, exact, rival, n * (28 + (s.size if low else 0)), in_place=4)
    yield Case("sum_of_squares", label, lambda: [flat()], adamw.sum_of_squares, reference.sum_of_squares,
               lambda g: torch.linalg.vector_norm(g).square(), 4 * n)  # fmt: skip


GROUPS: tuple[Callable[[Shapes], Iterator[Case]], ...] = (norm_cases, gelu_cases, dropout_cases, softmax_cases)
"""At every number of rows and hidden size; ``optimizer_cases`` depend on the product alone."""


def cases(rows: int, hidden: int, dtype: torch.dtype, device: str | torch.device) -> Iterator[Case]:
    """Every op at this shape, the optimizer's apart."""
    shapes = Shapes(rows, hidden, dtype, torch.device(device))
    for group in GROUPS:
        yield from group(shapes)
