"""The count of what a layer keeps, to the byte, and the formula it is printed beside."""

from __future__ import annotations

import pytest

from trimegatron.bench import activations
from trimegatron.bench.activations import (
    RECOMPUTE,
    ActivationsConfig,
    kept_by_a_layer,
    layer_spec,
    megatron,
    one_rank_of,
)

S, B, H, A = 32, 2, 64, 4
CONFIG = ActivationsConfig(hidden_size=H, num_attention_heads=A, seq_length=S, micro_batch_size=B)
SBH = S * B * H
NORMS = 2 * 2 * 4 * S * B  # mean and 1 / deviation in fp32, two norms
SUMS = 4 * A * S * B  # the logarithm of the softmax's sum in fp32
SQUARE = A * S * S * B


def count(dropout: tuple[float, float], recompute: str, size: int = 1, sequence_parallel: bool = False) -> int:
    with one_rank_of(size) as axis:
        spec = layer_spec(CONFIG, axis, sequence_parallel, dropout, RECOMPUTE[recompute])
        return sum(tensor.num_bytes for tensor in kept_by_a_layer(spec, S, B))


@pytest.mark.parametrize(
    ("dropout", "recompute", "expected"),
    [
        ((0.0, 0.0), "nothing", 20 * SBH + NORMS + SUMS),
        ((0.0, 0.0), "selective", 20 * SBH + NORMS),
        ((0.0, 0.0), "full", 2 * SBH),
        ((0.1, 0.0), "nothing", 22 * SBH + NORMS + SUMS),  # masks, which the eager reference keeps
        ((0.1, 0.1), "nothing", 22 * SBH + NORMS + 5 * SQUARE),
        ((0.1, 0.1), "selective", 22 * SBH + NORMS),
        ((0.1, 0.1), "full", 2 * SBH),
    ],
)
def test_bytes(dropout: tuple[float, float], recompute: str, expected: int):
    assert count(dropout, recompute) == expected


def test_bytes_of_a_tensor_parallel_rank():
    """Without sequence parallelism the two norms' inputs, 4, are whole."""
    for t in (2, 4):
        assert count((0.0, 0.0), "nothing", t) == (4 + 16 // t) * SBH + NORMS + SUMS // t
        assert count((0.0, 0.0), "nothing", t, True) == (20 * SBH + NORMS + SUMS) // t
        assert count((0.1, 0.1), "selective", t, True) == (22 * SBH + NORMS) // t
        assert count((0.0, 0.0), "full", t, True) == 2 * SBH // t


def test_megatrons_formula():
    """GPT-3: t = 8, a = 96, s = 2048, h = 12288, whose core is 80."""
    config = ActivationsConfig(hidden_size=12288, num_attention_heads=96, seq_length=2048, tensor_model_parallel_size=8)

    def units(size: int, sequence_parallel: bool, recompute: str) -> float:
        with one_rank_of(size) as axis:
            spec = layer_spec(config, axis, sequence_parallel, (0.1, 0.1), RECOMPUTE[recompute])
            return megatron(spec, config.seq_length)

    assert units(1, False, "nothing") == 34 + 80
    assert units(8, False, "nothing") == 10 + 24 / 8 + 80 / 8
    assert units(8, True, "nothing") == 34 / 8 + 80 / 8
    assert units(8, True, "selective") == 34 / 8
    assert units(8, True, "full") == 2 / 8


def test_the_command_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]):
    line = f"--hidden-size {H} --num-attention-heads {A} --seq-length {S} --micro-batch-size {B}"
    assert activations.main([*line.split(), "--tensor-model-parallel-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 * 3 * 3 + 2 + 10
    assert lines[1].split()[-2:] == ["20.50", "44.00"]
