"""A training checkpoint of any layout → a folder that ``AutoModelForCausalLM.from_pretrained`` loads, proven before
it appears.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from trimegatron.checkpoint.contents import saved_config
from trimegatron.checkpoint.directory import TOKENIZER, require_checkpoint
from trimegatron.checkpoint.storage import read_whole
from trimegatron.convert.gpt2 import gpt2_config, to_gpt2
from trimegatron.convert.proof import Proof, prove
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.files import save_tensors
from trimegatron.generate import load_model
from trimegatron.tokenizer import load_tokenizer


def convert_to_hf(load: Path, output: Path, *, dtype: str | None = None, verify: bool = True) -> Proof | None:
    """Convert the newest complete checkpoint under ``load``.

    The folder is written under a temporary name, proven, and renamed: it appears whole and right, or not at all.

    Args:
        dtype: "float32", "bfloat16" or "float16"; the checkpoint's own without it.
        verify: run the proof.

    Raises:
        ConfigError: ``output`` holds something already.
        CheckpointError: there is no checkpoint, it cannot become a GPT-2, or the proof fails.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            f"--output ({output}) must not exist yet, or be empty. Give another folder, or remove it first"
        )
    source = require_checkpoint(load)
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        write_model(source, temporary, dtype)
        proof = None
        if verify:
            config = saved_config(source)
            assert config.model.vocab_size is not None
            weights_dtype = None if dtype is None else getattr(torch, dtype)
            proof = prove(
                load_model(source, device=torch.device("cpu"), dtype=torch.float32, rounded_to=weights_dtype),
                temporary,
                vocab_size=config.model.vocab_size,
                max_positions=config.model.max_position_embeddings,
            )
            if not proof.holds:
                raise CheckpointError(
                    f"the converted model is not the checkpoint's: {proof}. Nothing was written to {output}"
                )
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return proof


def write_model(source: Path, folder: Path, dtype: str | None) -> None:
    """Weights, configuration and tokenizer files."""
    config = saved_config(source)
    tokenizer = load_tokenizer(source / TOKENIZER)
    tokenizer.save(folder)
    parameters = ((name.removeprefix("model."), tensor) for name, tensor in read_whole(source, "model."))
    tensors = {
        name: tensor if dtype is None else tensor.to(getattr(torch, dtype))
        for name, tensor in to_gpt2(
            parameters,
            num_layers=config.model.num_layers,
            num_attention_heads=config.model.num_attention_heads,
        )
    }
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    written_dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    write_json(folder / "config.json", gpt2_config(config, eod=tokenizer.eod, dtype=written_dtype))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod},
    )


def write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
