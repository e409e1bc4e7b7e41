"""What a layer keeps for backward with the kernels: no mask, and at attention dropout two squares in its dtype."""

from __future__ import annotations

import pytest

from trimegatron.bench.activations import RECOMPUTE, ActivationsConfig, kept_by_a_layer, layer_spec
from trimegatron.mesh import Axis

S, B, H, A = 16, 2, 32, 4


@pytest.mark.parametrize(
    ("dropout", "core"),
    [((0.0, 0.0), 4 * A * S * B), ((0.1, 0.0), 4 * A * S * B), ((0.1, 0.1), 4 * A * S * S * B)],
)
def test_bytes(dropout: tuple[float, float], core: int) -> None:
    config = ActivationsConfig(hidden_size=H, num_attention_heads=A, seq_length=S, micro_batch_size=B, kernels="triton")
    spec = layer_spec(config, Axis(), False, dropout, RECOMPUTE["nothing"])
    norms = 2 * 2 * 4 * S * B
    assert sum(tensor.num_bytes for tensor in kept_by_a_layer(spec, S, B)) == 20 * S * B * H + norms + core
