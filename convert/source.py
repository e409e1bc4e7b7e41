"""What every conversion goes through: a run under our names, none of its tensors read yet.

A reader makes a :class:`Source` of a checkpoint of ours, of Megatron-LM's or of a Hugging Face model; a writer makes
one of these of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from trimegatron.checkpoint.checkpoint import CheckpointState, Progress, software_versions
from trimegatron.checkpoint.contents import saved_config
from trimegatron.checkpoint.directory import TOKENIZER, checkpoint_folder, damage_in, require_checkpoint
from trimegatron.checkpoint.stored import stored_pieces, whole_tensor
from trimegatron.config import Config
from trimegatron.convert.ledger import check_shapes, match
from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor
from trimegatron.mesh import Axis
from trimegatron.model.build import global_shapes, model_spec
from trimegatron.model.gpt import GPTStage
from trimegatron.tensor_parallel.parameter import ParameterSpec, spec_of
from trimegatron.tokenizer import Tokenizer, load_tokenizer

MODEL, MASTER = "model", "optimizer.master"
MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")


@dataclass(frozen=True)
class Source:
    """A run: its state, its tokenizer, and its tensors by kind (``MODEL``, ``MASTER``, ``MOMENTS``) and name."""

    where: Path
    config: Config
    """As for one process."""
    state: CheckpointState
    tokenizer: Tokenizer
    tensors: dict[str, dict[str, LazyTensor]]
    notes: list[str] = field(default_factory=list)
    """What the user should know of what could not be taken along."""
    verify: Callable[[], None] | None = None
    """Reads the files once and raises CheckpointError where they are damaged."""

    @property
    def model(self) -> dict[str, LazyTensor]:
        return self.tensors[MODEL]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights.

        Raises:
            CheckpointError: they are of several.
        """
        dtypes = {tensor.dtype for tensor in self.model.values()}
        if len(dtypes) != 1:
            raise CheckpointError(f"{self.where} mixes {', '.join(sorted(map(str, dtypes)))}; a model of ours has one")
        return dtypes.pop()

    def without_optimizer(self) -> Source:
        return replace(self, tensors={MODEL: self.model})


def new_state(
    config: Config,
    *,
    progress: Progress | None = None,
    optimizer_step: int = 0,
    scaler: dict[str, float] | None = None,
    data: dict | None = None,
) -> CheckpointState:
    """``state.json`` of a run that another program began."""
    return CheckpointState(
        progress or Progress(),
        optimizer_step,
        scaler or {"scale": 1.0},
        config.to_dict(),
        data or {},
        {},
        software_versions(),
    )


class LocalParameter(NamedTuple):
    """A rank's piece of a parameter."""

    spec: ParameterSpec
    shape: tuple[int, ...]
    """Padding included."""


def parameters_of(
    config: Config, *, layers: range | None = None, tensor: Axis | None = None, is_first: bool = True, is_last=True
) -> dict[str, LocalParameter]:
    """What one rank holds of each parameter of a stage: the model itself says so, built without memory."""
    spec = model_spec(config, tensor=tensor or Axis(), device=torch.device("meta"))
    layers = range(config.model.num_layers) if layers is None else layers
    stage = GPTStage(spec, layers, is_first=is_first, is_last=is_last)
    return {name: LocalParameter(spec_of(p), tuple(p.shape)) for name, p in stage.named_parameters()}


def read_checkpoint(root: Path, ckpt_step: int | None = None) -> Source:
    """The newest complete checkpoint of ours under ``root``, or that of an iteration, of any layout.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = require_checkpoint(root if ckpt_step is None else checkpoint_folder(root, ckpt_step))
    state = CheckpointState.read(folder)
    config = saved_config(folder)
    shapes = global_shapes(config)
    kinds: dict[str, dict[str, LazyTensor]] = {}
    foreign = []
    for name, pieces in stored_pieces(folder).items():
        kind = next((kind for kind in (MODEL, MASTER, *MOMENTS) if name.startswith(f"{kind}.")), None)
        if kind is None:
            foreign.append(name)
            continue
        kinds.setdefault(kind, {})[name.removeprefix(f"{kind}.")] = whole_tensor(folder, name, pieces)
    if foreign or MODEL not in kinds:
        raise CheckpointError(f"{folder} holds {', '.join(foreign) or 'no weights'}; it is not a checkpoint of a model")
    tensors = {}
    for kind, found in kinds.items():
        tensors[kind] = match(found, lambda name: name, shapes, where=f"{folder} ({kind})")
        check_shapes({name: tensor.shape for name, tensor in found.items()}, shapes, where=folder)

    def verify() -> None:
        damage = damage_in(folder)
        if damage is not None:
            raise CheckpointError(damage)

    return Source(folder, config, state, load_tokenizer(folder / TOKENIZER), tensors, verify=verify)
