"""Tensors that are read when they are written, a few megabytes at a time: memory does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

CHUNK_BYTES = 16 << 20
"""About as much is in memory of a tensor that is copied from file to file."""

CACHED_ROWS = 64
"""A transposition goes so many rows at a time, so that both sides of it stay in the processor's cache."""

Rows = Callable[[int, int], torch.Tensor]
"""``rows(first, last)``: these rows of a tensor."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that can be read row by row. ``open`` prepares for that; what it holds goes with what it returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Rows]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def load(self) -> torch.Tensor:
        """The whole tensor."""
        return self.open()(0, self.shape[0])

    def chunks(self, multiple_of: int = 1) -> Iterator[torch.Tensor]:
        """All rows in order, about ``CHUNK_BYTES`` at a time, each time a multiple of so many rows."""
        rows = self.open()
        group_bytes = max(1, multiple_of * math.prod(self.shape[1:]) * self.dtype.itemsize)
        step = max(1, CHUNK_BYTES // group_bytes) * multiple_of
        for first in range(0, self.shape[0], step):
            yield rows(first, min(first + step, self.shape[0]))


def in_memory(tensor: torch.Tensor) -> LazyTensor:
    """A tensor that is there already."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: lambda first, last: tensor[first:last])


def in_file(path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    """A tensor that lies in a file from byte ``start`` on, row after row."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def rows(first: int, last: int) -> torch.Tensor:
        tensor = torch.empty((last - first, *shape[1:]), dtype=dtype)
        if tensor.numel():
            with path.open("rb", buffering=0) as file:
                file.seek(start + first * row_bytes)
                read_fully(file, bytes_of(tensor), path)
        return tensor

    return LazyTensor(shape, dtype, lambda: rows)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, to be read from or written to."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_fully(file, target: memoryview, path: Path) -> None:
    """Fill ``target`` from an unbuffered file. Raises OSError where the file ends before."""
    while target:
        count = file.readinto(target)
        if not count:
            raise OSError(f"{path} ends in the middle of a tensor")
        target = target[count:]


def assemble(shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], LazyTensor]]) -> LazyTensor:
    """The tensor that rectangles make up, each with the place where it starts; what sticks out is left out."""
    if len(pieces) == 1 and pieces[0][1].shape == shape:
        return pieces[0][1]

    def open_pieces() -> Rows:
        opened = [(offsets, piece.shape, piece.open()) for offsets, piece in pieces]

        def rows(first: int, last: int) -> torch.Tensor:
            out = torch.empty((last - first, *shape[1:]), dtype=pieces[0][1].dtype)
            for offsets, piece_shape, piece_rows in opened:
                start, stop = max(first, offsets[0]), min(last, offsets[0] + piece_shape[0])
                if start >= stop:
                    continue
                part = piece_rows(start - offsets[0], stop - offsets[0])
                target = out[start - first : stop - first]
                for dim in range(1, len(shape)):
                    target = target.narrow(dim, offsets[dim], piece_shape[dim])
                target.copy_(part)
            return out

        return rows

    return LazyTensor(shape, pieces[0][1].dtype, open_pieces)


def row_of(source: LazyTensor, index: int) -> LazyTensor:
    """One row of ``source`` as a tensor of its own; it is read whole."""

    def open_row() -> Rows:
        (row,) = source.open()(index, index + 1)
        return lambda first, last: row[first:last]

    return LazyTensor(source.shape[1:], source.dtype, open_row)


def reshaped(source: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """``source`` with other dimensions and its elements in the same order; it is read whole."""

    def open_source() -> Rows:
        whole = source.load().reshape(shape)
        return lambda first, last: whole[first:last]

    return LazyTensor(shape, source.dtype, open_source)


def rearranged(source: LazyTensor, shape: tuple[int, ...], place: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """The elements of ``source`` in another order.

    Args:
        place: turns an empty tensor of ``shape`` into a view whose first dimension counts groups of the source's rows,
            in their order: reading fills it group by group, so that one copy is in memory.
    """

    def open_source() -> Rows:
        out = torch.empty(shape, dtype=source.dtype)
        view = place(out)
        rows_per_group = max(1, source.shape[0] // view.shape[0])
        block = max(1, CACHED_ROWS // rows_per_group)
        first = 0
        for chunk in source.chunks(multiple_of=rows_per_group):
            groups = chunk.reshape(-1, *view.shape[1:])
            for start in range(0, len(groups), block):
                part = groups[start : start + block]
                view[first + start : first + start + len(part)].copy_(part)
            first += len(groups)
        return lambda first, last: out[first:last]

    return LazyTensor(shape, source.dtype, open_source)


def cast(source: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """``source`` rounded to another precision."""
    if dtype == source.dtype:
        return source

    def open_source() -> Rows:
        rows = source.open()
        return lambda first, last: rows(first, last).to(dtype)

    return LazyTensor(source.shape, dtype, open_source)


def cut(source: LazyTensor, offsets: tuple[int, ...], extent: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The rectangle of ``source`` of size ``extent`` at ``offsets``, in a tensor of ``shape`` that is 0 beyond it."""
    out = torch.zeros(shape, dtype=source.dtype)
    if math.prod(extent) == 0:
        return out
    part = source.open()(offsets[0], offsets[0] + extent[0])
    target = out[: extent[0]]
    for dim in range(1, len(shape)):
        part = part.narrow(dim, offsets[dim], extent[dim])
        target = target.narrow(dim, 0, extent[dim])
    target.copy_(part)
    return out


def is_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors hold the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one.chunks(), other.chunks(), strict=True)
    )
