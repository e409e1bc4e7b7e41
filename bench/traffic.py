"""How many bytes a kernel moves: a model of its loads and stores from the tensors it is given; and what keeps a GPU
busy longer, these or the kernel's instructions.

Each tensor moves once, as a whole, but for what ``_TIMES`` and the causal mask say. That this is what the compiled
kernels do, the tests show by comparing ``rows_per_tile`` with the load and store instructions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trimegatron.bench import pipes
from trimegatron.bench.aot import Code, Launch

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


_PRODUCTS = {"_forward_kernel": 2, "_queries_kernel": 3, "_keys_kernel": 4}
"""Of matrices, for each tile of scores of flash attention."""


class Limits(NamedTuple):
    """Seconds that a GPU is busy with one element at the least, by what is busy: the busiest pipe, the matrix units
    (half precision, dense), memory."""

    pipe: str
    instructions: float
    products: float
    memory: float

    @property
    def share(self) -> float:
        """Of the instructions in what else bounds the kernel: above 1 they do."""
        return self.instructions / max(self.products, self.memory)


def limits(launch: Launch, code: Code, device: pipes.Device) -> Limits:
    """Of a kernel of rows, for each element; of flash attention, for each score that a query sees."""
    tile = launch.config.rows * launch.config.columns
    of_scores = [loop for loop in code.loops if loop["tensor"]]
    if of_scores:  # the shorter loop, without the diagonal, is walked once for each tile of the matrix
        instructions = min(of_scores, key=lambda loop: loop.total())
        flops = 2 * _PRODUCTS[launch.kernel.__name__] * launch.constexprs["WIDTH"]
        b, n, s, _ = launch.args[0].shape
        elements = b * n * s * s / 2
    else:
        # Loops over a causal row end half-way on the average.
        instructions, flops = code.tile_instructions, 0
        tile *= 2 if code.loops and launch.constexprs.get("CAUSAL") else 1
        elements = max(value.numel() for value in launch.args if isinstance(value, Tensor))
    pipe, cycles = pipes.busiest(instructions, tile / (32 * launch.config.num_warps))
    rate = device.clock * device.multiprocessors
    memory = moved_bytes([launch]) / elements / device.bandwidth
    return Limits(pipe, cycles / rate, flops / pipes.TENSOR_FLOPS / rate, memory)


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
