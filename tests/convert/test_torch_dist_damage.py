"""Torch_dist checkpoints that are wrong, made from Megatron-LM's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.convert.torch_dist_files import FC1, FIRST, QKV, WORDS, append, change_common, edit, folder_of, unpacked
from trimegatron.cli import main
from trimegatron.convert.from_megatron import read_megatron


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return unpacked("fp32_tp2pp2", tmp_path)


def move_chunk(root: Path) -> None:
    edit(lambda m: m.state_dict_metadata[QKV].chunks[0].__setattr__("offsets", torch.Size([0, 6, 0])))(root)


def overlap(metadata: Metadata) -> None:
    """The second chunk begins where the first lies."""
    table, storage = metadata.state_dict_metadata[QKV], metadata.storage_data
    second = table.chunks[1]
    storage[MetadataIndex(QKV, torch.Size([0, 6, 0]))] = storage.pop(MetadataIndex(QKV, second.offsets))
    table.chunks[1] = ChunkStorageMetadata(torch.Size([0, 6, 0]), second.sizes)


def put(content: Any) -> Callable[[Path], None]:
    """Another archive in the place of a chunk."""

    def damage(root: Path) -> None:
        info = append(folder_of(root) / "__0_0.distcp", content)
        edit(lambda m: m.storage_data.update({FIRST: info}))(root)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    """A tensor is gone, chunks and all."""

    def change(metadata: Metadata) -> None:
        for chunk in metadata.state_dict_metadata.pop(name).chunks:
            del metadata.storage_data[MetadataIndex(name, chunk.offsets)]

    return edit(change)


def rename(name: str, new_name: str) -> Callable[[Path], None]:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[new_name] = metadata.state_dict_metadata.pop(name)
        for chunk in entry.chunks:
            metadata.storage_data[MetadataIndex(new_name, chunk.offsets)] = metadata.storage_data.pop(
                MetadataIndex(name, chunk.offsets)
            )

    return edit(change)


def cut_file(root: Path) -> None:
    path = folder_of(root) / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def blank(root: Path) -> None:
    """A file of the right length with nothing in it."""
    path = folder_of(root) / "__2_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def flatten_wrongly(metadata: Metadata) -> None:
    """A flat state of another length than its parameter."""
    name, size = "optimizer.state.exp_avg.embedding.position_embeddings.weight", torch.Size([1, 1, 127])
    table, storage = metadata.state_dict_metadata, metadata.storage_data
    chunk = ChunkStorageMetadata(torch.Size([0, 0, 0]), size)
    storage[MetadataIndex(name, chunk.offsets)] = storage.pop(MetadataIndex(name, torch.Size([0, 0])))
    table[name] = TensorStorageMetadata(table[name].properties, size, [chunk])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_file, r"__2_0\.distcp has \d+ bytes and ends within"),
        (blank, r"__2_0\.distcp is not a file of torch\.save"),
        (lambda root: (folder_of(root) / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing, in which .* lies"),
        (lambda root: (folder_of(root) / ".metadata").unlink(), r"has no \.metadata"),
        (lambda root: (folder_of(root) / ".metadata").write_bytes(b"\x80\x04"), r"\.metadata is not a table of chunks"),
        (lambda root: (folder_of(root) / "metadata.json").unlink(), "save was not finished, or it is of another form"),
        (lambda root: (folder_of(root) / "metadata.json").write_text("{"), r"metadata\.json does not name a form"),
        (
            lambda root: (folder_of(root) / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "is of the form 'zarr'; torch_dist is the one that is read here",
        ),
        (
            edit(lambda m: m.state_dict_metadata[QKV].chunks.pop()),
            "places chunks that belong to no tensor|cover its shape",
        ),
        (edit(lambda m: m.storage_data.pop(FIRST)), rf"does not say where the chunk of {QKV} at \[0, 0, 0\] lies"),
        (
            edit(lambda m: m.storage_data.update({MetadataIndex("x.weight", torch.Size([0])): m.storage_data[FIRST]})),
            r"places chunks that belong to no tensor: x\.weight",
        ),
        (edit(overlap), rf"chunks of {QKV} do not cover its shape \[2, 24, 8\] exactly once"),
        (
            edit(lambda m: m.state_dict_metadata[QKV].chunks.append(m.state_dict_metadata[QKV].chunks[0])),
            rf"does not say where the chunk of {QKV} at \[0, 0, 0\] lies",
        ),
        (move_chunk, rf"does not say where the chunk of {QKV} at \[0, 6, 0\] lies"),
        (
            edit(lambda m: m.storage_data.update({FIRST: _StorageInfo("../x.distcp", 0, 9)})),
            r"looks for a chunk outside its folder: \.\./x\.distcp",
        ),
        (
            edit(lambda m: m.storage_data.update({FIRST: _StorageInfo("__0_0.distcp", 0, 9, ["zstd"])})),
            "compressed or encrypted",
        ),
        (put(torch.zeros(1, 12, 7)), rf"float32 \[1, 12, 7\] where \.metadata says float32 \[1, 12, 8\], .* of {QKV}"),
        (put(torch.zeros(1, 12, 8).half()), r"float16 \[1, 12, 8\] where \.metadata says float32"),
        (put({"a": 1}), r"lies dict where \.metadata says"),
        (put(Fraction(1, 2)), r"__0_0\.distcp asks for fractions\.Fraction.*not run"),
        (
            edit(lambda m: setattr(m, "planner_data", Fraction(1, 2))),
            r"\.metadata asks for fractions\.Fraction.*not run",
        ),
        (edit(lambda m: setattr(m, "planner_data", eval)), r"\.metadata asks for builtins\.eval"),
        (change_common(lambda content: content.update(evil=eval)), r"common\.pt asks for .*eval"),
        (change_common(lambda content: content.update(args={})), "holds no args"),
        (change_common(lambda content: setattr(content["args"], "swiglu", True)), "swiglu is True, not False"),
        (change_common(lambda content: setattr(content["args"], "quick_geglu", True)), "quick_geglu is True"),
        (change_common(lambda content: setattr(content["args"], "bf16", True)), "holds torch.float32 weights where"),
        (change_common(lambda content: setattr(content["args"], "num_layers", 4)), r"what becomes: layers\.2\.input_l"),
        (change_common(lambda content: content.pop("optimizer")), "it has tensors and no settings.*--no-load-optim"),
        (change_common(lambda content: content["optimizer"].pop("param_groups")), "no param_groups.*--no-load-optim"),
        (change_common(lambda content: content["optimizer"].pop("state")), "it is at 0 different steps"),
        (remove(FC1), r"missing from the source is what becomes: layers\.0\.mlp\.dense_h_to_4h\.bias"),
        (remove(f"optimizer.state.exp_avg.{FC1}"), r"\(optimizer\.exp_avg; --no-load-optim .*dense_h_to_4h\.bias"),
        (
            rename(FC1, "decoder.layers.mlp.router.bias"),
            r"no place in the target: decoder\.layers\.0\.mlp\.router\.bias",
        ),
        (
            rename(f"optimizer.state.exp_avg.{FC1}", f"optimizer.state.momentum.{FC1}"),
            rf"cannot be taken along: it has optimizer\.state\.momentum\.{FC1}.*--no-load-optim",
        ),
        (
            edit(flatten_wrongly),
            r"position_embeddings\.weight is stored as \[1, 1, 127\], .* no form of \[16, 8\]",
        ),
        (
            edit(lambda m: m.storage_data.pop(MetadataIndex("common_state/shard_0_1"))),
            "does not say where common_state/shard_0_1 lies",
        ),
        (
            edit(
                lambda m: (
                    m.storage_data.pop(MetadataIndex("common_state/shard_0_1")),
                    m.state_dict_metadata.pop("common_state/shard_0_1"),
                )
            ),
            r"holds neither common\.pt nor one object common_state",
        ),
    ],
)
def test_wrong_checkpoints(damage: Callable[[Path], Any], said: str, saved: Path, capsys: pytest.CaptureFixture):
    """Refused, named, exit code 4, nothing left behind."""
    damage(saved)
    before = sorted(path.name for path in saved.parent.iterdir())
    flags = ["--load", str(saved), "--true-vocab-size", "40", "--save", str(saved.parent / "out")]
    assert main(["convert", "from-megatron", *flags]) == 4
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1, error
    assert sorted(path.name for path in saved.parent.iterdir()) == before


def test_objects_that_are_not_known_are_named(saved: Path):
    info = append(folder_of(saved) / "__0_0.distcp", [1])

    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["quantizer/shard_0_1"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("quantizer/shard_0_1")] = info

    edit(change)(saved)
    assert read_megatron(saved, WORDS).notes == ["left out, as no weights: quantizer/shard_0_1"]
