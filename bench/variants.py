"""The variants of one training step that are timed side by side: same weights, same batch, same update.

Each is a forward pass to the mean loss, torch's backward pass, and an update with clipping and AdamW. Under bf16 ours
keeps its weights in it, beside fp32 masters and gradients; the others run as their users run them: fp32 weights and
``torch.autocast``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trimegatron.bench.models import BETAS, CLIP, EPSILON, LR, WEIGHT_DECAY, adamw, update
from trimegatron.bench.nano_gpt import NanoGPT
from trimegatron.convert.gpt2 import to_gpt2
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.lazy import in_memory
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec

Weights = dict[str, torch.Tensor]
"""Our parameters by name, on the CPU, in the dtype of the model."""


@dataclass(frozen=True)
class Batch:
    """What every step gets: tokens and the tokens after them, int64 [b, s], and the numbers of the samples, [b]."""

    inputs: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor

    @classmethod
    def random(cls, spec: GPTSpec, micro_batch_size: int) -> Batch:
        """Of the model's longest sequence, on its device."""
        shape = (micro_batch_size, spec.max_position_embeddings + 1)
        tokens = torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(spec.device)
        samples = torch.arange(micro_batch_size, device=spec.device)
        return cls(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), samples)


@dataclass(frozen=True)
class Variant:
    """One way to make a step."""

    forward: Callable[[], torch.Tensor]
    """To the mean loss of the batch."""
    update: Callable[[], None]
    """Leaves no gradients behind but those that ``state`` holds."""
    state: Callable[[], Iterable[torch.Tensor]]
    """What lives from step to step."""
    masks: str
    """Whose dropout masks: variants with the same have the same losses, dropout or not."""
    is_compiled: bool = False

    def step(self) -> torch.Tensor:
        """The loss, on the device."""
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()


def initial_weights(spec: GPTSpec) -> Weights:
    """A function of the spec's seed."""
    model = GPTStage(spec, range(spec.num_layers))
    initialize(model, spec.seed)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def ours(spec: GPTSpec, weights: Weights, batch: Batch) -> Variant:
    """The step as the trainer makes it; ``spec.kernels`` says with what."""
    model = GPTStage(spec, range(spec.num_layers)).train()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    buffer = ParameterBuffer(model.named_parameters(), grad_dtype=torch.float32)
    optimizer = adamw(buffer, kernels=spec.kernels)
    drops = spec.hidden_dropout > 0.0 or spec.attention_dropout > 0.0
    samples = batch.samples.clone() if drops else None

    def forward() -> torch.Tensor:
        if samples is not None:
            samples.add_(len(samples))  # new masks in every step, as the others have
        buffer.start(num_micro_batches=1)
        return model(batch.inputs, labels=batch.labels, sample_numbers=samples) / batch.labels.numel()

    def state() -> list[torch.Tensor]:
        held = [buffer.params, buffer.grads, optimizer.exp_avg, optimizer.exp_avg_sq]
        return held if optimizer.low_precision is None else [*held, optimizer.master]

    return Variant(forward, partial(update, optimizer), state, masks="trimegatron")


def transformers(spec: GPTSpec, weights: Weights, batch: Batch, *, compile_backend: str | None = None) -> Variant:
    """GPT2LMHeadModel as its users train it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(spec.device):
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=spec.vocab_size,
                n_positions=spec.max_position_embeddings,
                n_embd=spec.hidden_size,
                n_layer=spec.num_layers,
                n_head=spec.num_attention_heads,
                resid_pdrop=spec.hidden_dropout,
                embd_pdrop=spec.hidden_dropout,
                attn_pdrop=spec.attention_dropout,
                activation_function="gelu_new",
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    missing, unexpected = model.load_state_dict(gpt2_weights(spec, weights), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return plain_pytorch(model, lambda tokens: model(tokens).logits, spec, batch, compile_backend)


def nano_gpt(spec: GPTSpec, weights: Weights, batch: Batch, *, compile_backend: str | None = None) -> Variant:
    """``nano_gpt.py``'s model."""
    with torch.device(spec.device):
        model = NanoGPT(spec)
    named = ((name.removeprefix("transformer."), tensor) for name, tensor in gpt2_weights(spec, weights).items())
    model.load_state_dict(
        {name: tensor.t() if tensor.dim() == 2 and name.startswith("h.") else tensor for name, tensor in named}
    )
    return plain_pytorch(model, model, spec, batch, compile_backend)


def gpt2_weights(spec: GPTSpec, weights: Weights) -> Weights:
    """The same values under GPT-2's names and in its layout, in fp32."""
    named = {name: in_memory(tensor.float()) for name, tensor in weights.items()}
    converted = to_gpt2(named, num_layers=spec.num_layers, num_attention_heads=spec.num_attention_heads)
    return {name: tensor.load() for name, tensor in converted.items()}


def plain_pytorch(
    model: nn.Module,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    spec: GPTSpec,
    batch: Batch,
    compile_backend: str | None,
) -> Variant:
    """A step around ``model`` with torch's own parts: autocast, cross entropy, clipping, fused AdamW."""
    model.train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPSILON, fused=True)

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(spec.device.type, torch.bfloat16, enabled=spec.dtype == torch.bfloat16):
            return nn.functional.cross_entropy(logits_of(inputs).flatten(0, 1), labels.flatten())

    run: Any = loss_of if compile_backend is None else torch.compile(loss_of, backend=compile_backend, dynamic=False)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def state() -> list[torch.Tensor]:
        moments = [value for held in optimizer.state.values() for value in held.values()]
        return [*model.parameters(), *model.buffers(), *moments]

    forward = partial(run, batch.inputs, batch.labels)
    return Variant(forward, update, state, masks="torch", is_compiled=compile_backend is not None)


def makers(
    spec: GPTSpec, weights: Weights, batch: Batch, *, compile_backend: str = "inductor"
) -> dict[str, Callable[[], Variant]]:
    """Every variant that there is, by name."""
    references = dataclasses.replace(spec, kernels="reference")
    return {
        "trimegatron": partial(ours, spec, weights, batch),
        "trimegatron references": partial(ours, references, weights, batch),
        "transformers": partial(transformers, spec, weights, batch),
        "transformers compiled": partial(transformers, spec, weights, batch, compile_backend=compile_backend),
        "nanoGPT compiled": partial(nano_gpt, spec, weights, batch, compile_backend=compile_backend),
    }
