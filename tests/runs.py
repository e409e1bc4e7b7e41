"""Small training runs for tests: a synthetic corpus, the flags, and what came out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parallel import free_port, run_ranks
from trimegatron import train
from trimegatron.checkpoint.stored import stored_pieces, whole_tensor
from trimegatron.data.indexed_writer import IndexedDatasetWriter

VOCAB_SIZE = 211  # a prime: no tensor-parallel size divides it


def write_corpus(prefix: Path, *, num_documents: int = 60, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> None:
    """Documents of 20 to 60 tokens that follow one another by a rule with some noise, so that there is something to
    learn.
    """
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(num_documents):
            length = int(random.integers(20, 60))
            steps = random.integers(1, 4, size=length)
            tokens = (int(random.integers(vocab_size)) + np.cumsum(steps)) % vocab_size
            writer.add_document(tokens, [length])


def tiny_flags(prefix: Path, **changes: Any) -> list[str]:
    """The flags of a run of a tiny model on :func:`write_corpus`'s data; ``changes`` by field name, None leaves a
    flag out.
    """
    flags: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "make_vocab_size_divisible_by": 8,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCAB_SIZE - 1,
        "data_path": prefix,
        "split": "90,10,0",
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 20,
        "lr": 1e-2,
        "min_lr": 1e-3,
        "lr_decay_style": "cosine",
        "lr_decay_iters": 20,
        "lr_warmup_iters": 2,
        "weight_decay": 0.1,
        "log_interval": 1,
        "eval_iters": 0,
        "num_workers": 0,
        "device": "cpu",
    }
    return [
        word
        for name, value in (flags | changes).items()
        if value is not None
        for word in (
            f"--{name.replace('_', '-')}",
            *([] if value is True else map(str, value if isinstance(value, list) else [value])),
        )
    ]


def train_tiny(prefix: Path, *, world_size: int = 1, metrics: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train in ``world_size`` forked processes, and return the lines of the metrics file; none where no step was
    left to do.

    Raises:
        AssertionError: a rank did not return 0.
    """
    flags = tiny_flags(prefix, metrics_file=metrics, **changes)
    codes = run_ranks(world_size, train.main, flags)
    assert codes == [0] * world_size
    return read_metrics(metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none where no step was left to do."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tensors_of(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The global tensors of a checkpoint whose names start with ``prefix``."""
    stored = {name: pieces for name, pieces in stored_pieces(folder).items() if name.startswith(prefix)}
    return {name: whole_tensor(folder, name, pieces).load() for name, pieces in stored.items()}


def train_each(
    prefix: Path, folder: Path, runs: dict[str, dict[str, Any]], *, world_size: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Several runs one after another in the same ``world_size`` processes: name → changes becomes name → lines of the
    metrics file ``folder``/name.jsonl.

    Raises:
        AssertionError: a rank did not return 0.
    """
    ports = [free_port() for _ in runs]
    paths = {name: folder / f"{name}.jsonl" for name in runs}
    lines = [tiny_flags(prefix, metrics_file=paths[name], **changes) for name, changes in runs.items()]
    assert run_ranks(world_size, _train_in_turn, ports, lines) == [[0] * len(runs)] * world_size
    return {name: read_metrics(path) for name, path in paths.items()}


def _train_in_turn(ports: list[int], lines: list[list[str]]) -> list[int]:
    codes = []
    for port, flags in zip(ports, lines, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        codes.append(train.main(flags))
    return codes
