"""``trimegatron bench step``: one training step on this CPU, ours beside transformers' GPT-2 with torch's fused AdamW.

Same weights, same batch, dropout 0, fp32. The losses of the first steps are compared before anything is timed; then
they take turns, round after round, and the ratios of their medians are reported.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trimegatron.bench.models import BETAS, CLIP, EPSILON, LR, WEIGHT_DECAY, adamw, gpt2_spec, update
from trimegatron.config.flags import parse
from trimegatron.config.options import Options, option
from trimegatron.convert.gpt2 import to_gpt2
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.errors import UserError
from trimegatron.lazy import in_memory
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(Options):
    """Benchmark of a training step"""

    num_layers: int = option(4, "transformer layers", minimum=1)
    hidden_size: int = option(256, "width of the model", unit="features", minimum=1)
    num_attention_heads: int = option(4, "attention heads", minimum=1)
    seq_length: int = option(256, "tokens of one sample", unit="tokens", minimum=1)
    micro_batch_size: int = option(8, "samples of one step", unit="samples", minimum=1)
    vocab_size: int = option(8192, "words", minimum=1)
    threads: int = option(None, "threads of each", derived="the machine's cores", minimum=1)
    compiled: bool = option(False, "let torch.compile(transformers) take part too; compiling takes a minute")
    rounds: int = option(3, "how often they take turns", minimum=1)
    steps: int = option(6, "steps in a turn; the first is not timed", minimum=2)


def main(argv: list[str]) -> int:
    """Compare, time, report."""
    (config,) = parse(argv, StepBenchConfig, prog="trimegatron bench step", description=__doc__ or "")
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    spec = gpt2_spec(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        seq_length=config.seq_length,
        vocab_size=config.vocab_size,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    tokens = torch.randint(
        config.vocab_size, (config.micro_batch_size, config.seq_length + 1), generator=torch.Generator().manual_seed(0)
    )
    model = GPTStage(spec, range(spec.num_layers))
    initialize(model, spec.seed)
    contenders = {"transformers": transformers_step(model, spec, tokens)}
    if config.compiled:
        contenders["transformers compiled"] = transformers_step(model, spec, tokens, compiled=True)
    contenders["trimegatron"] = our_step(model, tokens)
    compare_losses(contenders)
    times = time_in_turns(contenders, rounds=config.rounds, steps=config.steps)
    report(times, tokens_per_step=config.micro_batch_size * config.seq_length)
    return 0


def our_step(model: GPTStage, tokens: torch.Tensor) -> Callable[[], float]:
    """Forward, backward, clip and AdamW over the flat buffer, as the trainer does it; returns the loss."""
    buffer = ParameterBuffer(model.named_parameters(), grad_dtype=torch.float32)
    optimizer = adamw(buffer, kernels="auto")
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        buffer.start(num_micro_batches=1)
        loss = model(inputs, labels=labels) / labels.numel()
        loss.backward()
        update(optimizer)
        return loss.item()

    return step


def transformers_step(
    model: GPTStage, spec: GPTSpec, tokens: torch.Tensor, *, compiled: bool = False
) -> Callable[[], float]:
    """The same step as a user of transformers writes it, from the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=spec.vocab_size,
            n_positions=spec.max_position_embeddings,
            n_embd=spec.hidden_size,
            n_layer=spec.num_layers,
            n_head=spec.num_attention_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            activation_function="gelu_new",
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    weights = to_gpt2(
        {name: in_memory(parameter.detach()) for name, parameter in model.named_parameters()},
        num_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
    )
    theirs.load_state_dict({name: tensor.load() for name, tensor in weights.items()}, strict=False)
    theirs.tie_weights()
    theirs.train()
    decayed = [parameter for parameter in theirs.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in theirs.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPSILON,
        fused=True,
    )
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> float:
        optimizer.zero_grad()
        loss = forward(inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def compare_losses(contenders: dict[str, Callable[[], float]], num_steps: int = 3) -> None:
    """Refuse to time what does not compute the same."""
    losses = {name: [step() for _ in range(num_steps)] for name, step in contenders.items()}
    for of_one_step in zip(*losses.values(), strict=True):
        if max(of_one_step) - min(of_one_step) > 2e-5 * abs(of_one_step[0]):
            raise UserError(f"the losses differ, so nothing is timed: {losses}")
    print(f"first {num_steps} losses agree: " + ", ".join(f"{loss:.6f}" for loss in losses["trimegatron"]))


def time_in_turns(contenders: dict[str, Callable[[], float]], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each timed step of each contender; they take turns, so that a noisy minute meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            step()
            for _ in range(steps - 1):
                started = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - started)
    return times


def report(times: dict[str, list[float]], *, tokens_per_step: int) -> None:
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{name:21} median {median * 1e3:8.1f} ms (min {min(seconds) * 1e3:.1f}, max {max(seconds) * 1e3:.1f}), "
            f"{tokens_per_step / median:8.0f} tokens/s"
        )
    ours = statistics.median(times.pop("trimegatron"))
    for name, seconds in times.items():
        ratio = statistics.median(seconds) / ours
        print(f"trimegatron is {ratio:.2f} times as fast as {name} (torch {torch.__version__}, CPU)")
