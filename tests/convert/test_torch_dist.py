"""Checkpoints that the real Megatron-LM wrote as torch_dist, and other forms made from them."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.convert.test_training_goes_on import MICRO, go_on
from tests.convert.torch_dist_files import (
    FIRST,
    GOLDEN,
    QKV,
    WORDS,
    append,
    change_common,
    edit,
    folder_of,
    take_chunk,
    unpacked,
)
from tests.parallel import run_ranks
from tests.runs import tiny_flags
from trimegatron.cli import main
from trimegatron.convert.from_megatron import read_megatron
from trimegatron.convert.proof import build_model
from trimegatron.convert.source import MASTER, MODEL, MOMENTS
from trimegatron.convert.to_ours import check_same
from trimegatron.convert.torch_dist import read_torch_dist
from trimegatron.convert.torch_file import read_torch_file
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return unpacked("fp32_tp2pp2", tmp_path)


def tokens() -> np.ndarray:
    return np.load(GOLDEN / "micro_tokens.npy").astype(np.int64) % 39


def test_golden_logits(tmp_path: Path):
    """Tensor × pipeline 2 × 2: the model computes what Megatron-LM computed from it, padding of the vocabulary
    included. That run said --openai-gelu, which Megatron-Core does not heed."""
    source = read_megatron(unpacked("fp32_tp2pp2", tmp_path), WORDS, mask_padded_vocab=False)
    assert not source.config.model.bias_gelu_fusion and source.notes == []
    with torch.no_grad():
        mine = build_model(source)(torch.from_numpy(tokens()[:1, :-1])).transpose(0, 1)
    golden = np.load(GOLDEN / "torch_dist" / "fp32_tp2pp2_logits.npy")
    assert mine.shape == golden.shape == (1, 16, 48)
    np.testing.assert_allclose(mine, golden, atol=1e-5, rtol=0)


OURS = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "final_layernorm.weight": "decoder.final_layernorm.weight",
    "final_layernorm.bias": "decoder.final_layernorm.bias",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "self_attention.query_key_value.weight": "self_attention.linear_qkv.weight",
    "self_attention.query_key_value.bias": "self_attention.linear_qkv.bias",
    "self_attention.dense.weight": "self_attention.linear_proj.weight",
    "self_attention.dense.bias": "self_attention.linear_proj.bias",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "post_attention_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
    "mlp.dense_h_to_4h.weight": "mlp.linear_fc1.weight",
    "mlp.dense_h_to_4h.bias": "mlp.linear_fc1.bias",
    "mlp.dense_4h_to_h.weight": "mlp.linear_fc2.weight",
    "mlp.dense_4h_to_h.bias": "mlp.linear_fc2.bias",
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("fp32_tp2pp2", {MODEL: ""}),
        ("fp16_dp2", {MODEL: "", MASTER: "optimizer.state.param."}),
    ],
)
def test_every_value_is_what_torchs_own_reader_reads(name: str, kinds: dict[str, str], tmp_path: Path):
    """Weights and optimizer, plain (fp32) and distributed (fp16); the table of names is written down here again."""
    folder = unpacked(name, tmp_path) / "iter_0000003"
    source = read_megatron(folder, WORDS)
    kinds = kinds | {kind: f"optimizer.state.{kind.removeprefix('optimizer.')}." for kind in MOMENTS}
    stored = read_torch_dist(folder).tensors
    theirs = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in stored.items()}
    dcp.load(theirs, storage_reader=FileSystemReader(folder), no_dist=True)
    assert source.tensors.keys() == kinds.keys() and len(stored) == 16 * len(kinds)
    for kind, prefix in kinds.items():
        assert len(source.tensors[kind]) == 28
        for our_name, tensor in source.tensors[kind].items():
            layer = re.fullmatch(r"layers\.(\d)\.(.+)", our_name)
            if layer is None:
                expected = theirs[prefix + OURS[our_name]][: 40 if "word" in our_name else None]
            else:
                expected = theirs[f"{prefix}decoder.layers.{OURS[layer[2]]}"][int(layer[1])]
            assert tensor.dtype == expected.dtype and torch.equal(tensor.load(), expected), (kind, our_name)
            rows = tensor.open()
            assert torch.equal(rows(1, 3), expected[1:3]), (kind, our_name)


def test_progress_scale_and_main_weights(tmp_path: Path):
    source = read_megatron(unpacked("fp16_dp2", tmp_path), WORDS)
    progress = source.state.progress
    assert (progress.iteration, progress.consumed_samples, progress.scheduled_samples) == (3, 24, 24)
    assert source.state.optimizer_step == 3 and source.config.data.megatron_compat == 2026
    assert source.state.scaler == {"scale": 1024.0, "clean_steps": 3, "tolerance": 2}
    for name, tensor in source.model.items():
        assert torch.equal(source.tensors[MASTER][name].load().half(), tensor.load()), name


def test_training_goes_on_with_megatrons_losses(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Stopped by Megatron-LM at step 3, with its optimizer: steps 4 to 6 are Megatron-LM's."""
    with IndexedDatasetWriter(tmp_path / "rows", np.uint16) as writer:
        for row in tokens().astype(np.uint16):
            writer.add_document(row, [len(row)])
    load = ["--load", str(unpacked("fp32_tp2pp2", tmp_path)), "--true-vocab-size", "40", "--no-mask-padded-vocab"]
    assert main(["convert", "from-megatron", *load, "--save", str(tmp_path / "ours")]) == 0
    assert "84 tensors read back, bit for bit" in capsys.readouterr().out
    changes = {"hidden_size": 8, "vocab_size": 47, "make_vocab_size_divisible_by": 8, "megatron_compat": 2026}
    flags = tiny_flags(tmp_path / "rows", load=tmp_path / "ours", no_bias_gelu_fusion=True, **(MICRO | changes))
    golden = json.loads((GOLDEN / "torch_dist" / "losses.json").read_text())["fp32_tp2pp2"][3:]
    (curve,) = run_ranks(1, go_on, flags, tmp_path / "rows", 1, 6)
    np.testing.assert_allclose([loss for loss, _ in curve], [step["loss"] for step in golden], rtol=2e-6)
    np.testing.assert_allclose([norm for _, norm in curve], [step["grad_norm"] for step in golden], rtol=5e-6)


def test_buckets_of_a_distributed_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Megatron-LM's default beside a distributed optimizer: refused with both ways out, of which one is taken."""
    load = ["convert", "from-megatron", "--load", str(unpacked("fp32_buckets", tmp_path)), "--true-vocab-size", "40"]
    assert main([*load, "--save", str(tmp_path / "out")]) == 4
    error = capsys.readouterr().err
    assert re.search("buckets.*--dist-ckpt-optim-fully-reshardable.*--no-load-optim", error) and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([*load, "--save", str(tmp_path / "out"), "--no-load-optim"]) == 0
    assert "28 tensors read back, bit for bit" in capsys.readouterr().out


def test_what_is_common_may_be_a_file_of_its_own(saved: Path):
    """As before Megatron-Core 0.19."""
    source = read_megatron(saved, WORDS)
    change_common(lambda content: content.update(iteration=2))(saved)
    back = read_megatron(saved, WORDS)
    assert (source.state.progress.iteration, back.state.progress.iteration) == (3, 2)
    assert check_same(source, back) == 84


def test_several_layers_in_one_chunk(saved: Path):
    """What another writer may do: the first tensor-parallel rank's piece of both layers lies in one."""
    source = read_megatron(saved, WORDS)

    def change(metadata: Metadata) -> None:
        table, storage = metadata.state_dict_metadata[QKV], metadata.storage_data
        path, pieces = folder_of(saved) / "__0_0.distcp", []
        for chunk in [chunk for chunk in table.chunks if chunk.offsets[1] == 0]:
            table.chunks.remove(chunk)
            pieces.insert(chunk.offsets[0], take_chunk(metadata, saved, QKV, chunk.offsets)[1])
        both = torch.cat(pieces)
        table.chunks.append(ChunkStorageMetadata(FIRST.offset, both.shape))
        storage[FIRST] = append(path, both)

    edit(change)(saved)
    assert check_same(source, read_megatron(saved, WORDS)) == 84


def test_layers_that_are_not_stacked(saved: Path):
    """Each layer under its number: what Megatron-LM writes for layers that are not alike."""
    source = read_megatron(saved, WORDS)

    def change(metadata: Metadata) -> None:
        table, storage = metadata.state_dict_metadata, metadata.storage_data
        for name in [name for name in table if ".layers." in name and hasattr(table[name], "chunks")]:
            stacked = table.pop(name)
            for layer in range(2):
                key = name.replace(".layers.", f".layers.{layer}.")
                chunks = [chunk for chunk in stacked.chunks if chunk.offsets[0] == layer]
                table[key] = TensorStorageMetadata(stacked.properties, stacked.size[1:], [])
                for chunk in chunks:
                    path, layers = take_chunk(metadata, saved, name, chunk.offsets)
                    table[key].chunks.append(ChunkStorageMetadata(chunk.offsets[1:], chunk.sizes[1:]))
                    storage[MetadataIndex(key, chunk.offsets[1:])] = append(path, layers[0])

    edit(change)(saved)
    assert check_same(source, read_megatron(saved, WORDS)) == 84


def test_states_flattened_by_tensor_parallel_rank(saved: Path):
    """As the distributed optimizer of Megatron-Core 0.12 cuts them: each rank's piece flat, in ranges of any length."""
    source = read_megatron(saved, WORDS)

    def change(metadata: Metadata) -> None:
        table, storage = metadata.state_dict_metadata, metadata.storage_data
        for name in [name for name in table if name.startswith("optimizer.")]:
            whole = table[name]
            size, numel = whole.chunks[0].sizes, whole.chunks[0].sizes.numel()
            cells = [n // part for n, part in zip(whole.size, size, strict=True)]
            ranges = [range(numel // 3), range(numel // 3, numel)] if numel > 16 else [range(numel)]
            table[name] = TensorStorageMetadata(whole.properties, torch.Size([*cells, numel]), [])
            for chunk in whole.chunks:
                path, values = take_chunk(metadata, saved, name, chunk.offsets)
                flat = values.reshape(*[1] * len(size), numel)
                index = [first // part for first, part in zip(chunk.offsets, size, strict=True)]
                for part in ranges:
                    offsets = torch.Size([*index, part.start])
                    table[name].chunks.append(ChunkStorageMetadata(offsets, torch.Size([*[1] * len(size), len(part)])))
                    storage[MetadataIndex(name, offsets)] = append(path, flat[..., part.start : part.stop].clone())

    edit(change)(saved)
    assert check_same(source, read_megatron(saved, WORDS)) == 84


def test_main_weights_that_are_not_the_models(saved: Path):
    """A distributed optimizer in fp32 keeps the weights again, which must be the same."""

    def change(metadata: Metadata, off: float) -> None:
        for name, entry in list(metadata.state_dict_metadata.items()):
            if name.startswith("optimizer.") or not isinstance(entry, TensorStorageMetadata):
                continue
            metadata.state_dict_metadata[f"optimizer.state.param.{name}"] = entry
            for chunk in entry.chunks:
                where = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                path = folder_of(saved) / where.relative_path
                if name == QKV:
                    where = append(path, read_torch_file(path, where.offset, where.length).load() + off)
                metadata.storage_data[MetadataIndex(f"optimizer.state.param.{name}", chunk.offsets)] = where

    edit(lambda metadata: change(metadata, 0.0))(saved)
    assert set(read_megatron(saved, WORDS).tensors) == {MODEL, *MOMENTS}
    edit(lambda metadata: change(metadata, 1.0))(saved)
    with pytest.raises(CheckpointError, match=r"main weights of layers\.0\.self_attention\.query_key_value\.weight"):
        read_megatron(saved, WORDS)


def test_an_archive_within_a_file(tmp_path: Path):
    """Read where it lies, with more before and behind it."""
    path = tmp_path / "x.distcp"
    path.write_bytes(b"before" * 100)
    values = [torch.arange(6.0).view(2, 3), torch.arange(4), torch.randn(3, 5)]
    infos = [append(path, {"args": Namespace(n=i), "x": value}) for i, value in enumerate(values)]
    for i, (info, value) in enumerate(zip(infos, values, strict=True)):
        content = read_torch_file(path, info.offset, info.length)
        assert content["args"].n == i and torch.equal(content["x"].load(), value)
    with pytest.raises(CheckpointError, match=r"x\.distcp is not a file of torch\.save"):
        read_torch_file(path, infos[0].offset, infos[0].length - 10)
