"""Checkpoints of a sharded optimizer: pieces of rows, which any layout loads, every element the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import train_each, write_corpus
from trimegatron.checkpoint.storage import read_whole, stored_pieces

SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}
COMMON = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "ddp_bucket_size": 1500,
    "save_interval": 2,
    "train_iters": 4,
}
"""A checkpoint after 2 steps of 4. The vocabulary is 211, which nothing divides."""

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2 tp2 sharded": (4, 2, SHARDED),
    "dp4 sharded": (4, 1, SHARDED),
    "dp2 plain": (2, 1, {}),
    "alone": (1, 1, {}),
}


@pytest.mark.parametrize("bf16", [None, True], ids=["fp32", "bf16"])
def test_every_layout_loads_every_other(bf16: bool | None, tmp_path: Path):
    """A checkpoint goes from layout to layout, loaded and saved without a step: not an element changes, and the two
    steps that follow are those of the run that never stopped."""
    corpus = tmp_path / "text"
    write_corpus(corpus)
    (first, (world_size, tensor_parallel_size, changes)), *others = LAYOUTS.items()
    common = COMMON | {"bf16": bf16}
    at = tmp_path / first
    run = common | changes | {"save": at, "tensor_model_parallel_size": tensor_parallel_size}
    straight = train_each(corpus, tmp_path, {first: run}, world_size=world_size)[first]
    expected = dict(read_whole(at / "iter_0000002", ""))
    assert any(name.startswith("optimizer.master.") for name in expected) is bool(bf16)
    for name, (world_size, tensor_parallel_size, changes) in others:
        run = common | changes | {"load": at, "ckpt_step": 2, "tensor_model_parallel_size": tensor_parallel_size}
        at = tmp_path / name
        runs = {"saved again": run | {"save": at, "train_iters": 2}, name: run}
        lines = train_each(corpus, tmp_path, runs, world_size=world_size)[name]
        tensors = dict(read_whole(at / "iter_0000002", ""))
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, expected[key]), (name, key)
        for key in ("lm_loss", "grad_norm"):
            mine, theirs = ([line[key] for line in run] for run in (lines, straight[2:]))
            np.testing.assert_allclose(mine, theirs, rtol=2e-3 if bf16 else 1e-5, err_msg=f"{name} {key}")


def test_who_writes_what(tmp_path: Path):
    """Every element once: what ranks hold alike from one of them, a sharded optimizer's from each its own rows."""
    corpus = tmp_path / "text"
    write_corpus(corpus)
    runs = {
        name: COMMON | {"train_iters": 2, "save": tmp_path / name, "use_distributed_optimizer": sharded}
        for name, sharded in (("plain", None), ("sharded", True))
    }
    train_each(corpus, tmp_path, runs, world_size=2)
    files = {name: {f.name for f in (tmp_path / name / "iter_0000002").glob("shard-*")} for name in runs}
    assert files == {
        "plain": {"shard-00000.safetensors"},
        "sharded": {"shard-00000.safetensors", "shard-00001.safetensors"},
    }
    pieces = stored_pieces(tmp_path / "sharded" / "iter_0000002")
    for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        table = sorted(pieces[f"{prefix}.embedding.word_embeddings.weight"], key=lambda piece: piece.offsets)
        # 216 padded rows of 16 are 3456 elements, cut at a multiple of 128: after row 112 of the 211 that exist.
        assert [(piece.offsets, piece.shape) for piece in table] == [((0, 0), (112, 16)), ((112, 0), (99, 16))]
