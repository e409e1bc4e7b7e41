"""Megatron-LM's own torch_dist checkpoints, and how they are changed."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.convert.test_megatron import loaded
from trimegatron.convert.torch_dist import read_torch_dist
from trimegatron.convert.torch_file import read_torch_file
from trimegatron.convert.vocabulary import VocabularyConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
WORDS = VocabularyConfig(true_vocab_size=40)
QKV, FC1 = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc1.bias"

FIRST = MetadataIndex(QKV, torch.Size([0, 0, 0]))


def unpacked(name: str, where: Path) -> Path:
    with tarfile.open(GOLDEN / "torch_dist" / f"{name}.tar.gz") as archive:
        archive.extractall(where / name, filter="data")
    return where / name


def folder_of(root: Path) -> Path:
    return root / "iter_0000003"


def edit(change: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    """Change the table of chunks."""

    def damage(root: Path) -> None:
        path = folder_of(root) / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return damage


def change_common(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change what all ranks hold alike, and write it as the older versions do."""

    def damage(root: Path) -> None:
        content = loaded(read_torch_dist(folder_of(root)).common())
        change(content)
        torch.save(content, folder_of(root) / "common.pt")

    return damage


def take_chunk(metadata: Metadata, root: Path, name: str, offsets: torch.Size) -> tuple[Path, torch.Tensor]:
    """The file that holds a chunk, and its values; the table does not say any more where it lies."""
    where = metadata.storage_data.pop(MetadataIndex(name, offsets))
    path = folder_of(root) / where.relative_path
    return path, read_torch_file(path, where.offset, where.length).load()


def append(path: Path, content: Any) -> _StorageInfo:
    """One archive more at the end of a file."""
    start = path.stat().st_size
    with path.open("ab") as file:
        torch.save(content, file)
    return _StorageInfo(path.name, start, path.stat().st_size - start)
