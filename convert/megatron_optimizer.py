"""What an optimizer of Megatron-LM's saved, in the order of its rank's parameters.

Parameters have numbers: first all that are decayed, then the others, each in the order of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimegatron.convert.megatron_files import RankFile
from trimegatron.convert.source import MASTER, LocalParameter
from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor, cast

MOMENTS = {"exp_avg": "optimizer.exp_avg", "exp_avg_sq": "optimizer.exp_avg_sq"}


@dataclass(frozen=True)
class OptimizerState:
    """One rank's optimizer."""

    step: int
    scaler: dict[str, float]
    tensors: dict[str, dict[str, LazyTensor]]
    """Kind → name of the parameter → tensor, in fp32."""


def read_optimizer(file: RankFile, parameters: Mapping[str, LocalParameter]) -> OptimizerState | None:
    """The optimizer of one rank, None where none was saved.

    Args:
        parameters: what the rank holds, by our names, in the order of its model.

    Raises:
        CheckpointError: it is of a form that is not read here.
    """
    if any(file.path.parent.parent.glob("mp_rank_*/optim.pt")) or any(file.path.parent.glob("distrib_optim.pt")):
        raise CheckpointError(
            f"{file.path.parent.parent} holds the state of a distributed optimizer (optim.pt), whose slices are cut "
            "without regard to parameters and are not read here. --no-load-optim converts the weights alone"
        )
    saved = file.content.get("optimizer")
    if saved is None:
        return None
    inner = saved.get("optimizer", saved)
    if not isinstance(inner, Mapping) or not {"state", "param_groups"} <= inner.keys():
        raise refused(file, "it has no state and param_groups")
    groups = groups_of(file, inner["param_groups"], parameters)
    numbers = [
        number
        for group, names in zip(inner["param_groups"], groups, strict=True)
        for number, _ in zip(group["params"], names, strict=True)
    ]
    names = [name for group in groups for name in group]
    state = inner["state"]
    if sorted(state) != sorted(numbers) or len(set(names)) != len(parameters):
        raise refused(file, f"it has {len(state)} states for {len(parameters)} parameters")
    found: dict[str, list[Any]] = {kind: [state[n].get(key) for n in numbers] for key, kind in MOMENTS.items()}
    if "fp32_from_fp16_params" in saved:
        found[MASTER] = [tensor for group in saved["fp32_from_fp16_params"] for tensor in group]
    tensors: dict[str, dict[str, LazyTensor]] = {}
    for kind, values in found.items():
        shapes = [value.shape if isinstance(value, LazyTensor) else None for value in values]
        if shapes != [parameters[name].shape for name in names]:
            raise refused(file, f"its {kind} is not of the parameters' sizes")
        tensors[kind] = {name: cast(value, torch.float32) for name, value in zip(names, values, strict=True)}
    return OptimizerState(step_of(file, inner), scaler_of(saved, file.args), tensors)


def groups_of(
    file: RankFile, groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, LocalParameter]
) -> list[list[str]]:
    """The parameters of each group: those that are decayed or those that are not, in the order of the model."""
    members = []
    for i, group in enumerate(groups):
        decays = group["wd_mult"] > 0 if "wd_mult" in group else i == 0
        mine = [name for name, place in parameters.items() if (len(place.shape) > 1) == decays]
        if len(mine) != len(group["params"]):
            raise refused(file, f"group {i} has {len(group['params'])} parameters where {len(mine)} were expected")
        members.append(mine)
    return members


def step_of(file: RankFile, inner: Mapping[str, Any]) -> int:
    """Updates made: in the groups (Apex), or with each parameter (torch)."""
    said = [group["step"] for group in inner["param_groups"] if "step" in group]
    said += [state["step"] for state in inner["state"].values() if "step" in state]
    steps = {int(step.load()[0]) if isinstance(step, LazyTensor) else int(step) for step in said}
    if len(steps) != 1:
        raise refused(file, f"it is at {len(steps)} different steps")
    return steps.pop()


def scaler_of(saved: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, float]:
    """The loss scale as ours keeps it."""
    scaler = saved.get("grad_scaler") or {}
    scale = scaler.get("scale", args.get("loss_scale") or 1.0)
    state = {"scale": float(scale.load()[0]) if isinstance(scale, LazyTensor) else float(scale)}
    if "growth_tracker" in scaler:
        state |= {"clean_steps": scaler["growth_tracker"], "tolerance": scaler["hysteresis_tracker"]}
    return state


def refused(file: RankFile, why: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer state in {file.path} cannot be taken along: {why}. --no-load-optim converts the weights alone"
    )
