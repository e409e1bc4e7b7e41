"""``trimegatron bench activations``: what one transformer layer keeps for backward, counted, beside Megatron's formula.

Saved-tensor hooks see every tensor that autograd keeps; each storage counts once, whole. Bytes are given in units of
s·b·h (bf16, so an activation [s, b, h] is 2). Of a tensor-parallel group one rank is built, on a process group that
moves nothing. docs/memory.md says what the figures are made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from trimegatron.bench.models import gpt2_spec
from trimegatron.bench.results import OURS, Result, counted
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, fail, kebab, option
from trimegatron.mesh import Axis
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.recompute import Recompute
from trimegatron.model.spec import GPTSpec

RECOMPUTE = {
    "nothing": Recompute(),
    "selective": Recompute("selective"),
    "full": Recompute("full", "uniform", 1),
}


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(Options):
    """Benchmark of activation memory"""

    hidden_size: int = option(768, "width of the model", unit="features", minimum=1)
    num_attention_heads: int = option(12, "attention heads", minimum=1)
    seq_length: int = option(512, "tokens of one sample", unit="tokens", minimum=1)
    micro_batch_size: int = option(1, "samples of one forward pass", unit="samples", minimum=1)
    tensor_model_parallel_size: int = option(4, "ranks that share the layer in the rows that say so", minimum=1)
    kernels: str = option(
        "reference",
        "whose forward passes to count; triton needs TRITON_INTERPRET=1 here, and small sizes",
        choices=("triton", "reference"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, ranks = "num_attention_heads", "tensor_model_parallel_size"
        for name, divisor in (("hidden_size", heads), ("num_attention_heads", ranks), ("seq_length", ranks)):
            if getattr(self, name) % getattr(self, divisor):
                rule = f"must be a multiple of {kebab(divisor)} ({getattr(self, divisor)})"
                fail(name, getattr(self, name), rule, way_out="Change one of the two.")


class Kept(NamedTuple):
    """One storage kept for backward."""

    shape: tuple[int, ...]
    """Of the first tensor that was seen in it."""
    dtype: torch.dtype
    num_bytes: int


def main(argv: list[str]) -> int:
    """Count every combination, and list what the default keeps."""
    sweeps = {"seq_length": (8, 64, 512, 4096), "hidden_size": (24, 240, 2400)}
    return run("activations", argv, ActivationsConfig, results, description=__doc__, sweeps=sweeps, show=None)


def results(config: ActivationsConfig) -> Iterator[Result]:
    """Ours and Megatron's formula for each combination, printed in a table."""
    t = config.tensor_model_parallel_size
    unit = config.seq_length * config.micro_batch_size * config.hidden_size
    print(f"{'tensor parallel':18}{'dropout':23}{'recompute':11}{'kept':>8}{'Megatron':>10}   bytes / (s·b·h)")
    layouts = dict.fromkeys([(1, False), (t, False), (t, True)])
    for (size, sequence_parallel), dropout, (name, recompute) in itertools.product(
        layouts, [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)], RECOMPUTE.items()
    ):
        with one_rank_of(size) as axis:
            spec = layer_spec(config, axis, sequence_parallel, dropout, recompute)
            kept = kept_by_a_layer(spec, config.seq_length, config.micro_batch_size)
        layout = f"{size}{', sequence too' if sequence_parallel else ''}"
        masks = "hidden {:g}, core {:g}".format(*dropout)
        ours, formula = sum(tensor.num_bytes for tensor in kept) / unit, megatron(spec, config.seq_length)
        print(f"{layout:18}{masks:23}{name:11}{ours:8.2f}{formula:10.2f}")
        for variant, value in ((OURS, ours), ("Megatron-LM's formula", formula)):
            yield counted(
                "kept by a layer", variant, "activations", "bytes / (s·b·h)", value,
                hidden_dropout=dropout[0], attention_dropout=dropout[1], recompute=name, tensor_parallel=size,
                sequence_parallel=sequence_parallel, hidden_size=config.hidden_size, seq_length=config.seq_length,
                num_attention_heads=config.num_attention_heads, micro_batch_size=config.micro_batch_size,
            )  # fmt: skip
        if (size, dropout, name) == (1, (0.0, 0.0), "nothing"):
            default = kept
    print("\nkept on one rank without dropout and recomputation:")
    for tensor in default:
        print(f"{tensor.num_bytes / unit:8.3f}  {str(tensor.dtype).removeprefix('torch.'):9} {list(tensor.shape)}")


def layer_spec(
    config: ActivationsConfig,
    axis: Axis,
    sequence_parallel: bool,
    dropout: tuple[float, float],
    recompute: Recompute,
) -> GPTSpec:
    """A bf16 model of such layers; ``dropout`` is that of hidden states and that of the attention core."""
    return gpt2_spec(
        num_layers=2,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        seq_length=config.seq_length,
        vocab_size=1,
        hidden_dropout=dropout[0],
        attention_dropout=dropout[1],
        kernels=config.kernels,
        dtype=torch.bfloat16,
        tensor=axis,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )


def kept_by_a_layer(spec: GPTSpec, seq_length: int, micro_batch_size: int) -> list[Kept]:
    """What the second of two layers keeps: its input is counted, and its output, which the next one's is, is not.

    Parameters are not counted, nor what the layer before keeps too, such as masks that all layers share.
    """
    pieces = spec.tensor.size if spec.sequence_parallel else 1
    x = torch.randn(seq_length // pieces, micro_batch_size, spec.hidden_size, dtype=spec.dtype).requires_grad_()
    sample_numbers = torch.arange(micro_batch_size)
    seen = {sample_numbers.untyped_storage().data_ptr()}
    kept: list[Kept] = []
    held = []  # so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor)
            kept.append(Kept(tuple(tensor.shape), tensor.dtype, storage.nbytes()))
        return tensor

    for layer in range(2):
        stage = GPTStage(spec, range(layer, layer + 1), is_first=False, is_last=False)
        initialize(stage, spec.seed)
        seen.update(parameter.untyped_storage().data_ptr() for parameter in stage.parameters())
        held.extend(stage.parameters())
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            x = stage(x, sample_numbers=sample_numbers)
        held.append(x)
    return kept


def megatron(spec: GPTSpec, seq_length: int) -> float:
    """The published formula, in units of s·b·h bytes: 34 + 5 a s / h, of which 24 and the core are cut over t, the
    rest with sequence parallelism only; selective recomputation drops the core, full one keeps the layer's input.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), table 2.
    """
    t = spec.tensor.size
    outside = 1 / t if spec.sequence_parallel else 1.0
    if spec.recompute.granularity == "full":
        return 2 * outside
    core = 0.0 if spec.recompute.replays_core else 5 * spec.num_attention_heads * seq_length / spec.hidden_size
    return 10 * outside + (24 + core) / t


@contextmanager
def one_rank_of(size: int) -> Iterator[Axis]:
    """The first rank of a tensor-parallel group of ``size`` whose collectives move nothing."""
    if size == 1:
        yield Axis()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Axis(size, 0, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
