"""The kernels as cases to count, check and time: inputs, our launch, the exact result, what PyTorch would be asked for.

To add a kernel, write a function that yields its cases and put it into ``GROUPS``. Everything works on meta tensors
too, where nothing is computed: that is how the launches are found that ``aot.py`` compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimegatron.bench.attention_cases import flash_cases, softmax_cases
from trimegatron.bench.case import BATCH, LAYER, MASK, SEED, Case, P, Shapes, gradients
from trimegatron.kernels import functional, philox, reference
from trimegatron.kernels.adamw_runs import ALIGNMENT, AdamWRuns, Run
from trimegatron.kernels.adamw_scalars import adamw_scalars


def norm_cases(s: Shapes) -> Iterator[Case]:
    from trimegatron.kernels import layer_norm

    def vectors() -> list[Tensor]:
        return [s.activations(), s.normal(s.hidden), s.normal(s.hidden)]

    def norm(x: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return F.layer_norm(x, (s.hidden,), w, b, 1e-5)

    def backward(x: Tensor, w: Tensor, _: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor) -> Any:
        return layer_norm.layer_norm_backward(dy, x, w, mean, rstd)

    def exact(x: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return functional.layer_norm(x, w, b, impl="reference")

    def backward_inputs() -> list[Tensor]:
        x, w, b = vectors()
        return [x, w, b, *reference.layer_norm_forward(x, w, b, 1e-5)[1:], s.activations()]

    yield Case("layer_norm_forward", s.label, vectors, lambda x, w, b: layer_norm.layer_norm_forward(x, w, b, 1e-5)[0],
               exact, norm, s.floor(2))  # fmt: skip
    yield Case("layer_norm_backward", s.label, backward_inputs, backward, gradients(exact, 3), norm, s.floor(3),
               leaves=3)  # fmt: skip


def add_norm_cases(s: Shapes) -> Iterator[Case]:
    """Residual and norm in one pass, alone and behind bias and dropout; both results receive a gradient."""
    from trimegatron.kernels import add_layer_norm

    site = philox.Site.MLP_OUTPUT
    words = (P, SEED, int(site), LAYER, 0)
    forward = add_layer_norm.bias_dropout_add_layer_norm_forward
    backward = add_layer_norm.bias_dropout_add_layer_norm_backward

    def add(x: Tensor, residual: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return functional.add_layer_norm(x, residual, w, b, impl="reference")

    def dropout(x: Tensor, x_bias: Tensor, residual: Tensor, w: Tensor, b: Tensor, samples: Tensor, *_: Tensor) -> Any:
        return functional.bias_dropout_add_layer_norm(
            x, x_bias, residual, w, b, sample_numbers=samples, site=site, impl="reference", **MASK
        )

    def rival(x: Tensor, residual: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, F.layer_norm(total, (s.hidden,), w, b, 1e-5)

    def dropout_rival(x: Tensor, x_bias: Tensor, residual: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Any:
        return rival(F.dropout(x + x_bias, P), residual, w, b)

    def inputs() -> list[Tensor]:
        return [s.activations(), s.activations(), s.normal(s.hidden), s.normal(s.hidden)]

    def dropout_inputs() -> list[Tensor]:
        x, *others = inputs()
        return [x, s.normal(s.hidden), *others, s.samples(BATCH)]

    def backward_inputs(made: list[Tensor], function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        total = function(*made)[0]
        w, b = made[-2:] if function is add else made[3:5]
        return [*made, total, *reference.layer_norm_forward(total, w, b, 1e-5)[1:], s.activations(), s.activations()]

    def add_backward(x: Tensor, _: Tensor, w: Tensor, __: Tensor, total: Tensor, mean: Tensor, rstd: Tensor,
                     dtotal: Tensor, dy: Tensor) -> Any:  # fmt: skip
        dx, _, dw, db, _ = backward(dtotal, dy, total, w, mean, rstd, None, None, x.dtype, False, *words)
        return dx, dx, dw, db

    def dropout_backward(x: Tensor, x_bias: Tensor, _: Tensor, w: Tensor, __: Tensor, samples: Tensor, total: Tensor,
                         mean: Tensor, rstd: Tensor, dtotal: Tensor, dy: Tensor) -> Any:  # fmt: skip
        dresidual, dx, dw, db, dx_bias = backward(
            dtotal, dy, total, w, mean, rstd, x_bias, samples, x.dtype, False, *words
        )
        return dx, dx_bias, dresidual, dw, db

    yield Case("add_layer_norm_forward", s.label, inputs,
               lambda x, residual, w, b: forward(x, None, residual, w, b, None, 1e-5, False, *words)[:2],
               add, rival, s.floor(4))  # fmt: skip
    yield Case("add_layer_norm_backward", s.label, lambda: backward_inputs(inputs(), add), add_backward,
               gradients(add, 4), rival, s.floor(4), leaves=4)  # fmt: skip
    yield Case("bias_dropout_add_layer_norm_forward", s.label, dropout_inputs,
               lambda x, x_bias, residual, w, b, samples:
               forward(x, x_bias, residual, w, b, samples, 1e-5, False, *words)[:2],
               dropout, dropout_rival, s.floor(4))  # fmt: skip
    yield Case("bias_dropout_add_layer_norm_backward", s.label, lambda: backward_inputs(dropout_inputs(), dropout),
               dropout_backward, gradients(dropout, 5), dropout_rival, s.floor(5), leaves=5)  # fmt: skip


def cross_entropy_cases(s: Shapes) -> Iterator[Case]:
    """Over a vocabulary of the hidden size: the loss with its gradient in one pass, each of them alone, and what ranks
    that share the vocabulary exchange."""
    from trimegatron.kernels import cross_entropy

    words = (s.hidden, -100, 1.0, 0.0)

    def inputs() -> list[Tensor]:
        target = torch.randint(s.hidden, (s.rows,), device=s.device)
        return [s.normal(s.rows, s.hidden, scale=3.0), target, s.normal(s.rows, dtype=torch.float32)]

    def loss(logits: Tensor, target: Tensor, *_: Tensor) -> Tensor:
        return functional.cross_entropy(logits, target, impl="reference")

    def rival(logits: Tensor, target: Tensor, *_: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target, reduction="none")

    def with_sums() -> list[Tensor]:
        logits, target, dloss = inputs()
        return [logits, target, logits.float().logsumexp(dim=-1), dloss]

    def both(logits: Tensor, target: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
        value, _, dlogits = cross_entropy.cross_entropy_forward(logits, target, dloss, *words)
        return value, dlogits

    yield Case("cross_entropy_both", s.label, inputs, both, lambda *x: (loss(*x), *gradients(loss, 1)(*x)), None,
               s.floor(2))  # fmt: skip
    yield Case("cross_entropy_forward", s.label, lambda: inputs()[:2],
               lambda logits, target: cross_entropy.cross_entropy_forward(logits, target, None, *words)[0],
               loss, rival, s.floor(1))  # fmt: skip
    yield Case("cross_entropy_statistics", s.label, lambda: inputs()[:2],
               lambda logits, target: cross_entropy.cross_entropy_statistics(logits, target, 0, s.hidden, False),
               lambda logits, target: reference.cross_entropy_statistics(logits, target, 0, s.hidden, False), None,
               s.floor(1))  # fmt: skip
    yield Case("cross_entropy_backward", s.label, with_sums,
               lambda *x: cross_entropy.cross_entropy_backward(*x, 0, *words), gradients(loss, 1), rival, s.floor(2),
               leaves=1)  # fmt: skip


def gelu_cases(s: Shapes) -> Iterator[Case]:
    from trimegatron.kernels import bias_gelu

    def inputs() -> list[Tensor]:
        return [s.activations(), s.normal(s.hidden)]

    def gelu(x: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return F.gelu(x + b, approximate="tanh")

    def exact(x: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return functional.bias_gelu(x, b, impl="reference")

    yield Case("bias_gelu_forward", s.label, inputs, lambda x, b: bias_gelu.bias_gelu_forward(x, b, "tanh"),
               exact, gelu, s.floor(2))  # fmt: skip
    yield Case("bias_gelu_backward", s.label, lambda: [*inputs(), s.activations()],
               lambda x, b, dy: bias_gelu.bias_gelu_backward(dy, x, b, "tanh"),
               gradients(exact, 2), gelu, s.floor(3), leaves=2)  # fmt: skip


def dropout_cases(s: Shapes) -> Iterator[Case]:
    """With bias and residual; and the bias gradient where nothing is dropped."""
    from trimegatron.kernels import bias_dropout_add, column_sum

    words = (P, SEED, int(philox.Site.MLP_OUTPUT), LAYER, 0)
    mask = MASK | {"site": philox.Site.MLP_OUTPUT}

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
               gradients(exact, 2), rival, s.floor(2), leaves=2)  # fmt: skip
    yield Case("column_sum", s.label, lambda: [s.activations()], lambda x: column_sum.column_sum(x, x.dtype),
               lambda x: x.float().sum((0, 1)).to(x.dtype), lambda x: x.sum((0, 1)), s.floor(1))  # fmt: skip


def optimizer_cases(s: Shapes) -> Iterator[Case]:
    """Over rows · hidden parameters, rounded up to the alignment of shards: fp32 main gradients, and a copy in
    ``dtype`` where that is not fp32."""
    from trimegatron.kernels import adamw

    n = -(-s.rows * s.hidden // ALIGNMENT) * ALIGNMENT
    runs = AdamWRuns([Run(0, 0, n, True)])
    low = s.dtype != torch.float32
    values = adamw_scalars(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, step=3, grad_multiplier=0.5)

    def flat() -> Tensor:
        return s.normal(n, dtype=torch.float32)

    def inputs() -> list[Tensor]:
        state = [flat(), flat(), flat().abs_(), torch.empty(n if low else 0, dtype=s.dtype, device=s.device)]
        return [*state, flat(), torch.tensor(values, device=s.device)]

    def ours(p: Tensor, m: Tensor, v: Tensor, copy: Tensor, g: Tensor, scalars: Tensor) -> None:
        adamw.adamw_step_(p, m, v, g, scalars, runs.tiles(p.device), copy if low else None)

    def exact(p: Tensor, m: Tensor, v: Tensor, copy: Tensor, g: Tensor, scalars: Tensor) -> None:
        reference.adamw_step_(p, m, v, g, scalars, runs=runs.runs, low_precision=copy if low else None)

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


GROUPS: tuple[Callable[[Shapes], Iterator[Case]], ...] = (
    norm_cases, add_norm_cases, gelu_cases, dropout_cases, softmax_cases, flash_cases, cross_entropy_cases
)  # fmt: skip
"""At every number of rows and hidden size; ``optimizer_cases`` depend on the product alone."""


def cases(rows: int, hidden: int, dtype: torch.dtype, device: str | torch.device) -> Iterator[Case]:
    """Every op at this shape, the optimizer's apart."""
    shapes = Shapes(rows, hidden, dtype, torch.device(device))
    for group in GROUPS:
        yield from group(shapes)
