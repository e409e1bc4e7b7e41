"""Tensors read by slice: whatever the chunks, the same elements."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimegatron import lazy
from trimegatron.checkpoint.directory import file_hash
from trimegatron.convert.shards import parse_size, shards_of
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.lazy import assemble, cast, cut, in_memory, is_equal, rearranged
from trimegatron.safetensors_file import read_safetensors, write_safetensors


@pytest.fixture(params=[1, 100, 1 << 20])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lazy, "CHUNK_BYTES", request.param)
    return request.param


def test_files_are_the_librarys(chunk_bytes: int, tmp_path: Path):
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3).to(torch.bfloat16),
        "c": torch.randn(2, 3, 4).half(),
        "empty": torch.empty(0, 4),
    }
    written: list[int] = []
    lazies = {name: in_memory(tensor) for name, tensor in tensors.items()}
    digest = hashlib.sha256()
    write_safetensors(tmp_path / "x", lazies, {"k": "v"}, written.append, digest=digest)
    assert digest.hexdigest() == file_hash(tmp_path / "x")
    assert sum(written) == sum(tensor.nbytes for tensor in tensors.values())
    theirs = load_file(tmp_path / "x")
    save_file(tensors, tmp_path / "y")
    mine = read_safetensors(tmp_path / "y").tensors
    assert mine.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor) and torch.equal(mine[name].load(), tensor)
        if tensor.numel():
            assert torch.equal(torch.cat(list(mine[name].chunks())), tensor)
            assert torch.equal(mine[name].open()(1, 2), tensor[1:2])


def test_a_file_cut_short_is_refused(tmp_path: Path):
    save_file({"a": torch.zeros(100)}, tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x is not a safetensors file"):
        read_safetensors(tmp_path / "x")


def test_pieces_rearranged_and_rounded(chunk_bytes: int):
    whole = torch.randn(12, 10)
    pieces = [
        ((r, c), in_memory(whole[r : r + 6, c : c + 5].contiguous())) for r, c in ((0, 0), (6, 0), (0, 5), (6, 5))
    ]
    assembled = assemble((12, 10), pieces)
    assert torch.equal(torch.cat(list(assembled.chunks())), whole)
    assert torch.equal(assemble((8, 10), pieces).load(), whole[:8])  # padding that sticks out is left out
    turned = rearranged(assembled, (10, 12), torch.t)
    assert torch.equal(torch.cat(list(turned.chunks())), whole.t())
    grouped = rearranged(assembled, (12, 10), lambda out: out.view(3, 4, 10).permute(1, 0, 2))
    assert torch.equal(grouped.load(), whole.view(4, 3, 10).transpose(0, 1).reshape(12, 10))
    assert torch.equal(cast(assembled, torch.float16).load(), whole.half())
    piece = cut(assembled, (9, 2), (3, 5), (4, 6))
    assert torch.equal(piece[:3, :5], whole[9:, 2:7]) and not piece[3:].any() and not piece[:, 5:].any()
    assert is_equal(assembled, in_memory(whole)) and not is_equal(turned, assembled)
    assert not is_equal(in_memory(torch.tensor([0.0])), in_memory(torch.tensor([-0.0])))  # bits, not values


def test_shards_and_sizes():
    tensors = {str(i): in_memory(torch.zeros(n)) for i, n in enumerate((10, 10, 50, 5, 5))}
    assert [list(shard) for shard in shards_of(tensors, 80)] == [["0", "1"], ["2"], ["3", "4"]]
    assert [list(shard) for shard in shards_of(tensors, 10**6)] == [["0", "1", "2", "3", "4"]]
    assert (parse_size("5GB"), parse_size("1.5 MiB"), parse_size("7")) == (5 * 10**9, 3 << 19, 7)
    for text in ("", "GB", "-1GB", "0", "5 apples"):
        with pytest.raises(ConfigError, match="--max-shard-size"):
            parse_size(text)
