"""Proof that a converted model is the model: both on the same tokens, the Hugging Face one loaded by transformers in a
fresh process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from trimegatron.convert.gpt2 import CONSTANT
from trimegatron.convert.source import Source
from trimegatron.errors import CheckpointError
from trimegatron.mesh import Axis
from trimegatron.model.build import model_spec
from trimegatron.model.gpt import GPTStage
from trimegatron.tensor_parallel.parameter import spec_of


@dataclass(frozen=True)
class Proof:
    """How close two models' logits are on the same tokens, both in fp32."""

    max_difference: float
    max_logit: float
    greedy_agreement: float
    loss: float
    """The source's mean loss of the next token."""
    loss_difference: float
    num_tokens: int

    @property
    def holds(self) -> bool:
        """Within rounding: 1e-5 of the largest logit, and no less than 1e-4 in itself."""
        return self.max_difference <= 1e-5 * max(10.0, self.max_logit)

    def __str__(self) -> str:
        return (
            f"max |Δlogit| {self.max_difference:.2e} (largest logit {self.max_logit:.2f}), "
            f"greedy agreement {self.greedy_agreement:.2%} over {self.num_tokens} tokens, "
            f"loss {self.loss:.6f}, difference {self.loss_difference:.1e}"
        )


def prove(source: Source, folder: Path, *, rounded_to: torch.dtype | None = None, cut: bool = False) -> Proof:
    """Compare the model of ``source`` with the Hugging Face model in ``folder``, on two sequences of fixed random
    tokens, in fp32.

    Args:
        rounded_to: round the source's weights to this first, as the conversion did.
        cut: the folder's model may have more words; they are not compared.

    Raises:
        CheckpointError: transformers cannot load the folder (its message is passed on), or the models differ beyond
            rounding.
    """
    model = source.config.model
    assert model.vocab_size is not None
    tokens = fixed_tokens(model.vocab_size, model.max_position_embeddings)
    with torch.no_grad():
        ours = build_model(source, rounded_to)(tokens)[..., : model.vocab_size].transpose(0, 1)  # [b, s, v]
    theirs = logits_in_a_fresh_process(folder, tokens)
    if cut:
        theirs = theirs[..., : model.vocab_size]
    if theirs.shape != ours.shape:
        raise CheckpointError(f"the converted model gives logits of shape {list(theirs.shape)}, not {list(ours.shape)}")
    losses = [
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item() for logits in (ours, theirs)
    ]
    proof = Proof(
        max_difference=(ours - theirs).abs().max().item(),
        max_logit=ours.abs().max().item(),
        greedy_agreement=(ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        loss=losses[0],
        loss_difference=abs(losses[1] - losses[0]),
        num_tokens=tokens.numel(),
    )
    if not proof.holds:
        raise CheckpointError(f"the converted model is not its source: {proof}. Nothing was written")
    return proof


def fixed_tokens(vocab_size: int, max_positions: int) -> torch.Tensor:
    """What a proof runs on: [2, up to 64]."""
    random = torch.Generator().manual_seed(1234)
    return torch.randint(vocab_size, (2, min(64, max_positions)), generator=random)


def build_model(source: Source, rounded_to: torch.dtype | None = None) -> GPTStage:
    """The whole model of a source, in fp32 on the CPU, in evaluation mode."""
    spec = model_spec(source.config, tensor=Axis(), device=torch.device("cpu"), dtype=torch.float32)
    model = GPTStage(spec, range(spec.num_layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            target = spec_of(parameter).valid(parameter)
            first = 0
            for chunk in source.model[name].chunks():
                target[first : first + len(chunk)] = chunk if rounded_to is None else chunk.to(rounded_to)
                first += len(chunk)
    return model.eval()


def logits_in_a_fresh_process(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [b, s, v] of the model in ``folder``, in fp32, by a process that knows nothing of this one and
    sees no network.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokens_file, output = Path(scratch) / "tokens.safetensors", Path(scratch) / "logits.safetensors"
        save_file({"tokens": tokens.contiguous()}, tokens_file)
        arguments = [str(folder), str(tokens_file), str(output), CONSTANT.pattern]
        result = subprocess.run(
            [sys.executable, "-m", "trimegatron.convert.fresh_process", *arguments],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckpointError(f"transformers cannot load the model in {folder}: {last}")
        return load_file(output)["logits"]
