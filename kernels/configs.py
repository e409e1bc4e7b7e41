"""Launch configurations: what they hold, which of it a table may set for which kernel, and for which shapes a record
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Config:
    """Tile and launch parameters of one kernel. ``rows`` × ``columns`` is the tile a program holds at a time."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1


class TunedOp(NamedTuple):
    """One kernel whose configuration can come from a table."""

    module: str
    """File in ``kernels/`` that launches it, without the ending."""
    kernel: str
    shape: tuple[str, ...]
    """What the choice depends on, as ``launcher.configure`` is told: sizes and, as booleans, variants of the code."""
    parameters: tuple[str, ...]
    """Fields of ``Config`` that may be set. The others follow from the shape, as where a tile is as wide as a row."""
    least_columns: int = 8


_ROW, _TILE, _STAGES = ("rows", "num_warps"), ("rows", "columns", "num_warps"), ("num_stages",)
_NORM = ("hidden", "total", "dropout")
_FLASH = ("head_size", "dropout", "documents")

TUNED_OPS: dict[str, TunedOp] = {
    "layer_norm_forward": TunedOp("layer_norm", "_forward_kernel", _NORM, _ROW),
    "layer_norm_backward": TunedOp("layer_norm", "_backward_kernel", _NORM, _ROW + _STAGES),
    "bias_gelu_forward": TunedOp("bias_gelu", "_forward_kernel", ("hidden",), _TILE),
    "bias_gelu_backward": TunedOp("bias_gelu", "_backward_kernel", ("hidden",), _TILE + _STAGES),
    "bias_dropout_add_forward": TunedOp("bias_dropout_add", "_forward_kernel", ("hidden", "dropout"), _TILE),
    "bias_dropout_add_backward": TunedOp("bias_dropout_add", "_backward_kernel", ("hidden",), _TILE + _STAGES),
    "column_sum": TunedOp("column_sum", "_rows_kernel", ("hidden",), _TILE + _STAGES),
    "attention_dropout": TunedOp("attention_dropout", "_kernel", ("keys",), _TILE, least_columns=32),
    "cross_entropy_statistics": TunedOp("cross_entropy", "_statistics_kernel", ("columns",), _TILE + _STAGES),
    "cross_entropy_loss": TunedOp("cross_entropy", "_loss_kernel", ("columns",), _TILE + _STAGES),
    "cross_entropy_loss_and_gradient": TunedOp(
        "cross_entropy", "_loss_and_gradient_kernel", ("columns",), _TILE + _STAGES
    ),
    "cross_entropy_gradient": TunedOp("cross_entropy", "_gradient_kernel", ("columns",), _TILE),
    "adamw": TunedOp("adamw", "_adamw_kernel", (), ("num_warps",)),
    "sum_of_squares": TunedOp("adamw", "_squares_kernel", (), ("columns", "num_warps", "num_stages")),
    "flash_attention_forward": TunedOp("flash_attention", "_forward_kernel", _FLASH, _TILE + _STAGES, 32),
    "flash_attention_backward_queries": TunedOp(
        "flash_attention_backward", "_queries_kernel", _FLASH, _TILE + _STAGES, 32
    ),
    "flash_attention_backward_keys": TunedOp("flash_attention_backward", "_keys_kernel", _FLASH, _TILE + _STAGES, 32),
}
for _name in ("softmax_forward", "softmax_backward", "softmax_dropout_forward", "softmax_dropout_backward"):
    _direction = _name.rpartition("_")[2]
    TUNED_OPS[_name] = TunedOp("softmax", f"_{_direction}_kernel", ("keys",), _ROW)
    TUNED_OPS[f"long_{_name}"] = TunedOp(
        "softmax", f"_long_{_direction}_kernel", ("keys",), ("columns", "num_warps", "num_stages"), 32
    )

Shape = Mapping[str, int]
Key = tuple[str, str, tuple[tuple[str, int], ...]]
"""(op, dtype, shape bucket) of a record: the names of the sizes in alphabetical order, each with its bucket."""


def bucket(size: int) -> int:
    """The shapes a record counts for: sizes up to a power of two and above the one before, variants exactly.

    A tile is as wide as a power of two, so all shapes of a bucket have the same one where a row is one tile.
    """
    return size if isinstance(size, bool) else 1 << max(0, size - 1).bit_length()


def key_of(op: str, dtype: str, shape: Shape) -> Key:
    """The record that counts for ``op`` at ``shape``; ``dtype`` as "bfloat16"."""
    return op, dtype, tuple(sorted((name, bucket(size)) for name, size in shape.items()))


def key_text(key: Key) -> str:
    """As in "layer_norm_forward bfloat16 hidden=4096"."""
    op, dtype, shape = key
    return " ".join([op, dtype, *(f"{name}={str(size).lower()}" for name, size in shape)])
