"""What lies in a checkpoint folder: pieces of tensors, which any number of ranks wrote.

Each file says in its header where its pieces lie; it is plain safetensors, which loads without this package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor, assemble
from trimegatron.safetensors_file import read_safetensors

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Header entry where torch's reader looks for {tensor name: {"saved_offsets": [...]}}."""


class Rectangle(Protocol):
    """A part of a global tensor."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class StoredPiece:
    """A rectangle of a global tensor as it lies in a file."""

    file: Path
    offsets: tuple[int, ...]
    """Where it starts in the global tensor."""
    tensor: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape


def stored_pieces(folder: Path) -> dict[str, list[StoredPiece]]:
    """For each tensor its pieces; only the headers are read.

    Raises:
        CheckpointError: a file is no safetensors file, or not one of a checkpoint.
    """
    stored: dict[str, list[StoredPiece]] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        contents = read_safetensors(path)
        try:
            where = json.loads(contents.metadata[SHARDING_KEY])
            for name, tensor in contents.tensors.items():
                stored.setdefault(name, []).append(StoredPiece(path, tuple(where[name]["saved_offsets"]), tensor))
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is not a tensor file of a checkpoint: {error}") from error
    return stored


def global_shape(pieces: Sequence[Rectangle]) -> tuple[int, ...]:
    """The shape of the whole tensor that the pieces cover."""
    return tuple(max(piece.offsets[d] + piece.shape[d] for piece in pieces) for d in range(len(pieces[0].shape)))


def check_coverage(folder: Path, name: str, pieces: list[StoredPiece]) -> tuple[int, ...]:
    """The global shape, where the pieces cover it, each element once.

    Raises:
        CheckpointError: they do not: a shard is missing.
    """
    shape = global_shape(pieces)
    if not covers(pieces, shape):
        raise CheckpointError(
            f"{folder}: the pieces of {name} do not cover its shape {list(shape)}; a shard is missing"
        )
    return shape


def covers(pieces: Sequence[Rectangle], shape: tuple[int, ...]) -> bool:
    """Whether rectangles cover a whole tensor: they have as many elements together, and no two overlap."""
    if global_shape(pieces) != shape or sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        return False
    in_order = sorted(pieces, key=lambda piece: piece.offsets)
    for index, one in enumerate(in_order):
        for other in in_order[index + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.shape[0]:
                break  # this one and those behind it begin below
            if all(
                max(a, b) < min(a + m, b + n)
                for a, m, b, n in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
            ):
                return False
    return True


def whole_tensor(folder: Path, name: str, pieces: list[StoredPiece]) -> LazyTensor:
    """The global tensor that its pieces in ``folder`` make up.

    Raises:
        CheckpointError: they do not cover it.
    """
    return assemble(check_coverage(folder, name, pieces), [(piece.offsets, piece.tensor) for piece in pieces])
