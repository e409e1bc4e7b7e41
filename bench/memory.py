"""``trimegatron bench memory``: bytes of weights, gradients and optimizer state for each parameter, on one rank.

Counted from the tensors that a rank of the layout really allocates, padding included, beside Megatron-LM's figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trimegatron.bench.models import adamw, gpt2_spec
from trimegatron.bench.results import OURS, Result, counted
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, option
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.data_parallel.layout import BUCKET_SIZE
from trimegatron.mesh import Axis, Mesh
from trimegatron.model.gpt import GPTStage

DATA_PARALLEL_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class MemoryBenchConfig(Options):
    """Count of the memory for each parameter"""

    num_layers: int = option(4, "transformer layers", minimum=1)
    hidden_size: int = option(256, "width of the model", unit="features", minimum=1)
    num_attention_heads: int = option(4, "attention heads", minimum=1)
    seq_length: int = option(256, "rows of the position table", unit="tokens", minimum=1)
    vocab_size: int = option(8192, "words", minimum=1)
    ddp_bucket_size: int = option(BUCKET_SIZE, "parameters of a bucket", minimum=1)


@dataclass(frozen=True)
class Precision:
    """Dtypes of weights and gradients, and what Megatron-LM's documentation states for them, in bytes a parameter:
    ``replicated`` on every rank, ``cut`` over data parallelism by the distributed optimizer."""

    name: str
    dtype: torch.dtype
    grad_dtype: torch.dtype
    replicated: int
    cut: int


PRECISIONS = (
    Precision("fp32", torch.float32, torch.float32, 8, 8),
    Precision("bf16, gradients in fp32", torch.bfloat16, torch.float32, 6, 12),
    Precision("fp16, gradients in fp16", torch.float16, torch.float16, 4, 16),
)
"""Source: Megatron-LM's README, "Distributed Optimizer": 16, 18 and 20 bytes, or 8 + 8/d, 6 + 12/d and 4 + 16/d."""


@dataclass(frozen=True)
class Count:
    """Bytes a parameter on one rank."""

    precision: Precision
    data_parallel_size: int
    shard_optimizer: bool
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def megatron(self) -> float:
        cut = self.data_parallel_size if self.shard_optimizer else 1
        return self.precision.replicated + self.precision.cut / cut


def main(argv: list[str]) -> int:
    """Count and print."""
    sweeps = {"hidden_size": (16, 64, 256, 1024)}
    return run("memory", argv, MemoryBenchConfig, results, description=__doc__, sweeps=sweeps, show=None)


def results(config: MemoryBenchConfig) -> Iterator[Result]:
    """Each kind of bytes beside Megatron-LM's total, printed in a table."""
    print(f"bytes a parameter, on one rank{'':25} dp  weights  gradients  optimizer    total  Megatron  ratio")
    for count in counts(config):
        way = "optimizer cut" if count.shard_optimizer else "plain"
        print(
            f"{count.precision.name:24} {way:30} {count.data_parallel_size:2} {count.weights:8.3f} "
            f"{count.gradients:10.3f} {count.optimizer:10.3f} {count.total:8.3f} {count.megatron:9.3f} "
            f"{count.total / count.megatron:6.3f}"
        )
        for variant, figure, value in (
            (OURS, "weights", count.weights),
            (OURS, "gradients", count.gradients),
            (OURS, "optimizer", count.optimizer),
            (OURS, "total", count.total),
            ("Megatron-LM's documentation", "total", count.megatron),
        ):
            yield counted(
                "kept by a rank", variant, figure, "bytes / parameter", value,
                precision=count.precision.name, distributed_optimizer=count.shard_optimizer,
                data_parallel=count.data_parallel_size, num_layers=config.num_layers, hidden_size=config.hidden_size,
                vocab_size=config.vocab_size, seq_length=config.seq_length, bucket_size=config.ddp_bucket_size,
            )  # fmt: skip


def counts(config: MemoryBenchConfig) -> Iterator[Count]:
    """Every precision, with and without the distributed optimizer, on the last rank of each data-parallel size."""
    for precision in PRECISIONS:
        yield count_bytes(config, precision, 1, shard_optimizer=False)
        for size in DATA_PARALLEL_SIZES:
            yield count_bytes(config, precision, size, shard_optimizer=True)


def count_bytes(
    config: MemoryBenchConfig, precision: Precision, data_parallel_size: int, *, shard_optimizer: bool
) -> Count:
    """Build what one rank holds, talking to nobody, and add up its storages."""
    spec = gpt2_spec(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        seq_length=config.seq_length,
        vocab_size=config.vocab_size,
        dtype=precision.dtype,
    )
    model = GPTStage(spec, range(spec.num_layers))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    buffer = ParameterBuffer(
        model.named_parameters(),
        grad_dtype=precision.grad_dtype,
        mesh=Mesh(spec.device, data=Axis(data_parallel_size, data_parallel_size - 1)),
        bucket_size=config.ddp_bucket_size,
        shard_optimizer=shard_optimizer,
    )
    optimizer = adamw(buffer, kernels="auto")
    weights = storage_bytes(*model.parameters(), buffer.params)
    gradients = storage_bytes(*(p.grad for p in model.parameters() if p.grad is not None), buffer.grads)
    everything = storage_bytes(
        *model.parameters(),
        buffer.params,
        *(value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)),
    )
    return Count(
        precision,
        data_parallel_size,
        shard_optimizer,
        weights=weights / num_parameters,
        gradients=gradients / num_parameters,
        optimizer=(everything - weights) / num_parameters,
    )


def storage_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the storages behind ``tensors``, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
