"""Tensors of a checkpoint on disk: safetensors files, one a rank, through torch.distributed.checkpoint.

This is the one file that knows that library. What it is given are pieces: rectangles of global tensors. Any set of
pieces that covers a tensor can be read as any other, so that every layout loads every other.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trimegatron.checkpoint.stored import SHARDING_KEY, StoredPiece, check_coverage, global_shape, stored_pieces
from trimegatron.errors import CheckpointError
from trimegatron.files import save_tensors


@dataclass(frozen=True)
class Piece:
    """The rectangle of a global tensor that starts at ``offsets``: ``tensor`` holds it, to be saved or to be filled."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_copy: bool = False
    """Another rank holds the same and saves it; this one is only filled."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return chunk_of(self.offsets, self.tensor.shape)


def chunk_of(offsets: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))


def save_pieces(folder: Path, pieces: Mapping[str, Piece], *, rank: int, group: ProcessGroup | None) -> Path:
    """Write ``shard-RRRRR.safetensors`` for each rank of ``group`` that has something to write; returns this rank's
    path.

    Pieces that several ranks hold alike are written by one of them.
    """
    writer = SafetensorsWriter(folder, rank)
    with quiet_when_alone(), plain_errors():
        dcp.save(
            {},
            storage_writer=writer,
            planner=PieceSavePlanner(pieces),
            process_group=group,
            no_dist=group is None,
        )
    return writer.file


def load_pieces(
    folder: Path,
    pieces: Mapping[str, Piece],
    *,
    group: ProcessGroup | None,
    stored: Mapping[str, list[StoredPiece]] | None = None,
) -> None:
    """Fill the pieces from whatever pieces lie in ``folder``; each rank reads only what overlaps its own.

    Args:
        stored: what :func:`stored_pieces` said of the folder, where it was asked before.

    Raises:
        CheckpointError: a tensor is not there, or its global shape is another; nothing was filled.
    """
    stored = stored_pieces(folder) if stored is None else stored
    for name, piece in pieces.items():
        if name not in stored:
            raise CheckpointError(f"{folder} holds no tensor {name}")
        check_coverage(folder, name, stored[name])
        if (shape := global_shape(stored[name])) != piece.global_shape:
            raise CheckpointError(f"{folder}: {name} is {list(shape)} there and {list(piece.global_shape)} in this run")
    with quiet_when_alone(), plain_errors():
        dcp.load(
            {},
            storage_reader=SafetensorsReader(folder, stored),
            planner=PieceLoadPlanner(pieces),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def quiet_when_alone() -> Iterator[None]:
    """A single process without a process group is what we mean; the library warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def plain_errors() -> Iterator[None]:
    """What torch raises on every rank when one failed carries tracebacks; an OSError that names the rank comes out."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {cause}") from error


class PieceSavePlanner(DefaultSavePlanner):
    """Plans one write for each piece that is not empty."""

    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(piece.offsets)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=piece.chunk,
                        properties=TensorProperties.create_from_tensor(piece.tensor),
                        size=torch.Size(piece.global_shape),
                    ),
                )
                for name, piece in self.pieces.items()
                if piece.tensor.numel() > 0 and not piece.is_copy
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.pieces[write_item.index.fqn].tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill each piece."""

    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__(flatten_state_dict=False)
        self.pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        reads: list[ReadItem] = []
        for name, piece in self.pieces.items():
            stored = self.metadata.state_dict_metadata[name]
            if piece.tensor.numel() > 0:
                reads += create_read_items_for_chunk_list(name, stored, [piece.chunk])  # type: ignore[arg-type]
        return LoadPlan(reads)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.pieces[read_item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target


class SafetensorsWriter(HuggingFaceStorageWriter):
    """The library's writer with the write itself left to safetensors: a quarter of the time and half the memory."""

    def __init__(self, folder: Path, rank: int):
        super().__init__(str(folder), save_distributed=True)
        self.file = folder / f"shard-{rank:05d}.safetensors"

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, PieceSavePlanner)
        tensors = {item.index.fqn: planner.resolve_data(item).detach().cpu().contiguous() for item in plan.items}
        if tensors:
            where = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items}
            save_tensors(tensors, self.file, {"format": "pt", SHARDING_KEY: json.dumps(where)})
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=tensors[item.index.fqn].nbytes,
                    storage_data=self.file.name,
                )
                for item in plan.items
            ]
        )
        return done


class SafetensorsReader(HuggingFaceStorageReader):
    """The library's reader, told what lies where in place of reading every header once more; it opens the files that
    this rank needs something of, and reads that.
    """

    def __init__(self, folder: Path, stored: Mapping[str, list[StoredPiece]]):
        super().__init__(str(folder))
        self.stored = stored

    def read_metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    TensorProperties(),
                    torch.Size(global_shape(pieces)),
                    [chunk_of(piece.offsets, piece.shape) for piece in pieces],
                )
                for name, pieces in self.stored.items()
            },
            storage_data={
                MetadataIndex(name, torch.Size(piece.offsets)): piece.file
                for name, pieces in self.stored.items()
                for piece in pieces
            },
        )

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index]].append(item)
        for path, items in by_file.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    part = tuple(slice(offset, offset + length) for offset, length in ends)
                    planner.resolve_tensor(item).copy_(file.get_slice(item.storage_index.fqn)[part])
        done: Future[None] = Future()
        done.set_result(None)
        return done
