"""Sums over rows in two deterministic stages: programs write partial sums, this kernel adds those in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.launcher import Config


@triton.jit
def _partials_kernel(partials, out, count, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # partials [count, HIDDEN] fp32, out [HIDDEN]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < HIDDEN)[None, :]
        offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
        total += tl.load(partials + offset, mask=mask, other=0.0)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < HIDDEN)


@triton.jit
def _rows_kernel(
    x, partials, rows, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):
    # x [rows, HIDDEN], partials [num_programs(1), HIDDEN] fp32
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
        offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
        total += tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    offset = tl.cast(tl.program_id(1), tl.int64) * HIDDEN + column
    tl.store(partials + offset, tl.sum(total, axis=0), mask=column < HIDDEN)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """[count, hidden] fp32 -> [hidden] in ``dtype``."""
    count, hidden = partials.shape
    out = torch.empty(hidden, dtype=dtype, device=partials.device)
    config = Config(rows=16, columns=128, num_warps=4)
    grid = (triton.cdiv(hidden, config.columns),)
    launcher.launch(
        _partials_kernel, grid, partials, out, count, config=config,
        HIDDEN=hidden, ROWS=config.rows, COLUMNS=config.columns,
    )  # fmt: skip
    return out


def tile(op: str, x: Tensor, tensors: int = 1, **variant: bool) -> Config:
    """Tile of a kernel that walks the rows of a block of columns of ``x`` and perhaps sums over them, where it reads
    so many ``tensors`` like ``x``. Sixteen elements a thread."""
    columns = min(256, max(8, launcher.power_of_two(x.shape[-1])))
    rows = 2048 // columns
    stages = launcher.pipeline_stages(rows * columns * tensors * x.element_size())
    heuristic = Config(rows, columns, num_warps=4, num_stages=stages)
    return launcher.configure(op, heuristic, x, hidden=x.shape[-1], **variant)


def walkers(rows: int, hidden: int, config: Config, device: torch.device) -> tuple[int, int]:
    """Grid (blocks of columns, programs that share the rows of each): about eight programs a multiprocessor."""
    blocks = triton.cdiv(hidden, config.columns)
    programs = triton.cdiv(8 * launcher.multiprocessors(device), blocks)
    return blocks, max(1, min(programs, triton.cdiv(rows, config.rows)))


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., hidden] -> [hidden] in ``dtype``, added in fp32."""
    x, hidden = x.contiguous(), x.shape[-1]
    if x.numel() == 0:
        return torch.zeros(hidden, dtype=dtype, device=x.device)
    rows = x.numel() // hidden
    config = tile("column_sum", x)
    grid = walkers(rows, hidden, config, x.device)
    partials = torch.empty(grid[1], hidden, dtype=torch.float32, device=x.device)
    launcher.launch(
        _rows_kernel, grid, x, partials, rows, config=config,
        HIDDEN=hidden, ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    return sum_partials(partials, dtype)
