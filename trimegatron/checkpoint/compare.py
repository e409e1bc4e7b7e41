"""What differs between two checkpoints, whatever layouts they were saved at: read block by block, by one process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimegatron.checkpoint.checkpoint import CheckpointState
from trimegatron.checkpoint.stored import stored_pieces, whole_tensor
from trimegatron.lazy import LazyTensor
from trimegatron.safetensors_file import NAMES

BLOCK = 1 << 22
"""Elements of each checkpoint in memory at a time."""


def differences(one: Path, other: Path) -> Iterator[str]:
    """A line for each tensor and each entry of ``state.json`` that is not equal to the bit; nothing where all is.

    The configuration and the versions are not part of it: :func:`setting_differences`.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    yield from tensor_differences(one, other)
    mine, theirs = (asdict(CheckpointState.read(folder)) for folder in (one, other))
    for part in mine.keys() - {"config", "versions"}:
        yield from entry_differences(part, without_paths(mine[part]), without_paths(theirs[part]))


def setting_differences(one: Path, other: Path) -> Iterator[str]:
    """A line for each field of the configuration, and each version of the software, that is another."""
    mine, theirs = (CheckpointState.read(folder) for folder in (one, other))
    yield from entry_differences("config", mine.config, theirs.config)
    yield from entry_differences("versions", mine.versions, theirs.versions)


def tensor_differences(one: Path, other: Path) -> Iterator[str]:
    """A line for each tensor that is in one of them only, or differs, and by how much."""
    mine, theirs = stored_pieces(one), stored_pieces(other)
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in theirs or name not in mine:
            yield f"{name} is only in {one if name in mine else other}"
            continue
        a, b = whole_tensor(one, name, mine[name]), whole_tensor(other, name, theirs[name])
        if a.shape != b.shape:
            yield f"{name} is {list(a.shape)} and {list(b.shape)}"
        elif a.dtype != b.dtype:
            yield f"{name} is {NAMES[a.dtype]} and {NAMES[b.dtype]}; {distance(a, b) or 'the values are equal'}"
        elif (text := distance(a, b)) is not None:
            yield f"{name}: {text}"


def distance(one: LazyTensor, other: LazyTensor) -> str | None:
    """How far two tensors of one shape are apart: elements whose bits differ, and max |Δ|; None for equal bits."""
    shape = one.shape
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    rows_of_one, rows_of_other = one.open(), other.open()
    differing, largest = 0, 0.0
    for first in range(0, shape[0], step):
        block = (first, min(first + step, shape[0]))
        a, b = rows_of_one(*block), rows_of_other(*block)
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        same = same_bits(a, b) if a.dtype == b.dtype else a.double() == b.double()
        delta = (a.double() - b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        differing += int((~same).sum())
        largest = max(largest, float(delta.masked_fill(same, 0.0).max()))
    return f"{differing} of {math.prod(shape)} elements differ, max |Δ| {largest:.6g}" if differing else None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Element by element, for floats of one dtype."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(integers) == b.view(integers)


def without_paths(value: Any) -> Any:
    """An entry of ``state.json`` without where the data lay, which decides nothing."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items() if key != "paths"}
    return [without_paths(part) for part in value] if isinstance(value, list) else value


def entry_differences(name: str, one: Any, other: Any) -> Iterator[str]:
    """``name.field: 1 and 2`` for whatever differs in two values of JSON."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from entry_differences(f"{name}.{key}", one.get(key), other.get(key))
    elif json.dumps(one) != json.dumps(other):  # (NaN is equal to itself there)
        yield f"{name}: {json.dumps(one)} and {json.dumps(other)}"
