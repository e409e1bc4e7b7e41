"""``trimegatron bench operators``: operator calls of one training step, ours with the Triton kernels beside
transformers' eager GPT-2 with torch's fused AdamW.

Nothing runs and no GPU is needed: the tensors are torch's fake ones, which have shapes and no values, and every
operator that reaches the dispatcher is counted, but for those that only look at their argument in another way. On a GPU
such a call is a kernel launch, or two where a sum is made in two stages.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trimegatron.bench.models import adamw, gpt2_spec, update
from trimegatron.bench.results import OURS, Result, counted
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, option
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.model.gpt import GPTStage

PHASES = ("forward", "backward", "optimizer")
DEPTHS = (2, 4)
"""Layers of the two models from whose counts those of one layer follow."""

LAYERS = 12
"""Of the model whose calls are told."""

FREE = ("detach", "_unsafe_view", "empty", "empty_like", "new_empty")
"""Operators that compute nothing and are not marked as views."""

Counts = dict[str, Counter[str]]
"""Phase → operator → calls."""


@dataclass(frozen=True, kw_only=True)
class OperatorsBenchConfig(Options):
    """Operator calls of a step"""

    dropout: float = option(0.1, "of hidden states and attention")
    show: bool = option(False, "list the operators of each phase")


class CountCalls(TorchDispatchMode):
    """Counts the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if computes(func):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def computes(func: Any) -> bool:
    """Whether an operator launches anything: views and allocations do not."""
    namespace, _, name = func.name().partition(".")[0].partition("::")
    return not (func.is_view or namespace in ("prim", "profiler") or name in FREE)


def main(argv: list[str]) -> int:
    """Count and report."""
    return run("operators", argv, OperatorsBenchConfig, results, description=__doc__, show=None)


def results(config: OperatorsBenchConfig) -> Iterator[Result]:
    """Calls of each phase, printed in a table."""
    os.environ["TRITON_INTERPRET"] = "1"  # lets the kernels' operators take tensors that are on no GPU; none runs
    counts = {name: [count(depth, config.dropout) for depth in DEPTHS] for name, count in CONTENDERS.items()}
    report(counts, config.show)
    for name, found in counts.items():
        for phase in PHASES:
            each, once = per_layer(found, phase)
            for figure, value in (("calls a layer", each), ("calls beside the layers", once)):
                yield counted(phase, name, figure, "calls", value, dropout=config.dropout)
        yield counted("step", name, "calls", "calls", total(found), dropout=config.dropout, num_layers=LAYERS)


def count_phases(forward: Callable[[], torch.Tensor], update: Callable[[], None]) -> Counts:
    """The calls of the second of two steps: the first may set things up."""
    for _ in range(2):
        counts: Counts = {}
        with CountCalls() as counter:
            loss = forward()
        counts["forward"] = counter.calls
        with CountCalls() as counter:
            loss.backward()
        counts["backward"] = counter.calls
        with CountCalls() as counter:
            update()
        counts["optimizer"] = counter.calls
    return counts


def count_ours(num_layers: int, dropout: float) -> Counts:
    """Of ``trimegatron``, one micro-batch a step, as the trainer does it."""
    spec = gpt2_spec(
        num_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        kernels="triton",
    )
    with fake_tensors():
        model = GPTStage(spec, range(num_layers)).train()
        buffer = ParameterBuffer(model.named_parameters(), grad_dtype=torch.float32)
        optimizer = adamw(buffer, kernels="triton")
        tokens, samples = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)

        def forward() -> torch.Tensor:
            buffer.start(num_micro_batches=1)
            return model(tokens, labels=tokens, sample_numbers=samples)

        return count_phases(forward, partial(update, optimizer))


def count_transformers(num_layers: int, dropout: float) -> Counts:
    """Of transformers' GPT2LMHeadModel, eager, with torch's fused AdamW and its gradient clipping."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=num_layers, n_head=4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, activation_function="gelu_new",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with fake_tensors():
        model = GPT2LMHeadModel(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(2, 32, dtype=torch.int64)

        def forward() -> torch.Tensor:
            optimizer.zero_grad()
            logits = model(tokens).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return count_phases(forward, update)


CONTENDERS = {OURS: count_ours, "transformers": count_transformers}


def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def per_layer(counts: list[Counts], phase: str) -> tuple[float, float]:
    """Calls of one layer, and of all that is there once."""
    small, large = (sum(depth[phase].values()) for depth in counts)
    each = (large - small) / (DEPTHS[1] - DEPTHS[0])
    return each, small - DEPTHS[0] * each


def total(counts: list[Counts]) -> float:
    """Calls of a step of a model of ``LAYERS`` layers."""
    return sum(LAYERS * each + once for each, once in (per_layer(counts, phase) for phase in PHASES))


def report(counts: dict[str, list[Counts]], show: bool) -> None:
    print(
        f"{'calls':14}"
        + "".join(f"{phase + ' a layer':>18}{'and once':>10}" for phase in PHASES)
        + f"{f'{LAYERS} layers':>12}"
    )
    totals = {}
    for name, found in counts.items():
        figures = [per_layer(found, phase) for phase in PHASES]
        totals[name] = total(found)
        print(f"{name:14}" + "".join(f"{each:18g}{once:10g}" for each, once in figures) + f"{totals[name]:12g}")
    ratio = totals["transformers"] / totals["trimegatron"]
    print(f"transformers makes {ratio:.2f} times the calls (torch {torch.__version__})")
    if show:
        for name, found in counts.items():
            for phase in PHASES:
                calls = ", ".join(f"{op} {n}" for op, n in found[0][phase].most_common())
                print(f"{name}, {phase}, {DEPTHS[0]} layers: {calls}")
