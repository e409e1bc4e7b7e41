"""What a run goes on from: which checkpoint ``--load`` means, and whose schedule holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from trimegatron.checkpoint.checkpoint import CheckpointState
from trimegatron.checkpoint.directory import checkpoint_folder, checkpoints, problem_with, require_checkpoint
from trimegatron.config import Config
from trimegatron.config.schedule import Schedule
from trimegatron.errors import CheckpointError


def find_load(config: Config, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that ``--load`` means, or None for a fresh start.

    Raises:
        CheckpointError: it holds nothing, and it is not the folder of ``--save``, where a first run finds nothing.
    """
    if config.checkpoint.load is None:
        return None
    root = Path(config.checkpoint.load)
    is_save = is_save_folder(config, root)
    if config.checkpoint.ckpt_step is not None:
        folder = checkpoint_folder(root, config.checkpoint.ckpt_step)
        problem = problem_with(folder)
        if problem is not None:
            raise CheckpointError(f"--ckpt-step ({config.checkpoint.ckpt_step}): {folder} cannot be used: {problem}")
        return folder
    if is_save and not checkpoints(root):
        say(f"--load {root} holds no checkpoint yet and is also --save: starting from scratch")
        return None
    return require_checkpoint(root, log=say)


def is_save_folder(config: Config, folder: Path) -> bool:
    return config.checkpoint.save is not None and folder.resolve() == Path(config.checkpoint.save).resolve()


def resume_schedule(config: Config, state: CheckpointState) -> Schedule:
    """The schedule to go on with: the command line's, which must be the checkpoint's unless an option chooses.

    Raises:
        CheckpointError: they differ and no option chooses; each difference is named.
    """
    mine = config.schedule
    if config.optimizer.override_opt_param_scheduler:
        return mine
    saved = Config.from_dict(state.config).schedule
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        return saved
    differences = [
        f"{field.name} is {getattr(saved, field.name)} there and {getattr(mine, field.name)} here"
        for field in dataclasses.fields(Schedule)
        # A constant weight decay has no length, so a longer run is no difference.
        if not (field.name == "total_samples" and mine.weight_decay_style == "constant")
        and getattr(saved, field.name) != getattr(mine, field.name)
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint's schedule is not this command's: {'; '.join(differences)}. "
            "--override-opt_param-scheduler takes this command's, --use-checkpoint-opt_param-scheduler the checkpoint's"
        )
    return mine
