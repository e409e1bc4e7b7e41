"""The tensors of a torch_dist checkpoint of Megatron-LM's under our names: they are global, with all layers in one."""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch

from trimegatron.config import Config
from trimegatron.convert.ledger import check_shapes, match
from trimegatron.convert.megatron_files import RankFile
from trimegatron.convert.megatron_names import WORDS, our_name
from trimegatron.convert.megatron_optimizer import MOMENTS, OptimizerState, scaler_of, step_of
from trimegatron.convert.source import MASTER, MODEL
from trimegatron.convert.torch_dist import Piece, Place, StoredTensor, TorchDist
from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor, assemble, cast, is_equal, reshaped, row_of
from trimegatron.model.build import global_shapes

OPTIMIZER = "optimizer."
STATES = {f"{OPTIMIZER}state.{theirs}.": kind for theirs, kind in MOMENTS.items()} | {
    f"{OPTIMIZER}state.fp32_param.": MASTER,
    f"{OPTIMIZER}state.param.": MASTER,
}
"""Starts of the names of an optimizer's tensors, and our kind; ``param`` is of the distributed one."""
BUCKETS = f"{OPTIMIZER}distributed."
"""The distributed optimizer's slices of its buffers."""
STACKED = re.compile(r"decoder\.layers\.(?=\D)(.+)")
OBJECTS = re.compile(r"(common_state|rng_state|rerun_state_machine_state|optimizer\..+|.+\._extra_state)/shard_.+")
"""What is no tensor and not needed here: settings, random states, Transformer Engine's."""

Tensors = dict[str, dict[str, LazyTensor]]
"""By kind and our name."""


def read_whole(
    dist: TorchDist, common: RankFile, config: Config, *, with_optimizer: bool
) -> tuple[Tensors, OptimizerState | None]:
    """Every tensor, and what else the optimizer holds; None where there is none or ``with_optimizer`` is off.

    Raises:
        CheckpointError: a tensor has no place, is missing or of another size, or the optimizer's state is of a form
            that is not read here.
    """
    stored: dict[str, dict[str, StoredTensor]] = {MODEL: {}}
    foreign = []
    for name, tensor in dist.tensors.items():
        if not name.startswith(OPTIMIZER):
            stored[MODEL][name] = tensor
        elif with_optimizer:
            start = next((start for start in STATES if name.startswith(start)), None)
            if start is None:
                foreign.append(name)
            else:
                stored.setdefault(STATES[start], {})[name.removeprefix(start)] = tensor
    saved = common.content.get("optimizer") if with_optimizer else None
    if any(name.startswith(BUCKETS) for name in foreign):
        raise refused(
            dist,
            "it is that of a distributed optimizer as buckets, cut without regard to parameters. Let Megatron-LM save "
            "with --dist-ckpt-optim-fully-reshardable",
        )
    if foreign:
        raise refused(dist, f"it has {', '.join(foreign[:8])}")
    if (saved is None) != (stored.keys() == {MODEL}):
        raise refused(dist, "it has " + ("tensors and no settings" if saved is None else "settings and no tensors"))
    tensors = {kind: under_our_names(dist, kind, named, common, config) for kind, named in stored.items()}
    if saved is None:
        return tensors, None
    inner = saved.get("optimizer", saved) if isinstance(saved, Mapping) else None
    if not isinstance(inner, Mapping) or "param_groups" not in inner:
        raise refused(dist, "it has no param_groups")
    step = inner.get("state", {}).get("common_step")
    steps = {"param_groups": inner["param_groups"], "state": {} if step is None else {0: {"step": step}}}
    state = OptimizerState(step_of(common, steps), scaler_of(saved, common.args), checked_states(dist, tensors))
    return {MODEL: tensors[MODEL]} | state.tensors, state


def under_our_names(
    dist: TorchDist, kind: str, stored: dict[str, StoredTensor], common: RankFile, config: Config
) -> dict[str, LazyTensor]:
    """The tensors of one kind, without the padding of the vocabulary. Raises CheckpointError."""
    where = dist.folder if kind == MODEL else f"{dist.folder} ({kind}; --no-load-optim converts the weights alone)"
    named: dict[str, LazyTensor] = {}
    for name, tensor in stored.items():
        shape = dist.tensors.get(name, tensor).shape  # of the weights, where this is an optimizer's
        if len(tensor.shape) == len(shape) + 1:
            pieces = unflattened(tensor, shape)
        else:
            shape, pieces = tensor.shape, tensor.open()
        stacked = STACKED.fullmatch(name)
        if stacked is None or len(shape) < 2:
            named[name] = assemble(shape or (1,), [(offsets or (0,), piece) for offsets, piece in pieces])
        else:
            named |= {f"decoder.layers.{i}.{stacked[1]}": layer for i, layer in enumerate(rows_of(shape, pieces))}
    shapes = global_shapes(config)
    found = match(named, partial(our_name, first_layer=0), shapes, where=where)
    padded = common.args.get("padded_vocab_size") or found[WORDS].shape[0]
    check_shapes(
        {name: tensor.shape for name, tensor in found.items()},
        shapes | {WORDS: (padded, *shapes[WORDS][1:])},
        where=where,
    )
    words = found[WORDS]
    return found | {WORDS: assemble(shapes[WORDS], [((0, 0), words)])}


def rows_of(shape: Place, pieces: list[Piece]) -> list[LazyTensor]:
    """Each row of a tensor as one of its own."""
    return [
        assemble(
            shape[1:],
            [
                (offsets[1:], row_of(piece, row - offsets[0]))
                for offsets, piece in pieces
                if offsets[0] <= row < offsets[0] + piece.shape[0]
            ],
        )
        for row in range(shape[0])
    ]


def unflattened(tensor: StoredTensor, shape: Place) -> list[Piece]:
    """The pieces of a tensor of ``shape`` that is stored as [cells along each dimension …, elements of a cell]: how the
    distributed optimizer of Megatron-Core 0.12 writes its state (``fully_sharded_model_space``). A cell is what a
    tensor-parallel rank holds of a parameter; its elements are cut anywhere, between data-parallel ranks.

    Raises:
        CheckpointError: it is not of that form.
    """
    *cells, length = tensor.shape
    size = tuple(n // max(1, count) for n, count in zip(shape, cells, strict=True))
    is_cut = all(n == count * part for n, count, part in zip(shape, cells, size, strict=True))
    if not is_cut or math.prod(size) != length or any(math.prod(chunk.shape[:-1]) != 1 for chunk in tensor.chunks):
        raise CheckpointError(f"{tensor.name} is stored as {list(tensor.shape)}, which is no form of {list(shape)}")
    found: dict[Place, list[Piece]] = defaultdict(list)
    for (*cell, first), part in tensor.open():
        found[tuple(cell)].append(((first,), reshaped(part, part.shape[-1:])))
    return [
        (tuple(map(operator.mul, cell, size)), reshaped(assemble((length,), parts), size))
        for cell, parts in found.items()
    ]


def checked_states(dist: TorchDist, tensors: Tensors) -> Tensors:
    """The optimizer's kinds as ours: fp32, and no main weights where the model's are fp32 and so the same.

    Raises:
        CheckpointError: a kind is missing or not of floating-point numbers, or the two weights differ.
    """
    model = tensors[MODEL]
    is_fp32 = all(tensor.dtype == torch.float32 for tensor in model.values())
    expected = [*MOMENTS.values(), *(() if is_fp32 else (MASTER,))]
    missing = [kind for kind in expected if kind not in tensors]
    wrong = sorted(
        f"{kind}.{name} is {tensor.dtype}"
        for kind in tensors.keys() - {MODEL}
        for name, tensor in tensors[kind].items()
        if not tensor.dtype.is_floating_point
    )
    wrong += [
        f"the main weights of {name} are not the model's"
        for name, tensor in (tensors.get(MASTER, {}) if is_fp32 else {}).items()
        if not is_equal(tensor, model[name])
    ]
    if missing or wrong:
        raise refused(dist, "; ".join([*(f"there is no {kind}" for kind in missing), *wrong[:8]]))
    return {kind: {name: cast(t, torch.float32) for name, t in tensors[kind].items()} for kind in expected}


def refused(dist: TorchDist, why: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer state in {dist.folder} cannot be taken along: {why}. --no-load-optim converts the weights alone"
    )


def left_out(dist: TorchDist) -> list[str]:
    """A line for what the checkpoint holds that is no tensor and not known here."""
    names = [name for name in dist.objects if not OBJECTS.fullmatch(name)]
    return [f"left out, as no weights: {', '.join(names)}"] if names else []
