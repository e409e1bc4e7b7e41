"""The model card: what was trained on what, how it is configured, and the proof that it is the trained model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimegatron.convert.proof import Proof
from trimegatron.convert.source import Source

FRONT = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- trimegatron
---
"""


def model_card(source: Source, name: str, gpt2: Mapping[str, Any], proof: Proof | None) -> str:
    """The text of ``README.md``."""
    config, progress = source.config, source.state.progress
    tokens = progress.consumed_samples * config.data.seq_length
    paths = source.state.data.get("paths") or config.data.data_path
    data = ", ".join(f"`{Path(path).name}`" for path in paths) or "data that the checkpoint does not name"
    parameters = sum(tensor.num_bytes // tensor.dtype.itemsize for tensor in source.model.values())
    rows = {
        "parameters": f"{parameters:,}",
        "iterations": f"{progress.iteration:,}",
        "samples": f"{progress.consumed_samples:,} of {config.data.seq_length} tokens ({tokens:,} tokens)",
        "global batch": f"{config.training.global_batch_size} samples",
        "learning rate": f"{config.optimizer.lr:g}, {config.optimizer.lr_decay_style} to {config.optimizer.min_lr:g}",
        "weight decay": f"{config.optimizer.weight_decay:g}",
        "precision of training": config.precision.params_dtype,
        "seed": str(config.training.seed),
        "tokenizer": f"{source.tokenizer.type}, {source.tokenizer.vocab_size:,} tokens",
    }
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    proven = (
        "This conversion was **not verified** (`--no-verify`)."
        if proof is None
        else f"Run by transformers in a fresh process beside the source, on the same fixed tokens, in float32: {proof}."
    )
    return f"""{FRONT}
# {name}

A GPT-2 model trained on {data} and converted by trimegatron {source.state.versions.get("trimegatron", "")}.

| | |
|---|---|
{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

## Proof

{proven}

## Configuration

```json
{json.dumps(dict(gpt2), indent=2)}
```
"""
