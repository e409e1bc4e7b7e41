"""Operator calls of a step: what one layer launches is known."""

from __future__ import annotations

import subprocess
import sys


def test_counts():
    """Forward of a layer without dropout: two norms, two dropout-adds, GELU, four products, and fused attention."""
    script = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from trimegatron.bench.operators import count_ours, count_transformers, per_layer
ours, theirs = ([count(depth, 0.0) for depth in (2, 4)] for count in (count_ours, count_transformers))
print(per_layer(ours, "forward")[0], per_layer(theirs, "forward")[0])
print(per_layer(ours, "optimizer")[0], ours[0]["optimizer"]["trimegatron.adamw_step_.default"])
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    ours, theirs, per_layer_update, launches = map(float, out)
    assert ours == 10 and theirs > 1.5 * ours
    assert (per_layer_update, launches) == (0, 1)
