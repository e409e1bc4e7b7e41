"""``--kernel-table`` in training: every rank goes by the same configurations, or the run does not start."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import run_ranks
from tests.runs import tiny_flags
from trimegatron import train
from trimegatron.config import parse_train_args
from trimegatron.kernel_table import use_kernel_table
from trimegatron.kernels import tables
from trimegatron.kernels.configs import TUNED_OPS
from trimegatron.kernels.source_hash import source_hash
from trimegatron.mesh import Mesh


def write_table(path: Path, num_warps: int, source: str | None = None) -> Path:
    op = TUNED_OPS["adamw"]
    record = {"op": "adamw", "dtype": "float32", "shape": {}, "config": {"num_warps": num_warps},
              "source": source or source_hash(op.module, op.kernel)}  # fmt: skip
    path.write_text(json.dumps({"format": 1, "device": tables.INTERPRETER, "records": [record]}))
    return path


def start(corpus: Path, of_rank: list[str]) -> tuple[int, str]:
    """Exit code and errors of one rank that is given its own table."""
    os.environ["TRITON_INTERPRET"] = "1"
    table = of_rank[int(os.environ["RANK"])]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = train.main(tiny_flags(corpus, kernels="triton", kernel_table=table))
    return code, errors.getvalue()


def test_ranks_that_disagree_stop_with_one_message(corpus: Path, tmp_path: Path) -> None:
    files = [str(write_table(tmp_path / f"{warps}.json", warps)) for warps in (2, 8)]
    (code, text), (other_code, other_text) = run_ranks(2, start, corpus, files)
    assert (code, other_code) == (2, 2)
    (message,) = [line for line in (text + other_text).splitlines() if line]
    assert message.startswith("trimegatron train: error: --kernel-table must come to the same configurations on every")
    assert all(f"of {path} on rank {rank}" in message for rank, path in enumerate(files))


def test_a_table_that_one_rank_cannot_use_is_one_message(corpus: Path, tmp_path: Path) -> None:
    files = [str(write_table(tmp_path / "right.json", 2)), str(write_table(tmp_path / "wrong.json", 5))]
    results = run_ranks(2, start, corpus, files)
    assert [code for code, _ in results] == [2, 2]
    (message,) = [line for _, text in results for line in text.splitlines() if line]
    assert f"--kernel-table: {files[1]}, record 0: num_warps (5) of adamw must be a power of two" in message


@pytest.fixture
def notes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch

    monkeypatch.setattr(tables, "choices", {})

    def of(**changes: Any) -> list[str]:
        config = parse_train_args(tiny_flags(corpus, **changes), world_size=1)
        return use_kernel_table(config, Mesh(torch.device("cpu")))

    return of


def test_what_a_run_says_of_its_tables(notes: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.json", 2)
    assert notes() == [] and notes(kernels="triton") == []
    assert notes(kernel_table=table) == ["--kernel-table has no effect: no Triton kernel runs on cpu."]
    (line,) = notes(kernel_table=table, kernels="triton")
    assert line.startswith(f"1 tuned kernel configurations from {table} (digest ")
    outdated, empty = notes(kernel_table=write_table(tmp_path / "b.json", 2, source="0"), kernels="triton")
    assert "1 records are of other versions of their kernels (adamw)" in outdated
    assert empty.endswith("has no record that counts: every kernel goes by its heuristic.")
    assert notes(kernel_table="none", kernels="triton") == []
