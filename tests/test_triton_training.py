"""Training through the Triton kernels, every one of them, in their interpreter: the losses of the eager references."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.runs import tiny_flags, train_tiny, write_corpus


def test_losses_and_norms_equal_the_references(tmp_path: Path):
    write_corpus(tmp_path / "text")
    small = {"train_iters": 3, "global_batch_size": 2, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    reference = train_tiny(tmp_path / "text", metrics=tmp_path / "reference.jsonl", **small)
    flags = tiny_flags(tmp_path / "text", metrics_file=tmp_path / "triton.jsonl", kernels="triton", **small)
    subprocess.run(
        [sys.executable, "-m", "trimegatron.train", *flags],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=300,
    )
    triton = [json.loads(line) for line in (tmp_path / "triton.jsonl").read_text().splitlines()]
    assert len(triton) == 3
    for name in ("lm_loss", "grad_norm"):
        np.testing.assert_allclose([x[name] for x in triton], [x[name] for x in reference], rtol=1e-5, err_msg=name)
