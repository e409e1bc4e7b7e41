"""What a run goes on from: which checkpoint ``--load`` means, and whose schedule holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path

from trimegatron.checkpoint.checkpoint import CheckpointState
from trimegatron.checkpoint.directory import (
    checkpoint_folder,
    checkpoints,
    damage_in,
    is_one_checkpoint,
    problem_with,
    readable,
    require_checkpoint,
)
from trimegatron.config import Config
from trimegatron.config.schedule import Schedule
from trimegatron.errors import CheckpointError, UserError
from trimegatron.mesh import Mesh


def choose_checkpoint(config: Config, mesh: Mesh, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, the same on every rank, or None for a fresh start.

    It is read through first, each rank its share of the files; one that is not what was saved is passed over as an
    incomplete one is, unless it is the one asked for.

    Raises:
        CheckpointError: there is none that can be used.
    """
    damaged: list[Path] = []
    while True:
        folder = find_together(config, mesh, say, damaged)
        if folder is None or config.checkpoint.no_verify_checkpoint:
            return folder
        with readable(folder):
            answers = mesh.gather(damage_in(folder, share=mesh.world.rank, shares=mesh.world.size))
        damage = next(filter(None, answers), None)
        if damage is None:
            return folder
        if config.checkpoint.ckpt_step is not None or is_one_checkpoint(Path(config.checkpoint.load or "")):
            raise CheckpointError(f"{damage}. Go on from another one with --ckpt-step")
        say(f"checkpoint {folder} is passed over: {damage}")
        damaged.append(folder)


def find_together(config: Config, mesh: Mesh, say: Callable[[str], None], damaged: list[Path]) -> Path | None:
    """What :func:`find_load` finds, or raises, on the first rank, on every rank: they are waiting for its word."""

    def answer() -> str:
        try:
            return json.dumps({"folder": str(find_load(config, say, damaged) or "")})
        except (UserError, OSError) as error:
            return json.dumps({"error": str(error)})

    found = json.loads(mesh.decide(f"which checkpoint to load, {len(damaged)} being damaged", answer))
    if "error" in found:
        raise CheckpointError(found["error"])
    return Path(found["folder"]) if found["folder"] else None


def find_load(config: Config, say: Callable[[str], None], damaged: Collection[Path] = ()) -> Path | None:
    """The checkpoint that ``--load`` means, or None for a fresh start; not one of those found ``damaged``.

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
    return require_checkpoint(root, log=say, without=damaged)


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
