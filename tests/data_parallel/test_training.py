"""Whole runs: overlapped or not, the optimizer sharded or not, it is one run, to the bit; and the single process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import tensors_of, train_each

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain overlapped": {"overlap_grad_reduce": True},
    "sharded": {"use_distributed_optimizer": True},
    "sharded overlapped": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "eval_iters": 1,  # an evaluation comes between a gathering and the next step
        "eval_interval": 7,
    },
}
EXTREMES = ("plain", "sharded overlapped")
SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "ddp_bucket_size": 1000,  # the table, both layers and the rest apart
    "save_interval": 100,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "log_grad_norm_by_group": True,
}
TOLD = ("lm_loss", "grad_norm", "grad_norm_decayed", "grad_norm_others", "params_norm")


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    changes = {**SMALL, "save_interval": None}
    return train_each(corpus, folder, {"alone": changes}, world_size=1)["alone"]


@pytest.mark.parametrize(
    ("world_size", "tensor_parallel_size", "ways"),
    [(2, 1, tuple(WAYS)), (4, 1, EXTREMES), (4, 2, EXTREMES)],
    ids=["dp2", "dp4", "dp2tp2"],
)
def test_one_run_whatever_the_way(
    world_size: int,
    tensor_parallel_size: int,
    ways: tuple[str, ...],
    corpus: Path,
    alone: list[dict[str, Any]],
    tmp_path: Path,
):
    runs = {name: SMALL | WAYS[name] for name in ways}
    runs |= {f"bf16 {name}": SMALL | WAYS[name] | {"bf16": True} for name in EXTREMES}
    layout = {"tensor_model_parallel_size": tensor_parallel_size}
    runs = {name: changes | layout | {"save": tmp_path / name} for name, changes in runs.items()}
    lines = train_each(corpus, tmp_path, runs, world_size=world_size)
    curves = {
        name: [{key: line[key] for key in (*TOLD, "num_zeros")} for line in run if "grad_norm" in line]
        for name, run in lines.items()
    }
    tensors = {name: tensors_of(tmp_path / name / "iter_0000020") for name in runs}
    for name in runs:
        first = "bf16 plain" if name.startswith("bf16") else "plain"
        assert len(curves[name]) == 20 and curves[name] == curves[first], name
        assert tensors[name].keys() == tensors[first].keys()
        for key, tensor in tensors[name].items():
            assert torch.equal(tensor, tensors[first][key]), (name, key)
    assert any(key.startswith("optimizer.master.") for key in tensors["bf16 sharded overlapped"])
    for key in TOLD:
        mine, expected = ([line[key] for line in curve] for curve in (curves["plain"], alone))
        np.testing.assert_allclose(mine, expected, rtol=1e-5, err_msg=key)
    assert curves["bf16 plain"] != curves["plain"]
