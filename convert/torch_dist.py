"""Checkpoints of torch.distributed.checkpoint's, as Megatron-LM's ``--ckpt-format torch_dist`` writes them.

::

    metadata.json      which form this is; written last
    .metadata          a pickle: the global tensors, the chunks each is cut into, and where these lie
    __RANK_N.distcp    chunks and other objects, each an archive of torch.save's
    common.pt          what all ranks hold alike; since Megatron-Core 0.19 it is the object ``common_state``

Reading opens every chunk and leaves its values in the file. No pickle runs anything: see ``torch_file.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimegatron.checkpoint.stored import covers
from trimegatron.convert.torch_file import DTYPES, RestrictedUnpickler, inert, read_torch_file, refusing_damage
from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor

METADATA, FORM = ".metadata", "metadata.json"
FORM_NAME = "torch_dist"

Place = tuple[int, ...]
"""Offsets or sizes, one for each dimension."""
Piece = tuple[Place, LazyTensor]
"""Where a rectangle of a tensor begins, and its values."""

NAMES = {
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""What ``.metadata`` may name beside dtypes; inert objects stand in for all of it."""


@dataclass(frozen=True)
class Item:
    """One archive within a file."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        """Its object, tensors left in the file. Raises CheckpointError."""
        return read_torch_file(self.path, self.start, self.length)


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor."""

    offsets: Place
    shape: Place
    item: Item


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, covered by its chunks, each element once."""

    name: str
    shape: Place
    dtype: torch.dtype
    chunks: list[Chunk]

    def open(self) -> list[Piece]:
        """The chunks, none of their values read.

        Raises:
            CheckpointError: what lies in the place of a chunk is damaged or something else.
        """
        return [(chunk.offsets, self.open_chunk(chunk)) for chunk in self.chunks]

    def open_chunk(self, chunk: Chunk) -> LazyTensor:
        tensor = chunk.item.read()
        expected = f"{str(self.dtype).removeprefix('torch.')} {list(chunk.shape)}"
        if not isinstance(tensor, LazyTensor) or (tensor.shape, tensor.dtype) != (chunk.shape or (1,), self.dtype):
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, LazyTensor) else type(tensor).__name__
            raise CheckpointError(
                f"{chunk.item.path}: at byte {chunk.item.start} lies {found.removeprefix('torch.')} where {METADATA} "
                f"says {expected}, a chunk of {self.name}"
            )
        return tensor


@dataclass(frozen=True)
class TorchDist:
    """One checkpoint: its tensors, and the other objects by name."""

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, Item]

    def common(self) -> Any:
        """What all ranks hold alike: settings, progress, the optimizer's numbers. Raises CheckpointError."""
        legacy = self.folder / "common.pt"
        if legacy.exists():
            return read_torch_file(legacy)
        found = [item for name, item in self.objects.items() if name.startswith("common_state/")]
        if len(found) != 1:
            raise CheckpointError(f"{self.folder} holds neither {legacy.name} nor one object common_state")
        content = found[0].read()
        return content[0] if isinstance(content, list) and len(content) == 1 else content


def read_torch_dist(folder: Path) -> TorchDist:
    """The checkpoint in ``folder``.

    Raises:
        CheckpointError: it is not of this form, not whole, damaged, or chunks do not cover a tensor exactly once.
    """
    check_form(folder)
    path = folder / METADATA
    known = {name: inert(name[1]) for name in NAMES} | {("torch", name): getattr(torch, name) for name in DTYPES}
    known[("torch", "Size")] = tuple
    with refusing_damage(path, "a table of chunks"):
        metadata = RestrictedUnpickler(path, path.read_bytes(), known).load()
        items = items_of(folder, metadata.storage_data)
        tensors, objects = {}, {}
        for name, entry in metadata.state_dict_metadata.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = tensor_of(folder, name, entry, items)
            else:
                objects[name] = take(folder, items, name, None)
    if items:
        names = ", ".join(sorted({name for name, _ in items})[:8])
        raise CheckpointError(f"{path} places chunks that belong to no tensor: {names}")
    return TorchDist(folder, tensors, objects)


def check_form(folder: Path) -> None:
    """Raises CheckpointError where ``metadata.json`` names another form, or is not there."""
    path = folder / FORM
    if not (folder / METADATA).exists():
        raise CheckpointError(f"{folder} has no {METADATA}, without which its chunks cannot be told apart")
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {FORM}, which {FORM_NAME} writes last: its save was not finished, or it is of another "
            "form (torch_dcp, fsdp_dtensor), which is not read here. Let Megatron-LM save with --ckpt-format torch_dist"
        )
    try:
        form = json.loads(path.read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} does not name a form: {type(error).__name__}: {error}") from error
    if form != FORM_NAME:
        raise CheckpointError(f"{folder} is of the form {form!r}; {FORM_NAME} is the one that is read here")


def items_of(folder: Path, storage: Mapping[Any, Any]) -> dict[tuple[str, Place | None], Item]:
    """Where everything lies: name and offset (None for what is no tensor) → archive.

    Raises:
        CheckpointError: a file is missing or ends before, or two chunks have one place.
    """
    items: dict[tuple[str, Place | None], Item] = {}
    sizes: dict[str, int] = {}
    for index, info in storage.items():
        offset = getattr(index, "offset", None)
        key = index.fqn, None if offset is None else tuple(offset)
        item = Item(folder / info.relative_path, info.offset, info.length)
        if key in items:
            raise CheckpointError(f"{folder / METADATA} places {describe(key)} twice")
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{folder / METADATA} looks for a chunk outside its folder: {info.relative_path}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{item.path} is compressed or encrypted, which is not read here")
        if info.relative_path not in sizes:
            if not item.path.is_file():
                raise CheckpointError(f"{item.path} is missing, in which {describe(key)} lies")
            sizes[info.relative_path] = item.path.stat().st_size
        if min(item.start, item.length) < 0 or item.start + item.length > sizes[info.relative_path]:
            raise CheckpointError(
                f"{item.path} has {sizes[info.relative_path]} bytes and ends within {describe(key)}, which takes "
                f"{item.length} from {item.start} on"
            )
        items[key] = item
    return items


def describe(key: tuple[str, Place | None]) -> str:
    name, offsets = key
    return name if offsets is None else f"the chunk of {name} at {list(offsets)}"


def take(folder: Path, items: dict[tuple[str, Place | None], Item], name: str, offsets: Place | None) -> Item:
    """Remove an entry, so that each is used once. Raises CheckpointError."""
    item = items.pop((name, offsets), None)
    if item is None:
        raise CheckpointError(f"{folder / METADATA} does not say where {describe((name, offsets))} lies")
    return item


def tensor_of(folder: Path, name: str, entry: Any, items: dict[tuple[str, Place | None], Item]) -> StoredTensor:
    """One entry of the table. Raises CheckpointError where its chunks do not cover it exactly once."""
    shape, dtype = tuple(entry.size), entry.properties.state[0]
    chunks = []
    for entry_chunk in entry.chunks:
        offsets, sizes = tuple(entry_chunk.offsets), tuple(entry_chunk.sizes)
        chunks.append(Chunk(offsets, sizes, take(folder, items, name, offsets)))
    if not chunks or any(
        len(place) != len(shape) or min(place, default=0) < 0
        for chunk in chunks
        for place in (chunk.offsets, chunk.shape)
    ):
        raise CheckpointError(f"{folder / METADATA}: {name} has no chunks, or ones of other dimensions")
    if shape and not covers(chunks, shape):
        raise CheckpointError(
            f"{folder}: the chunks of {name} do not cover its shape {list(shape)} exactly once; one is missing or two "
            "overlap"
        )
    return StoredTensor(name, shape, dtype, chunks)
