"""Operator calls of a step: what one layer launches is known."""

from __future__ import annotations

import subprocess
import sys


def test_counts():
    """A layer without dropout. Forward: norm, dropout-add with norm, GELU, four products, attention, dropout-add.
    Backward: the same with two products for each, the query-key-value's bias and its parts put together, the three
    inputs of products that are made again, and twelve gradients added to those of the step."""
    script = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from trimegatron.bench.operators import count_ours, count_transformers, per_layer
ours, theirs = ([count(depth, 0.0) for depth in (2, 4)] for count in (count_ours, count_transformers))
for phase in ("forward", "backward"):
    print(per_layer(ours, phase)[0], per_layer(theirs, phase)[0])
print(per_layer(ours, "optimizer")[0], ours[0]["optimizer"]["trimegatron.adamw_step_.default"])
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    ours, theirs, our_backward, their_backward, per_layer_update, launches = map(float, out)
    assert ours == 9 and theirs > 1.7 * ours
    assert our_backward == 9 + 4 + 2 + 3 + 12 and their_backward > our_backward
    assert (per_layer_update, launches) == (0, 1)
