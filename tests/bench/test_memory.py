"""Memory of weights, gradients and optimizer: at most Megatron's, but for the padding."""

from __future__ import annotations

import pytest
import torch

from trimegatron.bench import memory, models
from trimegatron.bench.memory import MemoryBenchConfig, counts

SMALL = MemoryBenchConfig(num_layers=2, hidden_size=64, vocab_size=2000, ddp_bucket_size=20_000)


def test_bytes_of_each_kind():
    """16 bytes in fp32, 18 in bf16, of which 8 and 12 are cut; fp16 needs no fp32 gradient in its optimizer: 16."""
    seen = {}
    for count in counts(SMALL):
        cut = count.data_parallel_size if count.shard_optimizer else 1
        fp32 = count.precision.dtype == torch.float32
        expected = (
            count.precision.dtype.itemsize,
            count.precision.grad_dtype.itemsize,
            (8 if fp32 else 12) / cut,
        )
        for mine, floor in zip((count.weights, count.gradients, count.optimizer), expected, strict=True):
            assert floor <= mine <= 1.03 * floor, count
        assert count.total <= 1.03 * count.megatron
        seen[count.precision.name, count.data_parallel_size, count.shard_optimizer] = count.megatron
    assert seen["bf16, gradients in fp32", 1, False] == 18
    assert seen["bf16, gradients in fp32", 8, True] == 7.5
    assert len(seen) == 3 * 5


def test_a_copy_would_be_found(monkeypatch: pytest.MonkeyPatch):
    """An optimizer that kept a master copy of fp32 weights would show."""

    class Wasteful(models.FlatAdamW):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.copy = self.master.clone()

    monkeypatch.setattr(models, "FlatAdamW", Wasteful)
    assert next(counts(SMALL)).optimizer > 11.9


def test_the_table(capsys: pytest.CaptureFixture):
    assert memory.main(["--num-layers", "1", "--hidden-size", "64", "--vocab-size", "1000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16 and "Megatron" in lines[0]
    ratios = [float(line.split()[-1]) for line in lines[1:]]
    assert all(ratio < 1.1 for ratio in ratios)
