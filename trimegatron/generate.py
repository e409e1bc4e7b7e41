"""``trimegatron generate``: text from a training checkpoint of any layout, on one process.

Legend: n tokens so far, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trimegatron.checkpoint.checkpoint import model_pieces
from trimegatron.checkpoint.contents import saved_config
from trimegatron.checkpoint.directory import TOKENIZER, require_checkpoint
from trimegatron.checkpoint.storage import load_pieces
from trimegatron.config.flags import parse
from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.mesh import Axis, select_device
from trimegatron.model.build import model_spec
from trimegatron.model.gpt import GPTStage
from trimegatron.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Options):
    """Text generation"""

    load: str = option(REQUIRED, "folder that a run saved into, or that of one checkpoint")
    prompt: str = option("", "text to go on from; empty: a new document")
    max_new_tokens: int = option(100, "most tokens to add", unit="tokens", minimum=1)
    temperature: float = option(0.0, "0 takes the likeliest token; above, samples from logits / temperature")
    top_k: int = option(0, "sample from this many likeliest tokens only; 0: from all", minimum=0)
    seed: int = option(1234, "of the sampling", minimum=0)
    device: str = option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))


def main(argv: list[str]) -> int:
    """Print the prompt and what the model goes on with."""
    (config,) = parse(argv, GenerateConfig, prog="trimegatron generate", description=__doc__ or "")
    folder = require_checkpoint(Path(config.load))
    tokenizer = load_tokenizer(folder / TOKENIZER)
    model = load_model(folder, device=select_device(config.device))
    prompt = tokenizer.encode(config.prompt)
    if not prompt:
        if tokenizer.eod is None:
            fail(
                "prompt", config.prompt, "must not be empty: this tokenizer has no end-of-document token to begin with"
            )
        prompt = [tokenizer.eod]
    tokens = generate(model, tokenizer, prompt, config)
    print(tokenizer.decode(token for token in [*prompt, *tokens] if token != tokenizer.eod))
    return 0


def load_model(folder: Path, *, device: torch.device) -> GPTStage:
    """The whole model of a checkpoint, unsplit, in the run's precision and in evaluation mode."""
    config = saved_config(folder)
    model = GPTStage(model_spec(config, tensor=Axis(), device=device), range(config.model.num_layers))
    buffer = ParameterBuffer(model.named_parameters(), grad_dtype=next(model.parameters()).dtype)
    buffer.params.zero_()
    load_pieces(folder, model_pieces(buffer), group=None)
    return model.eval()


@torch.no_grad()
def generate(model: GPTStage, tokenizer: Tokenizer, prompt: list[int], config: GenerateConfig) -> Iterator[int]:
    """New tokens, one at a time, until the end-of-document token or ``max_new_tokens``.

    Each token is one forward pass over the last tokens that fit into the position table.
    """
    device = next(model.parameters()).device
    longest = model.embedding.position_embeddings.weight.shape[0]
    random = torch.Generator().manual_seed(config.seed)
    tokens = list(prompt)
    for _ in range(config.max_new_tokens):
        window = torch.tensor([tokens[-longest:]], device=device)  # [1, n]
        logits = model(window)[-1, 0, : tokenizer.vocab_size].float().cpu()  # [v]
        token = pick(logits, config, random)
        if token == tokenizer.eod:
            return
        tokens.append(token)
        yield token


def pick(logits: torch.Tensor, config: GenerateConfig, random: torch.Generator) -> int:
    """The likeliest token at temperature 0, else a sample."""
    if config.temperature == 0.0:
        return int(logits.argmax())
    if config.top_k > 0:
        threshold = logits.topk(min(config.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    scaled = (logits.double() - logits.max()) / config.temperature  # at most 0, so that no temperature overflows it
    return int(torch.multinomial(scaled.softmax(dim=-1), 1, generator=random))
