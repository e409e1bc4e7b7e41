"""Training through the Triton kernels, every one of them, in their interpreter: the losses of the eager references."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.runs import tiny_flags, train_tiny, write_corpus

SMALL = {"train_iters": 3, "global_batch_size": 2, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def test_losses_and_norms_equal_the_references(tmp_path: Path):
    """The fused softmax, and what "auto" comes to where Triton runs: flash attention."""
    write_corpus(tmp_path / "text")
    reference = train_tiny(tmp_path / "text", metrics=tmp_path / "reference.jsonl", **SMALL)
    runs = {}
    for backend in ("softmax", "auto"):
        metrics = tmp_path / f"{backend}.jsonl"
        flags = tiny_flags(
            tmp_path / "text", metrics_file=metrics, kernels="triton", attention_backend=backend, **SMALL
        )
        runs[metrics] = subprocess.Popen(
            [sys.executable, "-m", "trimegatron.train", *flags], env=os.environ | {"TRITON_INTERPRET": "1"}
        )
    for metrics, run in runs.items():
        assert run.wait(timeout=300) == 0
        triton = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert len(triton) == 3
        for name in ("lm_loss", "grad_norm"):
            expected = [x[name] for x in reference]
            np.testing.assert_allclose([x[name] for x in triton], expected, rtol=1e-5, err_msg=f"{metrics.stem} {name}")
