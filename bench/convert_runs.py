"""What ``trimegatron bench convert`` runs in processes of their own."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimegatron.bench.measure import Figures, peak_memory
from trimegatron.checkpoint.checkpoint import Progress
from trimegatron.config import Config, DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig
from trimegatron.convert.from_megatron import read_megatron
from trimegatron.convert.megatron_files import is_megatron
from trimegatron.convert.source import MASTER, MODEL, MOMENTS, Source, new_state, read_checkpoint
from trimegatron.convert.to_hf import write_hf
from trimegatron.convert.to_megatron import write_megatron
from trimegatron.convert.to_ours import write_checkpoint
from trimegatron.lazy import CHUNK_BYTES, LazyTensor
from trimegatron.model.build import global_shapes
from trimegatron.tokenizer import NullTokenizer


def make(work: str, model: dict[str, Any], optimizer: bool, stages: int) -> Figures:
    """A checkpoint of noise, ours and Megatron-LM's."""
    config = Config(
        model=ModelConfig(max_position_embeddings=1024, make_vocab_size_divisible_by=128, **model),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        data=DataConfig(seq_length=1024, tokenizer_type="NullTokenizer"),
        precision=PrecisionConfig(fp16=True),
    )
    shapes = global_shapes(config)
    kinds = [MODEL, *((*MOMENTS, MASTER) if optimizer else ())]
    tensors = {
        kind: {name: noise(shape, torch.float16 if kind == MODEL else torch.float32) for name, shape in shapes.items()}
        for kind in kinds
    }
    tokenizer = NullTokenizer(model["vocab_size"] - 1)
    ours, megatron = Path(work) / "ours", Path(work) / "megatron"
    # After a step: of a run that has made none, Megatron-LM knows no optimizer.
    state = new_state(config, progress=Progress(iteration=1, consumed_samples=1, scheduled_samples=1), optimizer_step=1)
    write_checkpoint(Source(Path("noise"), config, state, tokenizer, tensors), ours, verify=False)
    write_megatron(read_checkpoint(ours), megatron, tp=1, pp=stages, verify=False)
    return {
        "ours": str(ours),
        "megatron": str(megatron),
        "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "bytes": sum(tensor.num_bytes for named in tensors.values() for tensor in named.values()),
        "weight_bytes": sum(tensor.num_bytes for tensor in tensors[MODEL].values()),
    }


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    def rows(first: int, last: int) -> torch.Tensor:
        return torch.empty((last - first, *shape[1:])).uniform_(-0.1, 0.1).to(dtype)

    return LazyTensor(shape, dtype, lambda: rows)


def timed(output: Path, run: Callable[[], Any]) -> Figures:
    """Time, peak memory before and after, what was written, and its hash."""
    imports = peak_memory()["peak_mb"]
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    peak = peak_memory()["peak_mb"]
    files = sorted(path for path in output.rglob("*") if path.suffix in (".safetensors", ".raw"))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return {
        "seconds": seconds,
        "imports_mb": imports,
        "peak_mb": peak,
        "megabytes": sum(path.stat().st_size for path in files) / 1e6,
        "sha256": digest.hexdigest(),
    }


def copy(source: str, output: str, num_bytes: int) -> Figures:
    """Read so many bytes of a checkpoint's files and write them into one, flushed."""
    files = sorted(Path(source).rglob("shard-*.safetensors"))

    def run() -> None:
        Path(output).mkdir()
        left, buffer = num_bytes, memoryview(bytearray(CHUNK_BYTES))
        with (Path(output) / "bytes.raw").open("wb", buffering=0) as target:
            for path in files:
                with path.open("rb", buffering=0) as file:
                    while left and (count := file.readinto(buffer[:left])):
                        target.write(buffer[:count])
                        left -= count
            os.fsync(target.fileno())

    return timed(Path(output), run)


def to_hf(source: str, output: str) -> Figures:
    """A conversion to Hugging Face without the proof."""

    def run() -> None:
        read = read_megatron if is_megatron(Path(source)) else read_checkpoint
        write_hf(read(Path(source)), Path(output), verify=False)

    return timed(Path(output), run)


def from_megatron(source: str, output: str) -> Figures:
    """A conversion from Megatron-LM with the optimizer, not read back."""
    return timed(Path(output), lambda: write_checkpoint(read_megatron(Path(source)), Path(output), verify=False))
