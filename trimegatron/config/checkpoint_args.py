"""``--use-checkpoint-args``: the model's sizes from the checkpoint of ``--load``, before anything is resolved."""

from __future__ import annotations

import json
from pathlib import Path

from trimegatron.checkpoint.directory import STATE, checkpoint_folder, checkpoints, readable, require_checkpoint
from trimegatron.config.flags import Given, convert, spell
from trimegatron.config.groups import ModelConfig
from trimegatron.config.options import fail, options_of

CHECKPOINT_ARGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "layernorm_epsilon",
    "bias_gelu_fusion",
)
"""Fields of the model that a checkpoint fixes and can give. The vocabulary is the tokenizer's."""


def use_checkpoint_args(given: Given) -> list[str]:
    """Put the checkpoint's sizes in place of those given, as Megatron does; returns a line that says which.

    Raises:
        ConfigError: there is no ``--load``.
        CheckpointError: the checkpoint cannot be read.
    """
    load, save, step = (given.values.get(name) for name in ("load", "save", "ckpt_step"))
    if load is None:
        fail("use_checkpoint_args", None, "needs --load", way_out="Name the folder that a run saved into.")
    root = Path(load)
    if save is not None and root.resolve() == Path(save).resolve() and not checkpoints(root):
        return [f"--use-checkpoint-args takes nothing: --load {load} holds no checkpoint yet."]
    # Which ones are passed over is said when the checkpoint is loaded.
    folder = require_checkpoint(root, log=lambda line: None) if step is None else checkpoint_folder(root, step)
    with readable(folder):
        saved = json.loads((folder / STATE).read_text())["config"]["model"]
        options = options_of(ModelConfig)
        values = {name: convert(options[name], saved[name]) for name in CHECKPOINT_ARGS}
    taken = []
    for name, value in values.items():
        before = given.values.get(name, value)
        replaced = "" if before == value else f" (in place of {before}, from the {given.sources[name]})"
        taken.append(spell(ModelConfig, name, value) + replaced)
        given.values[name], given.sources[name] = value, str(folder)
    return [f"--use-checkpoint-args takes from {folder}: {', '.join(taken)}."]
