"""``trimegatron bench step``: one training step, ours beside transformers' GPT-2 with torch's fused AdamW.

Same weights, same batch. The losses of the first steps are compared before anything is timed; then the variants take
turns, round after round, in one process, and what is reported are the medians of the rounds and their spread.
``--config`` takes the name of a configuration; every option given beside it wins.

``trimegatron references`` is ours with the eager references in place of the Triton kernels. On a CPU both are the same
code, so what lies between them is the noise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trimegatron.bench.models import gpt2_spec
from trimegatron.bench.results import OURS, Result
from trimegatron.bench.rounds import compare_losses, start, take_turns
from trimegatron.bench.runner import run
from trimegatron.bench.step_report import StepReport
from trimegatron.bench.variants import Batch, initial_weights, makers
from trimegatron.config.options import Options, fail, option
from trimegatron.errors import UserError
from trimegatron.model.spec import GPTSpec

VARIANTS = (OURS, "trimegatron references", "transformers", "transformers compiled", "nanoGPT compiled")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "micro_batch_size": 8,
             "vocab_size": 8192, "dtype": "float32", "device": "cpu"},
    "small": {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 256, "micro_batch_size": 4,
              "vocab_size": 16384, "dtype": "float32", "device": "cpu"},
    "codeparrot-small": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024,
                         "micro_batch_size": 12, "vocab_size": 32768, "dtype": "bfloat16", "device": "cuda"},
    "gpt2-medium": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024,
                    "micro_batch_size": 8, "vocab_size": 50304, "dtype": "bfloat16", "device": "cuda"},
    "gpt2-xl": {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25, "seq_length": 1024,
                "micro_batch_size": 4, "vocab_size": 50304, "dtype": "bfloat16", "device": "cuda"},
}  # fmt: skip
"""GPT-2's vocabulary is rounded up to a multiple of 128, for all variants."""

SMALL_FORM: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 32,
                              "micro_batch_size": 2, "vocab_size": 128, "device": "cpu", "rounds": 2, "steps": 2,
                              "compile_backend": "aot_eager"}  # fmt: skip
"""What a dry run makes of any configuration."""


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(Options):
    """Benchmark of a training step"""

    num_layers: int = option(4, "transformer layers", minimum=1)
    hidden_size: int = option(256, "width of the model", unit="features", minimum=1)
    num_attention_heads: int = option(4, "attention heads", minimum=1)
    seq_length: int = option(256, "tokens of one sample", unit="tokens", minimum=1)
    micro_batch_size: int = option(8, "samples of one step", unit="samples", minimum=1)
    vocab_size: int = option(8192, "words", minimum=1)
    dropout: float = option(0.0, "of hidden states and attention")
    dtype: str = option(
        "float32", "bfloat16: ours with fp32 masters and gradients, the others under torch.autocast",
        choices=("float32", "bfloat16"),
    )  # fmt: skip
    device: str = option("cpu", "where it runs", choices=("cpu", "cuda"))
    variants: list[str] = option(
        list(VARIANTS[:4]), "what takes part; compiling takes a minute", choices=VARIANTS, metavar="NAME"
    )
    compile_backend: str = option("inductor", "what torch.compile compiles with")
    threads: int = option(None, "threads of each, on a CPU", derived="the machine's cores", minimum=1)
    rounds: int = option(5, "how often they take turns", minimum=1)
    steps: int = option(6, "steps in a turn; the first is not timed", minimum=2)
    dry_run: bool = option(False, "walk through on the CPU at a tiny size; the figures say nothing of the real one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            fail("hidden_size", self.hidden_size, f"must be a multiple of --num-attention-heads "
                 f"({self.num_attention_heads})")  # fmt: skip
        if self.dropout >= 1.0:
            fail("dropout", self.dropout, "must be below 1")
        if OURS not in self.variants:
            fail("variants", " ".join(self.variants), f"must have {OURS} among them, which ratios are of")
        if self.device == "cuda" and not self.dry_run and not torch.cuda.is_available():
            fail("device", self.device, "must be there, and torch finds no GPU",
                 way_out="Add --dry-run to walk through at a tiny size, or --device cpu for a slow one.")  # fmt: skip

    @cached_property
    def name(self) -> str:
        """Of the configuration that this is."""
        values = vars(self)
        return next(
            (name for name, preset in CONFIGURATIONS.items() if all(values[key] == preset[key] for key in preset)),
            "custom",
        )

    @cached_property
    def spec(self) -> GPTSpec:
        return gpt2_spec(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            attention_dropout=self.dropout,
            hidden_dropout=self.dropout,
            dtype=getattr(torch, self.dtype),
            device=torch.device(self.device),
        )


def main(argv: list[str]) -> int:
    """Compare, time, report."""
    return run(
        "step", argv, StepBenchConfig, results, description=__doc__, presets=CONFIGURATIONS, show=None,
        sweeps={"seq_length": (16, 64, 256, 1024)},
    )  # fmt: skip


def results(config: StepBenchConfig) -> Iterator[Result]:
    """Run the variants and print what is found.

    Raises:
        UserError: the losses differ, or our step does not fit into the GPU's memory.
    """
    if config.dry_run:
        print(f"dry run of {config.name}: 2 layers of 64 on the CPU; no figure below is one of the configuration")
        config = dataclasses.replace(config, **SMALL_FORM)
    spec, device = config.spec, config.spec.device
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    batch, weights = Batch.random(spec, config.micro_batch_size), initial_weights(spec)
    made = makers(spec, weights, batch, compile_backend=config.compile_backend)
    contenders = start({name: made[name] for name in VARIANTS if name in config.variants}, device=device)
    if OURS not in contenders:
        raise UserError("the GPU's memory does not hold our own step. Give a smaller --micro-batch-size")
    print(compare_losses(contenders, dtype=spec.dtype, drops=config.dropout > 0.0))
    take_turns(contenders, device=device, rounds=config.rounds, steps=config.steps)
    found = StepReport(config.name, spec, config.micro_batch_size, contenders)
    print("\n".join(found.lines()))
    yield from found.results()
