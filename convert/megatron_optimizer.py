"""What an optimizer of Megatron-LM's saved, in the order of its rank's parameters.

Parameters have numbers: first all that are decayed, then the others, each in the order of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimegatron.convert.lazy import LazyTensor
from trimegatron.convert.megatron_files import RankFile
from trimegatron.convert.source import MASTER
from trimegatron.errors import CheckpointError
from trimegatron.tensor_parallel.parameter import ParameterSpec

MOMENTS = {"exp_avg": "optimizer.exp_avg", "exp_avg_sq": "optimizer.exp_avg_sq"}


@dataclass(frozen=True)
class OptimizerState:
    """One rank's optimizer."""

    step: int
    scaler: dict[str, float]
    tensors: dict[str, list[LazyTensor]]
    """Kind → tensors, in the order of the rank's parameters."""


def read_optimizer(file: RankFile, parameters: Sequence[tuple[str, ParameterSpec]]) -> OptimizerState | None:
    """The optimizer of one rank, None where none was saved.

    Args:
        parameters: our names of the rank's parameters and where they lie, in the order of its model.

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
    order, groups = numbering(file, inner["param_groups"], parameters)
    state = inner["state"]
    if sorted(state) != sorted(order):
        raise refused(file, f"it has {len(state)} states for {len(order)} parameters")
    tensors = {}
    for key, kind in MOMENTS.items():
        if any(not isinstance(state[number].get(key), LazyTensor) for number in order):
            raise refused(file, f"a parameter has no {key}: only Adam's moments can be taken along")
        tensors[kind] = [state[number][key] for number in order]
    if "fp32_from_fp16_params" in saved:
        tensors[MASTER] = masters(file, saved["fp32_from_fp16_params"], groups, len(order))
    for kind, found in tensors.items():
        for (name, spec), tensor, expected in zip(parameters, found, tensors["optimizer.exp_avg"], strict=True):
            if tensor.shape != expected.shape or len(tensor.shape) != len(spec.global_shape):
                raise refused(file, f"{kind} of {name} is {list(tensor.shape)}")
    return OptimizerState(step_of(file, inner), scaler_of(saved, file.args), tensors)


def numbering(
    file: RankFile, groups: Sequence[Mapping[str, Any]], parameters: Sequence[tuple[str, ParameterSpec]]
) -> tuple[list[int], list[list[int]]]:
    """The number of each parameter in the optimizer, and for each group the parameters' positions in the model."""
    order = [-1] * len(parameters)
    members = []
    for i, group in enumerate(groups):
        decays = group["wd_mult"] > 0 if "wd_mult" in group else i == 0
        mine = [k for k, (_, spec) in enumerate(parameters) if (len(spec.global_shape) > 1) == decays]
        if len(mine) != len(group["params"]):
            raise refused(file, f"group {i} has {len(group['params'])} parameters where {len(mine)} were expected")
        for k, number in zip(mine, group["params"], strict=True):
            order[k] = number
        members.append(mine)
    if sorted(order) != sorted({number for number in order if number >= 0}):
        raise refused(file, "its groups do not hold every parameter once")
    return order, members


def masters(file: RankFile, saved: Any, groups: list[list[int]], count: int) -> list[LazyTensor]:
    """The fp32 main weights, listed by group, in the order of the model."""
    found: list[LazyTensor | None] = [None] * count
    if [len(group) for group in saved] != [len(group) for group in groups]:
        raise refused(file, "its fp32 main weights are not those of its groups")
    for positions, tensors in zip(groups, saved, strict=True):
        for k, tensor in zip(positions, tensors, strict=True):
            found[k] = tensor
    return [tensor for tensor in found if tensor is not None]


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
