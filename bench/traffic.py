"""How many bytes a kernel moves: a model of its loads and stores from the tensors it is given.

Each tensor moves once, as a whole, but for what ``_TIMES`` and the causal mask say. That this is what the compiled
kernels do, the tests show by comparing ``rows_per_tile`` with the load and store instructions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trimegatron.bench.aot import Launch

_TIMES = {("_adamw_kernel", name): 2 for name in ("param", "exp_avg", "exp_avg_sq")}
"""(kernel, tensor) -> how often it moves: these are read and written."""
_HALF_WHERE_CAUSAL = ("scores", "saved", "dy")
"""Of these a causal kernel reads the part that is visible."""


def moved_bytes(launches: list[Launch]) -> int:
    """What the launches of one op move between memory and the chip."""
    total = 0.0
    for launch in launches:
        name = launch.kernel.__name__
        for parameter, value in zip(launch.kernel.arg_names, launch.args, strict=False):
            if isinstance(value, Tensor):
                share = 0.5 if launch.constexprs.get("CAUSAL") and parameter in _HALF_WHERE_CAUSAL else 1.0
                total += value.numel() * value.element_size() * share * _TIMES.get((name, parameter), 1)
    return int(total)


class Moves(NamedTuple):
    """Tensors of rows that a kernel reads and writes for each tile, and the vectors of a tile's width it reads."""

    reads: int
    writes: int
    vectors: int = 0
    loops: int = 0
    """Loops over the rows or over a row, which read the tensors once each."""


ROWS_PER_TILE = {
    "layer_norm_forward": Moves(1, 1, vectors=2),
    "layer_norm_backward": Moves(2, 1, vectors=1, loops=1),
    "layer_norm_backward_in_parts": Moves(3, 1, loops=1),
    "causal_softmax_forward": Moves(1, 1),
    "causal_softmax_backward": Moves(2, 1),
    "masked_softmax_backward": Moves(2, 1),
    "softmax_dropout_forward": Moves(1, 1),
    "softmax_dropout_backward": Moves(2, 1),
    "bias_gelu_forward": Moves(1, 1, vectors=1),
    "bias_gelu_backward": Moves(2, 1, vectors=1, loops=1),
    "bias_gelu_backward_erf": Moves(2, 1, vectors=1, loops=1),
    "dropout_forward": Moves(2, 1, vectors=1),
    "dropout_backward": Moves(1, 1, loops=1),
    "add_forward": Moves(2, 1, vectors=1),
    "column_sum": Moves(1, 0, loops=1),
    "attention_dropout": Moves(1, 1),
    "sum_of_squares": Moves(1, 0, loops=1),
    "long_softmax_forward": Moves(1, 1, loops=2),
    "long_softmax_backward": Moves(2, 1, loops=2),
    "long_softmax_dropout_forward": Moves(1, 1, loops=2),
    "long_softmax_dropout_backward": Moves(2, 1, loops=2),
}
"""By the names of ``tests/kernels/aot_gate.py``: the table of bytes that the ops are built to, in numbers of rows.
(Not there: AdamW, whose tensors differ in dtype.) Of a norm in parts the weight is read with the rows."""
