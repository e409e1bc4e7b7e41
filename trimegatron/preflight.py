"""What a rank does alone before it joins the others: what would fail there on every rank fails here, before anything
starts.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from trimegatron.checkpoint.directory import checkpoints
from trimegatron.checkpoint.resume import is_save_folder
from trimegatron.config import Config, ExplainedConfig
from trimegatron.determinism import make_deterministic
from trimegatron.errors import ConfigError
from trimegatron.kernels.functional import MAX_HEAD_SIZE
from trimegatron.mesh import select_device
from trimegatron.tensor_parallel.embedding import padded_vocab_size
from trimegatron.tokenizer import Tokenizer, build_tokenizer


def prepare(command: ExplainedConfig) -> tuple[Config, Tokenizer, torch.device, list[str]]:
    """What a rank can do alone: the configuration with the tokenizer's vocabulary, the tokenizer, the device, notes."""
    config = command.config
    tokenizer = build_tokenizer(
        config.data.tokenizer_type,
        vocab_file=config.data.vocab_file,
        merge_file=config.data.merge_file,
        tokenizer_model=config.data.tokenizer_model,
        vocab_size=config.model.vocab_size,
    )
    config = with_vocab_size(config, tokenizer)
    check_outputs(config)
    device = select_device(config.training.device)
    check_kernels(config, device)
    set_threads(device)
    notes = list(command.notes)
    if config.training.deterministic_mode:
        notes.append(make_deterministic(device))
    return config, tokenizer, device, notes


def with_vocab_size(config: Config, tokenizer: Tokenizer) -> Config:
    """The configuration with the vocabulary that the tokenizer has.

    Where the padding is not masked, every padded row is a word like the others, as in Megatron.
    """
    model, vocab_size = config.model, tokenizer.vocab_size
    if tokenizer.type != "NullTokenizer" and model.vocab_size not in (None, vocab_size):
        raise ConfigError(
            f"--vocab-size ({model.vocab_size}) must be that of the tokenizer, {vocab_size}. Leave it out: it is for "
            "NullTokenizer"
        )
    if not model.mask_padded_vocab:
        tensor_parallel_size = config.parallel.tensor_model_parallel_size
        vocab_size = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tensor_parallel_size)
    return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=vocab_size))


def check_outputs(config: Config) -> None:
    """What would fail at the first save, perhaps after hours, or mix two runs, fails before anything starts.

    Raises:
        ConfigError: an output cannot be written, or ``--save`` holds checkpoints that this run does not go on from.
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    if config.training.skip_train:  # it writes --metrics-file only
        save, outputs = None, {}
    else:
        outputs = {"--save": save, "--tensorboard-dir": config.logging.tensorboard_dir}
    if config.logging.metrics_file:
        outputs["--metrics-file"] = str(Path(config.logging.metrics_file).parent)
    for flag, output in outputs.items():
        if output is None:
            continue
        existing = Path(output).absolute()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{flag} ({output}) must be a folder that can be written; {existing} is not. Give another"
            )
    if save is not None and checkpoints(Path(save)) and not (load and is_save_folder(config, Path(load))):
        raise ConfigError(
            f"--save ({save}) holds checkpoints of a run that this one would not go on from. Add --load {save}, or "
            "give another folder"
        )


def check_kernels(config: Config, device: torch.device) -> None:
    """Triton needs a GPU, or its interpreter; flash attention needs Triton, and heads it has room for.

    Raises:
        ConfigError: ``--kernels triton`` or ``--attention-backend flash`` without.
    """
    model = config.model
    if model.attention_backend == "flash" and model.kv_channels > MAX_HEAD_SIZE:
        raise ConfigError(
            f"--attention-backend (flash) takes heads up to {MAX_HEAD_SIZE} wide; --kv-channels is {model.kv_channels}."
            " Use auto or softmax"
        )
    if model.attention_backend == "flash" and device.type == "cpu" and model.kernels != "triton":
        raise ConfigError(
            "--attention-backend (flash) is a Triton kernel and needs a GPU; this run is on the CPU. Use auto or"
            " softmax, or --kernels triton with TRITON_INTERPRET=1 (very slow, for tests)"
        )
    if config.model.kernels == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "--kernels (triton) needs a GPU; this run is on the CPU. Use auto or reference, or set TRITON_INTERPRET=1 "
            "for Triton's interpreter (very slow, for tests)"
        )


def set_threads(device: torch.device) -> None:
    """On a CPU the ranks of a node share its cores; OMP_NUM_THREADS, which torchrun sets, has the last word."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
