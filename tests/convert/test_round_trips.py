"""There and back again: every bit of every tensor, at every layout."""

from __future__ import annotations

import filecmp
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.models import VOCAB_SIZE, random_source, write_layout
from tests.runs import tensors_of
from trimegatron.convert.from_hf import convert_from_hf, read_hf
from trimegatron.convert.from_megatron import read_megatron
from trimegatron.convert.source import read_checkpoint
from trimegatron.convert.to_hf import write_hf
from trimegatron.convert.to_megatron import write_megatron
from trimegatron.convert.to_ours import write_checkpoint

LAYOUTS = list(itertools.product((1, 2, 4), (1, 2)))


def tensors(root: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of ours, read by the code that training uses."""
    return tensors_of(next(root.glob("iter_*")), prefix)


def assert_same_bits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(("dtype", "fused"), [("float32", True), ("bfloat16", False)])
def test_ours_to_hugging_face_and_back(dtype: str, fused: bool, tmp_path: Path):
    source = random_source(dtype=dtype, bias_gelu_fusion=fused)
    expected = {f"model.{name}": tensor.load() for name, tensor in source.model.items()}
    for tp, pp in LAYOUTS:
        folder = tmp_path / f"tp{tp}pp{pp}"
        write_layout(source, folder / "ours", tp=tp, pp=pp)
        write_hf(read_checkpoint(folder / "ours"), folder / "hf", verify=False, max_shard_bytes=20_000)
        convert_from_hf(folder / "hf", folder / "back", verify=False)
        assert_same_bits(tensors(folder / "back"), expected)
        back = read_checkpoint(folder / "back").config.model
        if (tp, pp) == (2, 2):  # a model that no run has trained is a release there
            write_megatron(read_checkpoint(folder / "back"), folder / "megatron", tp=tp, pp=pp)
            assert (folder / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
            assert (folder / "megatron" / "release" / "mp_rank_01_001" / "model_optim_rng.pt").is_file()
            assert read_megatron(folder / "megatron").state.progress.iteration == 0
        assert back.vocab_size == VOCAB_SIZE and back.layernorm_epsilon == 1e-6 and back.bias_gelu_fusion is fused


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_hugging_face_to_ours_and_back(dtype: str, fused: bool, format: str, tmp_path: Path):
    source = random_source(dtype=dtype, bias_gelu_fusion=fused, with_optimizer=False)
    write_hf(source, tmp_path / "hf", verify=False, format=format, max_shard_bytes=50_000)
    for tp, pp in LAYOUTS:
        folder = tmp_path / f"tp{tp}pp{pp}"
        write_layout(read_hf(tmp_path / "hf"), folder / "ours", tp=tp, pp=pp)
        write_hf(read_checkpoint(folder / "ours"), folder / "hf", verify=False, format=format, max_shard_bytes=50_000)
        names = sorted(path.name for path in (tmp_path / "hf").iterdir())
        assert len(names) > 6  # several shards and their index
        same, different, lost = filecmp.cmpfiles(tmp_path / "hf", folder / "hf", names, shallow=False)
        assert (different, lost) == (["README.md"], []), same  # the card says what the run was


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_ours_to_megatron_and_back(dtype: str, fused: bool, tmp_path: Path):
    source = random_source(dtype=dtype, bias_gelu_fusion=fused)
    write_checkpoint(source, tmp_path / "ours")
    expected = tensors(tmp_path / "ours")
    assert len(expected) == 28 * (3 if dtype == "float32" else 4)
    for tp, pp in LAYOUTS:
        folder = tmp_path / f"tp{tp}pp{pp}"
        assert write_megatron(read_checkpoint(tmp_path / "ours"), folder / "megatron", tp=tp, pp=pp) == len(expected)
        back = read_megatron(folder / "megatron")
        write_checkpoint(back, folder / "back", verify=False)
        assert_same_bits(tensors(folder / "back"), expected)
        for name in ("progress", "optimizer_step", "scaler"):
            assert getattr(back.state, name) == getattr(source.state, name)
        assert back.config.schedule == source.config.schedule
        mine, theirs = back.config.to_dict(), source.config.to_dict()
        assert {name: group for name, group in mine.items() if name != "data"} == {
            name: group for name, group in theirs.items() if name != "data"
        }


def test_query_key_value_rows_and_transposes_in_hugging_face(tmp_path: Path):
    """Written out by hand: row (k, head, d) of c_attn is our row (head, k, d), and matrices are [in, out]."""
    source = random_source(with_optimizer=False)
    write_hf(source, tmp_path / "hf", verify=False)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    qkv = source.model["layers.1.self_attention.query_key_value.weight"].load()
    bias = source.model["layers.1.self_attention.query_key_value.bias"].load()
    for k in range(3):
        for head in range(4):
            for d in (0, 5):
                column, row = k * 24 + head * 6 + d, head * 18 + k * 6 + d
                assert torch.equal(theirs["transformer.h.1.attn.c_attn.weight"][:, column], qkv[row])
                assert theirs["transformer.h.1.attn.c_attn.bias"][column] == bias[row]
    wide = source.model["layers.0.mlp.dense_h_to_4h.weight"].load()
    assert torch.equal(theirs["transformer.h.0.mlp.c_fc.weight"], wide.t())
