"""``trimegatron checkpoint list|verify|diff``."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.runs import tiny_flags, train_each, write_corpus
from trimegatron.checkpoint import compare
from trimegatron.checkpoint.compare import differences
from trimegatron.checkpoint.directory import file_hash
from trimegatron.checkpoint.stored import whole_tensor
from trimegatron.cli import main
from trimegatron.lazy import LazyTensor

TABLE = "model.embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps saved every two, at (tp 2), in bf16 and again in fp32 with a sharded optimizer: tp2, sharded."""
    folder = tmp_path_factory.mktemp("saved")
    write_corpus(folder / "text")
    common = {"train_iters": 4, "save_interval": 2, "ddp_bucket_size": 1500}
    train_each(
        folder / "text",
        folder,
        {
            "tp2": common | {"tensor_model_parallel_size": 2, "bf16": True, "save": folder / "tp2"},
            "sharded": common | {"use_distributed_optimizer": True, "save": folder / "sharded"},
        },
        world_size=2,
    )
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """One checkpoint, to be damaged."""
    return Path(shutil.copytree(saved / "sharded" / "iter_0000004", tmp_path / "iter_0000004"))


def rewrite(folder: Path, shard: str, tensors: dict[str, torch.Tensor]) -> None:
    """Another content of a shard, with a manifest that agrees."""
    path = folder / shard
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][shard] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_list(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    shutil.copytree(saved / "tp2", tmp_path / "c")
    (tmp_path / "c" / "iter_0000002" / "manifest.json").unlink()
    (tmp_path / "c" / "iter_0000006").mkdir()
    assert main(["checkpoint", "list", str(tmp_path / "c"), str(saved / "sharded" / "iter_0000004")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["iteration", "0000002", "4", "0000006"]
    assert lines[2].endswith("it has no manifest.json: it was not finished")
    words = lines[3].split()
    assert words[3:] == ["0.5", "MB", "dp1", "tp2", "pp1", "32", "512", "bf16", "1", "complete,", "newest"]
    assert "dp2 tp1 pp1 sharded" in lines[7] and "fp32" in lines[7]
    assert main(["checkpoint", "list", str(tmp_path / "typo")]) == 4


def test_verify(saved: Path, copy: Path, capsys: pytest.CaptureFixture):
    assert main(["checkpoint", "verify", str(saved / "tp2"), str(saved / "sharded")]) == 0
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["whole"] * 4
    shard = copy / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (copy / "shard-00007.safetensors").write_bytes((copy / "shard-00000.safetensors").read_bytes())
    assert main(["checkpoint", "verify", str(copy)]) == 4
    out = capsys.readouterr().out
    assert "shard-00001.safetensors is damaged" in out and "shard-00007.safetensors is not in the manifest" in out
    assert f"the pieces of {TABLE} do not cover its shape [211, 32]" in out  # they lie over one another
    shard.write_bytes(data[:-1])
    (copy / "state.json").unlink()
    assert main(["checkpoint", "verify", str(copy)]) == 4
    out = capsys.readouterr().out
    assert "state.json is missing" in out and "shard-00001.safetensors has" in out


def test_verify_knows_what_should_be_there(copy: Path, capsys: pytest.CaptureFixture):
    """The last rows of a table, and a whole tensor, are missing, and no other file says that they were there."""
    tensors = load_file(copy / "shard-00001.safetensors")
    del tensors[TABLE]
    name = next(iter(tensors))
    rewrite(copy, "shard-00001.safetensors", {key: value for key, value in tensors.items() if key != name})
    first = load_file(copy / "shard-00000.safetensors")
    first.pop(name, None)
    rewrite(copy, "shard-00000.safetensors", first)
    assert main(["checkpoint", "verify", str(copy)]) == 4
    out = capsys.readouterr().out
    assert f"the pieces of {TABLE} do not cover its shape [211, 32]" in out and f"{name} is missing" in out


def test_diff(saved: Path, copy: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "BLOCK", 2000)  # every tensor in several blocks
    root = saved / "sharded"
    assert main(["checkpoint", "diff", str(root), str(root / "iter_0000004")]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    tensors = load_file(copy / "shard-00001.safetensors")
    tensors[TABLE][-1, 3] += 0.5
    tensors[TABLE][-2] = float("nan")
    rewrite(copy, "shard-00001.safetensors", tensors)
    assert main(["checkpoint", "diff", str(root), str(copy)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"  {TABLE}: 33 of 6752 elements differ, max |Δ| inf", "they differ"]
    assert list(differences(copy, copy)) == []  # NaN is NaN
    tensors[TABLE][-2] = load_file(root / "iter_0000004" / "shard-00001.safetensors")[TABLE][-2]
    rewrite(copy, "shard-00001.safetensors", tensors)
    (line,) = differences(root / "iter_0000004", copy)
    assert line == f"{TABLE}: 1 of 6752 elements differ, max |Δ| 0.5"


def test_diff_of_other_runs(saved: Path, capsys: pytest.CaptureFixture):
    assert main(["checkpoint", "diff", str(saved / "tp2"), str(saved / "sharded")]) == 1
    out = capsys.readouterr().out
    assert "config.precision.bf16: true and false" in out and f"{TABLE} is BF16 and F32; " in out
    assert "optimizer.master.final_layernorm.weight is only in " in out
    lines = list(differences(saved / "tp2" / "iter_0000002", saved / "tp2" / "iter_0000004"))
    assert "progress.iteration: 2 and 4" in lines and "optimizer_step: 2 and 4" in lines


def test_one_block_is_read_at_a_time(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "BLOCK", 1000)
    sizes = []

    def noting_sizes(*args: Any) -> LazyTensor:
        tensor = whole_tensor(*args)
        rows = tensor.open()
        return replace(tensor, open=lambda: lambda *block: sizes.append((read := rows(*block)).numel()) or read)

    monkeypatch.setattr(compare, "whole_tensor", noting_sizes)
    folder = saved / "sharded" / "iter_0000004"
    assert list(differences(folder, folder)) == []
    assert max(sizes) <= 1000
    assert sum(sizes) == 2 * sum(t.numel() for path in folder.glob("shard-*") for t in load_file(path).values())


def test_usage(capsys: pytest.CaptureFixture):
    assert main(["checkpoint"]) == 2
    assert main(["checkpoint", "--help"]) == 0
    assert "verify" in capsys.readouterr().out
    assert main(["checkpoint", "remove"]) == 2
    assert main(["checkpoint", "diff", "one"]) == 2
    assert main(["checkpoint", "verify", *tiny_flags(Path("x"))[:2]]) == 2
